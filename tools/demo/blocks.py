"""The building blocks that the model is made of: ours, and what they replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import npu_attn_res
import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256  # the vocabulary


class PlainRMSNorm(nn.Module):
    """RMSNorm as a model without this repository has it: the formula.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """y for x [..., D]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class PlainBlockAttnRes(nn.Module):
    """Block AttnRes as a model without this repository has it: the formula, over all blocks at every input.

    Args:
        hidden_size: size of the last dimension.
        n_inputs: how many inputs a forward pass asks for.
        block_size: layers of a block.
        eps: added to the mean square.
    """

    def __init__(self, hidden_size: int, n_inputs: int, block_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.block_size = block_size
        self.eps = eps
        self.query = nn.Parameter(torch.zeros(n_inputs, hidden_size))
        self.rms_weight = nn.Parameter(torch.ones(n_inputs, hidden_size))

    def start(self, embedding: Tensor) -> PlainDepth:
        """The state of one forward pass."""
        return PlainDepth(self, embedding)


class PlainDepth:
    """What `npu_attn_res.BlockAttnRes.start` returns, by the formula."""

    def __init__(self, weights: PlainBlockAttnRes, embedding: Tensor) -> None:
        self.weights = weights
        self.blocks = [embedding]
        self.layer = 0

    def input(self) -> Tensor:
        """The input [..., D] of the next layer: blocks weighted by a softmax over their scores."""
        v = torch.stack(self.blocks)
        r = torch.rsqrt(v.square().mean(-1, keepdim=True) + self.weights.eps)
        score = (v * r * self.weights.rms_weight[self.layer] * self.weights.query[self.layer]).sum(-1, keepdim=True)
        return (torch.softmax(score, dim=0) * v).sum(0)

    def add(self, output: Tensor) -> None:
        """Takes the output [..., D] of that layer."""
        if self.layer % self.weights.block_size == 0:
            self.blocks.append(output)
        else:
            self.blocks[-1] = self.blocks[-1] + output
        self.layer += 1


def plain_loss(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of hidden [B, T, D] @ head.T [D, V] for targets [B, T], by way of all logits."""
    return functional.cross_entropy(functional.linear(hidden, head).flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Blocks:
    """One implementation of each building block that this repository has an operator for.

    An operator that joins the demo is one more field here, with its entries in `OURS` and `PLAIN` and its use in model.py.
    The two must agree in parameter names: both models start from one state dict.

    Attributes:
        name: how the report calls them.
        norm: makes a norm from a hidden size.
        embedding: makes an embedding from the number of rows and a hidden size.
        depth: makes the attention over depth from a hidden size, the number of inputs and the layers of a block.
        loss: the mean cross entropy of hidden states, the head's weight and targets.
    """

    name: str
    norm: Callable[[int], nn.Module]
    embedding: Callable[[int, int], nn.Embedding]
    depth: Callable[[int, int, int], nn.Module]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]


OURS = Blocks(
    "our operators",
    npu_rms_norm.RMSNorm,
    npu_embedding.Embedding,
    npu_attn_res.BlockAttnRes,
    npu_fused_linear_cross_entropy.fused_linear_cross_entropy,
)
PLAIN = Blocks("plain PyTorch", PlainRMSNorm, nn.Embedding, PlainBlockAttnRes, plain_loss)


def minimum_bytes(kernel: str, constants: Mapping[str, Any], elements: int, itemsize: int) -> int | None:
    """What a launch must move at least, where its constants say it: each tensor of rows and each parameter once.

    Args:
        kernel: its name.
        constants: its compile-time arguments.
        elements: of one tensor of rows, M x D.
        itemsize: bytes of an element.

    Returns:
        Bytes; 0 for a kernel that only ends another one, None where the number of blocks, or the indices, decide.
    """
    width = constants.get("N", 0)
    elements_moved = {
        "forward_kernel": 2 * elements + width,  # x -> y, and the weight
        "backward_kernel": 3 * elements + 2 * width,  # dy, x -> dx, weight and its gradient
        "sum_partials_kernel": 0,  # ends the backward
        "gather_rows_kernel": 2 * elements,  # rows of the table -> rows
    }.get(kernel)
    return None if elements_moved is None else elements_moved * itemsize
