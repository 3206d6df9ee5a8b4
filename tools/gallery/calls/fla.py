"""Calls of flash-linear-attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..measure import Case
from ..sources import fla
from .entry import BF16, Entry, collector, layer_norm, randn, rotated, swiglu

ENTRIES: list[Entry] = []
_entry = collector("fla", ENTRIES)


@_entry("l2norm forward", "4096 x 128 bf16")
def _() -> Case:
    forward = fla("modules.norm.triton_ascend.l2norm").l2norm_fwd_npu
    inputs = [randn(4096, 128, dtype=BF16)]
    return Case(inputs, lambda x: forward(x)[0], lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())


@_entry("layer_norm forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = fla("modules.norm.triton_ascend.layernorm").layer_norm_fwd_npu
    return layer_norm(lambda *given: forward(*given)[0], 2048, 4096, BF16)


@_entry("swiglu forward", "2048 x 4096 bf16")
def _() -> Case:
    forward = fla("modules.activations.triton_ascend").swiglu_fwd_npu
    return swiglu(lambda x, y: forward(x, y))


@_entry("rotary forward", "2 x 512 x 16 x 128 bf16")
def _() -> Case:
    forward = fla("modules.rotary.triton_ascend").rotary_embedding_fwdbwd_npu
    angle = randn(512, 64, seed=2)
    inputs = [randn(2, 512, 16, 128, dtype=BF16), angle.cos().to(BF16), angle.sin().to(BF16)]
    return Case(
        inputs, lambda *given: forward(*given), lambda x, cos, sin: rotated(x, cos[None, :, None], sin[None, :, None])
    )


@_entry("cumsum within chunks of 64", "2 x 1024 x 16 fp32")
def _() -> Case:
    forward = fla("ops.utils.triton_ascend.cumsum").chunk_local_cumsum_scalar_npu
    return Case(
        [randn(2, 1024, 16)],
        lambda g: forward(g, 64),
        lambda g: g.view(2, 16, 64, 16).cumsum(2).reshape(g.shape),
    )


@_entry("solve_tril, inverses of 64 x 64", "1 x 512 x 4 x 64 fp32")
def _() -> Case:
    forward = fla("ops.utils.triton_ascend.solve_tril").solve_tril_npu
    strict = torch.ones(64, 64).tril(-1)
    a = 0.1 * randn(1, 8, 4, 64, 64) * strict

    def reference(given: Tensor) -> Tensor:
        blocks = given.view(1, 8, 64, 4, 64).transpose(2, 3)
        found = torch.linalg.inv(torch.eye(64, dtype=given.dtype) + blocks)
        return found.transpose(2, 3).reshape(given.shape)

    return Case([a.transpose(2, 3).reshape(1, 512, 4, 64).contiguous()], lambda a: forward(a), reference)


@_entry("chunk_fwd_h, states of linear attention", "1 x 512 x 4 x 64 bf16")
def _() -> Case:
    forward = fla("ops.common.backends.triton_ascend.chunk_h").chunk_fwd_h_npu

    def reference(k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.view(1, 8, 64, 4, 64) for t in (k, v))
        after = torch.einsum("bnchk,bnchv->bnhkv", k, v).cumsum(1)
        return torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1)

    inputs = [randn(1, 512, 4, 64, dtype=BF16, seed=i) for i in (0, 1)]
    return Case(inputs, lambda k, v: forward(k, v)[0], reference)


@_entry("chunk_scaled_dot_kkt", "1 x 512 x 4 x 64 bf16")
def _() -> Case:
    forward = fla("ops.common.backends.triton_ascend.chunk_scaled_dot_kkt").chunk_scaled_dot_kkt_fwd_npu

    def reference(k: Tensor, beta: Tensor) -> Tensor:
        k, beta = k.view(1, 8, 64, 4, 64), beta.view(1, 8, 64, 4)
        found = torch.einsum("bnchk,bndhk->bnchd", k * beta[..., None], k)
        return (found * torch.ones(64, 64).tril(-1)[None, None, :, None]).reshape(1, 512, 4, 64)

    inputs = [randn(1, 512, 4, 64, dtype=BF16), randn(1, 512, 4, dtype=BF16, seed=1)]
    return Case(inputs, lambda k, beta: forward(k, beta=beta), reference)


@_entry("fused_cross_entropy forward", "512 x 32000 bf16")
def _() -> Case:
    forward = fla("modules.fused_cross_entropy.triton_ascend").fused_cross_entropy_forward_npu
    return Case(
        [randn(512, 32000, dtype=BF16), torch.arange(512) * 61],
        lambda logits, target: forward(logits, target)[0],
        lambda logits, target: functional.cross_entropy(logits, target, reduction="none"),
    )
