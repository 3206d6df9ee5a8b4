"""The operators by PyTorch's own operators: on a CPU, and on a chip where rows of a bank do not fit in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from . import reference
from .calls import Backward, Forward, Phase1, Phase1Backward
from .passes import TorchPasses


def forward(call: Forward) -> tuple[Tensor | None, ...]:
    """h and y [..., D], the new prefix, and the statistics; None for what was not asked for."""
    prefix, x = call.prefix, call.layer_output
    if prefix is not None and x is not None:
        wide = statistics_dtype(torch.promote_types(prefix.dtype, x.dtype))
        total = (prefix.to(wide) + x.to(wide)).to(prefix.dtype)
        prefix = prefix.copy_(total) if call.in_place else total.contiguous()
    if call.append:
        assert prefix is not None
        _append(call, prefix)
    like = call.like
    h, y, *statistics = reference.forward(TorchPasses(call._replace(prefix=prefix)), call)
    shape = like.shape[1:] if call.stacked and prefix is None else like.shape
    new_prefix = None if x is None else prefix
    results = (h.view(shape), None if y is None else y.view(shape), new_prefix)
    return *results, *(statistics if call.save else (None, None, None, None))


def _append(call: Forward, block: Tensor) -> None:
    """Writes a block behind those that count, where there is room."""
    (blocks,) = call.blocks
    if call.device_count is None:
        blocks[call.n_blocks].copy_(block)
        return
    here = torch.arange(len(blocks), device=block.device).view(-1, *(1,) * block.dim()) == call.device_count.clamp(min=0)
    blocks.copy_(torch.where(here, block.to(blocks.dtype), blocks))


def backward(call: Backward, dh: Tensor) -> tuple[Sequence[Tensor | None], Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of blocks, prefix, query and rms_weight, from that of h; None for those that are not needed."""
    passes = TorchPasses(call)
    score, rstd = passes.counted(call.score, call.rstd)
    dquery, dnorm = reference.backward(passes, call._replace(score=score, rstd=rstd), dh)
    return passes.dv, passes.dprefix_sum, dquery, dnorm


def phase1(call: Phase1) -> tuple[Tensor, ...]:
    """o [T, S, D], lse [T, S], s [N, T, S] and r [N, T]."""
    return reference.phase1(TorchPasses(call), call)


def phase1_backward(call: Phase1Backward) -> tuple[Sequence[Tensor | None], Tensor | None, Tensor | None]:
    """The gradients of blocks, queries and rms_weight, None for those that are not needed."""
    passes = TorchPasses(call)
    dqueries, dnorm = reference.phase1_backward(passes, call)
    return passes.dv, dqueries, dnorm
