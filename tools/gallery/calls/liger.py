"""Calls of liger-kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..measure import Case
from ..sources import liger
from .entry import BF16, Entry, collector, layer_norm, randn, rms_norm, rms_reference, rotated, rows_of, swiglu

ENTRIES: list[Entry] = []
_entry = collector("liger", ENTRIES)


@_entry("rms_norm forward", "2048 x 4096 bf16")
def _() -> Case:
    apply = liger("rms_norm").LigerRMSNormFunction.apply
    return rms_norm(lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False))


@_entry("layer_norm forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = liger("layer_norm").layer_norm_forward
    return layer_norm(lambda x, w, b: forward(x, w, b, 1e-6)[0], 2048, 4096, BF16, 1e-6)


@_entry("softmax forward", "2048 x 4096 bf16")
def _() -> Case:
    apply = liger("softmax").LigerSoftmaxFunction.apply
    return Case(rows_of(1), apply, lambda x: x.softmax(-1))


@_entry("swiglu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = liger("swiglu").swiglu_forward
    return swiglu(lambda a, b: forward(a, b))


@_entry("geglu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = liger("geglu").geglu_forward
    inputs = rows_of(2)
    return Case(inputs, lambda a, b: forward(a, b), lambda a, b: functional.gelu(a, approximate="tanh") * b)


@_entry("rms_norm backward", "2048 x 2048 bf16")
def _() -> Case:
    apply = liger("rms_norm").LigerRMSNormFunction.apply

    def gradients(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def call(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
            x, w = x.detach().requires_grad_(True), w.detach().requires_grad_(True)
            return torch.autograd.grad(function(x, w), (x, w), dy)

        return call

    inputs = [randn(2048, 2048, dtype=BF16), randn(2048, dtype=BF16, seed=1), randn(2048, 2048, dtype=BF16, seed=2)]
    minimum = 2 * (2 * 2048 * 2048 + 2048) + sum(2 * t.numel() for t in inputs)  # with the forward, which runs before it
    forward = gradients(lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False))
    return Case(inputs, forward, gradients(rms_reference), minimum + 2 * 2048 * 2048)


@_entry("embedding forward", "16384 of 32000 x 768 fp32")
def _() -> Case:
    forward = liger("embedding").embedding_forward
    index = torch.randint(32000, (16384,), generator=torch.Generator().manual_seed(0))
    return Case(
        [randn(32000, 768), index],
        lambda table, index: forward(table, index),
        lambda table, index: table[index],
        minimum=4 * 2 * 16384 * 768 + 8 * 16384,
    )


@_entry("rope forward, q and k", "2 x 16 x 512 x 128 fp32")
def _() -> Case:
    apply = liger("rope").LigerRopeFunction.apply
    angle = randn(1, 512, 64, seed=2)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))
    q, k = (randn(2, 16, 512, 128, seed=i) for i in (0, 1))

    def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        half = (cos[:, None, :, :64], sin[:, None, :, :64])
        return rotated(q, *half), rotated(k, *half)

    return Case([q, k, cos, sin], lambda *given: apply(*given), reference)


@_entry("cross_entropy, loss and gradient", "512 x 32000 bf16")
def _() -> Case:
    forward = liger("cross_entropy").LigerCrossEntropyFunction
    logits, target = randn(512, 32000, dtype=BF16), torch.arange(512) * 61

    def call(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits.requires_grad_(True)
        loss = forward.apply(logits, target, None)[0]
        loss.backward()
        return loss.detach(), logits.grad

    def reference(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = logits.detach().requires_grad_(True)
        loss = functional.cross_entropy(logits, target)
        loss.backward()
        return loss.detach(), logits.grad

    return Case([logits, target], call, reference)


@_entry("group_norm forward", "8 x 64 x 1024 fp32, 8 groups")
def _() -> Case:
    forward = liger("group_norm").group_norm_forward
    inputs = [randn(8, 64, 1024), randn(64, seed=1), randn(64, seed=2)]
    return Case(
        inputs,
        lambda x, w, b: forward(x, 64, 8, w, b, 1e-6)[0].view(8, 64, 1024),
        lambda x, w, b: functional.group_norm(x, 8, w, b, 1e-6),
    )


@_entry("sparsemax forward", "256 x 1000 fp32")
def _() -> Case:
    apply = liger("sparsemax").LigerSparsemaxFunction.apply

    def reference(x: Tensor) -> Tensor:
        ordered = x.sort(-1, descending=True).values
        rank = torch.arange(1, 1001, dtype=x.dtype)
        support = (1 + rank * ordered > ordered.cumsum(-1)).sum(-1, keepdim=True)
        tau = (ordered.cumsum(-1).gather(-1, support - 1) - 1) / support
        return (x - tau).clamp(min=0)

    return Case([randn(256, 1000)], lambda x: apply(x, -1), reference)
