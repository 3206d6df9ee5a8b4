"""A decoder of Attention Residuals in blocks under FSDP2, its layers compiled or not, with our operators and without.

Each layer mixes the outputs of earlier blocks twice, before attention and before the MLP, as models with Attention Residuals
in blocks do (Kimi K3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import torch
import torch.distributed as dist
from npu_attn_res import AttnResBank, AttnResResult
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from tools.bench_block import EPS, plain_loss, plain_mix, plain_norm

from .measuring import attempt
from .steps import Steps

IGNORED = -100
Blocks = list[Tensor]
Passed = tuple[
    Blocks, Tensor, Tensor | None
]  # finished blocks, the sum of outputs since the last of them, an output that is not added yet


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    width: int = 2048
    heads: int = 16
    key_heads: int = 4
    mlp: int = 8192
    layers: int = 8
    layers_of_a_block: int = 2
    vocabulary: int = 128256


TINY = Sizes(32, 4, 2, 64, 4, 2, 101)


@dataclass(frozen=True)
class Operators:
    """What the two implementations differ in.

    Attributes:
        embedding, norm: classes of modules.
        mix: Attention Residuals over blocks, a prefix and a layer's output, with the parameters of a module.
        loss: the mean cross entropy of x [T, D] @ head.T for targets [T].
    """

    embedding: Callable[[int, int], nn.Module]
    norm: Callable[[int, float], nn.Module]
    mix: Callable[[AttnResBank, Blocks, Tensor, Tensor | None], AttnResResult]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]


def _mix(weights: AttnResBank, blocks: Blocks, prefix: Tensor, output: Tensor | None) -> AttnResResult:
    found: AttnResResult = weights(blocks, None, prefix, layer_output=output)
    return found


def _plain_mix(weights: AttnResBank, blocks: Blocks, prefix: Tensor, output: Tensor | None) -> AttnResResult:
    if output is not None:
        prefix = prefix + output
    h = plain_mix([*blocks, prefix], weights.query, weights.rms_weight)
    return AttnResResult(h, plain_norm(h, weights.output_rms_weight), prefix, None)


OURS = Operators(
    npu_embedding.Embedding, npu_rms_norm.RMSNorm, _mix, npu_fused_linear_cross_entropy.fused_linear_cross_entropy
)
PLAIN = Operators(nn.Embedding, nn.RMSNorm, _plain_mix, plain_loss)
PROVIDERS = {
    "plain PyTorch": (PLAIN, False),
    "ours": (OURS, False),
    "plain PyTorch, compiled": (PLAIN, True),
    "ours, compiled": (OURS, True),
}


class Attention(nn.Module):
    """Causal, with fewer heads of keys than of queries; queries and keys are normalised."""

    def __init__(self, use: Operators, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.counts = [sizes.heads, sizes.key_heads, sizes.key_heads]
        self.qkv = nn.Linear(sizes.width, sum(self.counts) * self.size, bias=False)
        self.q_norm, self.k_norm = use.norm(self.size, EPS), use.norm(self.size, EPS)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.size)).split(self.counts, -2)  # [B, T, heads, size]
        q, k, v = (heads.transpose(1, 2) for heads in (self.q_norm(q), self.k_norm(k), v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_up = nn.Linear(sizes.width, 2 * sizes.mlp, bias=False)
        self.down = nn.Linear(sizes.mlp, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """See "In a decoder" in npu-attn-res's README."""

    def __init__(self, use: Operators, sizes: Sizes, begins_block: bool) -> None:
        super().__init__()
        self.mix, self.begins_block = use.mix, begins_block
        self.before_attention, self.before_mlp = AttnResBank(sizes.width, EPS), AttnResBank(sizes.width, EPS)
        self.attention, self.mlp = Attention(use, sizes), SwiGLU(sizes)

    def forward(self, blocks: Blocks, prefix: Tensor, output: Tensor | None) -> Passed:
        found = self.mix(self.before_attention, blocks, prefix, output)
        prefix, output = found.prefix, self.attention(found.normalized)
        if self.begins_block:
            blocks, prefix, output = [*blocks, prefix], output, None
        found = self.mix(self.before_mlp, blocks, prefix, output)
        return blocks, found.prefix, self.mlp(found.normalized)


class Loss(nn.Module):
    """The last mix, the head and the loss."""

    def __init__(self, use: Operators, sizes: Sizes) -> None:
        super().__init__()
        self.mix, self.loss = use.mix, use.loss
        self.last = AttnResBank(sizes.width, EPS)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, blocks: Blocks, prefix: Tensor, output: Tensor | None, target: Tensor) -> Tensor:
        x = self.mix(self.last, blocks, prefix, output).normalized
        return self.loss(x.flatten(0, 1), self.head.weight, target.flatten())


class Decoder(nn.Module):
    def __init__(self, use: Operators, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = use.embedding(sizes.vocabulary, sizes.width)
        begins = [layer % sizes.layers_of_a_block == 0 for layer in range(sizes.layers)]
        self.units = nn.ModuleList([*(Layer(use, sizes, begin) for begin in begins), Loss(use, sizes)])

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of each token's next one, tokens [B, T]."""
        *layers, loss = self.units
        passed: Passed = [], self.embedding(tokens), None
        for layer in layers:
            passed = layer(*passed)
        return loss(*passed, functional.pad(tokens[:, 1:], (0, 1), value=IGNORED))  # type: ignore[no-any-return]


def measure(rank: int, device: torch.device, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """What `Steps` measures, for each provider."""
    # Layers take different numbers of blocks: nearly each has a graph of its own.
    torch._dynamo.config.recompile_limit = 2 * Sizes.layers
    for name, (use, compiled) in PROVIDERS.items():
        yield attempt(name, partial(_train, use, compiled, rank, device, tiny))
        torch._dynamo.reset()


def _train(use: Operators, compiled: bool, rank: int, device: torch.device, tiny: bool) -> dict[str, Any]:
    sizes = TINY if tiny else Sizes()
    torch.manual_seed(0)
    with device:  # steps run outside of it: a default device slows every call of PyTorch on the host
        model = Decoder(use, sizes).to(torch.float32 if tiny else torch.bfloat16)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for name, unit in model.units.named_children():
        reshards = not isinstance(unit, Loss)  # the backward begins with the loss's weights
        if compiled:
            backend = "inductor" if device.type == "cuda" else "aot_eager"  # which needs no compiler of C++
            unit = torch.compile(unit, backend=backend, fullgraph=True, dynamic=False)  # type: ignore[assignment]
            model.units.register_module(name, unit)
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh)
    return Steps(model, model, rank, device, sizes.vocabulary, tiny).measured()
