"""The two phases of Block AttnRes by kernels, and the gradient of the RMSNorm that may follow.

`merge` and the RMSNorm take whole rows; where those do not fit on chip, reference.py's formulas run as PyTorch's operators.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling import Device
from npu_tiling.launching.partials import add_partials
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from .. import reference
from ..reference import State, Statistics, Weights
from ..shape import Task
from .columns import KernelPasses
from .sources import Sources, rows_of
from .specs import Arguments, contiguous_weights, launch_spec, run_rows, weights_gradient, widest


def phase1(
    v: Sources, queries: Tensor, rms_weight: Tensor, eps: float, save: bool, device: Device
) -> tuple[State, Tensor | None, Tensor | None]:
    """o [T, S, D] with lse [T, S]; s [N, T, S] and r [N, T] where `save`."""
    like, width, n_layers, n_sources, n_tokens = v.like, v.width, len(queries), v.n_sources, v.n_tokens
    o = allocate(like, (n_tokens, n_layers, width), torch.float32)
    lse = allocate(like, (n_tokens, n_layers), torch.float32)
    score = allocate(like, (n_sources, n_tokens, n_layers), torch.float32) if save else None
    rstd = allocate(like, (n_sources, n_tokens), torch.float32) if save else None
    state = State(o, lse)
    if not n_tokens:
        return state, score, rstd
    queries, rms_weight = queries.contiguous(), rms_weight.contiguous()
    s_norm = 0 if rms_weight.dim() == 1 and n_layers > 1 else width
    layered = n_layers > 1 or device.kind == "cuda"
    task = Task.LAYERS if layered else Task.PHASE1
    base, table, aligned = v.at[:3]
    spec = launch_spec(device, task, width, like.dtype, layers=n_layers, row_stride=v.s_token, aligned=aligned)

    def arguments(chosen: Any, grid: int) -> Arguments:
        numbers = (n_sources, n_tokens, v.s_source, v.s_token)
        if layered:
            return (base, table, queries, rms_weight, o, score, rstd, lse), (*numbers, s_norm, eps)
        tensors = (base, table, queries, rms_weight, None, o, None, score, rstd, lse, None)
        return (*tensors, *(None,) * 5), (*numbers, eps, eps, n_sources, 0, 0, 0)

    if run_rows(spec, n_tokens, arguments):
        return state, score, rstd
    return reference.phase1(KernelPasses(v, device), queries, rms_weight, eps)


def merge(
    state: State,
    partial: Tensor,
    x: Tensor | None,
    weights: Weights,
    eps: float,
    norm_eps: float,
    save: bool,
    device: Device,
) -> tuple[Tensor, Tensor | None, Tensor | None, Statistics]:
    """h, y and partial + x [..., D], y and the sum None where not asked for, and the statistics [T] where `save`."""
    n_tokens = state.lse.numel()
    h = allocate_like(partial)
    y = None if weights.output is None else allocate_like(h)
    joined = None if x is None else allocate_like(h)
    wanted = (save, save, False, save and y is not None)
    statistics = Statistics(*(allocate(h, (n_tokens,), torch.float32) if want else None for want in wanted))
    if not n_tokens:
        return h, y, joined, statistics
    (o, s_o), (p, s_p), (added, s_added) = rows_of(state.o), rows_of(partial), (None, 0) if x is None else rows_of(x)
    weights, lse = contiguous_weights(weights), state.lse.contiguous()

    def arguments(chosen: Any, grid: int) -> Arguments:
        score, rstd, _, norm_rstd = statistics
        tensors = (o, lse, p, added, *weights, h, y, joined, score, rstd, norm_rstd)
        return tensors, (n_tokens, s_o, s_p, s_added, eps, norm_eps)

    spec = launch_spec(device, Task.MERGE, partial.shape[-1], widest(partial, x), row_stride=max(s_o, s_p, s_added))
    if run_rows(spec, n_tokens, arguments):
        return h, y, joined, statistics
    return reference.merge(state, partial, x, weights, eps, norm_eps)


def merge_backward(
    dh: Tensor,
    dpartial: Tensor | None,
    state: State,
    partial: Tensor,
    weights: Weights,
    statistics: Statistics,
    needed: tuple[bool, bool],
    device: Device,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """do, dlse, the gradient of the (new) partial sum with `dpartial` added, and those of query and rms_weight."""
    width, n_tokens = partial.shape[-1], state.lse.numel()
    do, dv = allocate(dh, state.o.shape, torch.float32), allocate_like(partial)
    dlse = allocate(dh, state.lse.shape, torch.float32)
    if not n_tokens:
        return do, dlse, dv, torch.zeros_like(weights.query), torch.zeros_like(weights.norm)
    (rows, s_dh), (o, s_o), (p, s_p) = rows_of(dh), rows_of(state.o), rows_of(partial)
    added, s_added = (None, 0) if dpartial is None else rows_of(dpartial)
    weights, lse = contiguous_weights(weights), state.lse.contiguous()
    dg = None

    def arguments(chosen: Any, grid: int) -> Arguments:
        nonlocal dg
        dg = allocate(dh, (grid, width), torch.float32) if any(needed) else None
        read = (rows, added, o, lse, p, weights.query, weights.norm, *statistics[:2])
        return (*read, do, dlse, dv, dg), (n_tokens, s_dh, s_added, s_o, s_p)

    spec = launch_spec(device, Task.MERGE_BACKWARD, width, partial.dtype, row_stride=max(s_dh, s_added, s_o, s_p))
    if run_rows(spec, n_tokens, arguments):
        return do, dlse, dv, *weights_gradient(dg, weights, needed, device)
    return reference.merge_backward(dh, dpartial, state, partial, weights, statistics, needed)


def normalise_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, norm_rstd: Tensor, need_dweight: bool, device: Device
) -> tuple[Tensor, Tensor | None]:
    """The gradient of h, dh with it, fp32, contiguous, and that of the weight, where needed."""
    width, n_tokens = h.shape[-1], norm_rstd.numel()
    total = allocate(h, h.shape, torch.float32)
    if not n_tokens:
        return total, torch.zeros_like(weight)
    (rows, s_dy), (added, s_dh) = rows_of(dy), (None, 0) if dh is None else rows_of(dh)
    partials = None

    def arguments(chosen: Any, grid: int) -> Arguments:
        nonlocal partials
        partials = allocate(h, (grid, width), torch.float32) if need_dweight else None
        return (rows, added, h, weight.contiguous(), norm_rstd, total, partials), (n_tokens, s_dy, s_dh)

    spec = launch_spec(device, Task.NORM_BACKWARD, width, h.dtype, row_stride=max(s_dy, s_dh))
    if run_rows(spec, n_tokens, arguments):
        if partials is None:
            return total, None
        dweight = allocate_like(weight)
        add_partials(partials, dweight, device)
        return total, dweight
    return reference.normalise_backward(dy, dh, h, weight, norm_rstd.view(h.shape[:-1]))
