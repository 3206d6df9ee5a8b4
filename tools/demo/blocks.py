"""The building blocks that the model is made of: ours, and what they replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import npu_embedding
import npu_rms_norm
import torch
from torch import Tensor, nn

BYTES = 256  # the vocabulary


class PlainRMSNorm(nn.Module):
    """RMSNorm as a model without this repository has it: the formula, and a sum before it for the residual stream.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """y for x [..., D]; with a residual, y of the sum and the sum."""
        if residual is not None:
            x = x + residual
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return y if residual is None else (y, x)


@dataclass(frozen=True)
class Blocks:
    """One implementation of each building block that this repository has an operator for.

    An operator that joins the demo is one more field here, with its entries in `OURS` and `PLAIN`, its use in model.py,
    and its kernels in `minimum_bytes`. The two must agree in parameter names: both models start from one state dict.

    Attributes:
        name: how the report calls them.
        norm: makes a norm from a hidden size; it is called with x, or with x and the residual stream.
        embedding: makes an embedding from the number of rows and a hidden size.
    """

    name: str
    norm: Callable[[int], nn.Module]
    embedding: Callable[[int, int], nn.Embedding]


OURS = Blocks("our operators", npu_rms_norm.RMSNorm, npu_embedding.Embedding)
PLAIN = Blocks("plain PyTorch", PlainRMSNorm, nn.Embedding)


def minimum_bytes(kernel: str, constants: Mapping[str, Any], elements: int, itemsize: int) -> int | None:
    """What a launch must move at least: each tensor of rows once, each parameter once, nothing in between.

    Args:
        kernel: its name.
        constants: its compile-time arguments; tensors that were left out are among them, as None.
        elements: of one tensor of rows, M x D.
        itemsize: bytes of an element.

    Returns:
        Bytes; 0 for a kernel that only serves another one, None for a kernel that is not listed here.
    """
    width = constants.get("N", 0)
    residual = 2 * (constants.get("p_residual", True) is not None)  # the stream is read and written
    residual_gradient = constants.get("p_dsum", True) is not None
    elements_moved = {
        "forward_kernel": (2 + residual) * elements + width,  # x -> y, and the weight
        "backward_kernel": (3 + residual_gradient) * elements + 2 * width,  # dy, x -> dx, weight and its gradient
        "sum_partials_kernel": 0,  # ends the backward
        "gather_rows_kernel": 2 * elements,  # rows of the table -> rows
        "sum_runs_kernel": elements,  # dy -> sums; it and the next two write each row of the gradient once
        "add_partials_kernel": 0,  # ends the one before
        "store_zeros_kernel": BYTES * width,
    }.get(kernel)
    return None if elements_moved is None else elements_moved * itemsize
