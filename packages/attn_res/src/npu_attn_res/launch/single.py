"""`attn_res` by kernels: whole rows, one launch each way. Rows that do not fit on chip: columns.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from .. import reference, tiling
from ..reference import Statistics, Weights
from ..shape import Task
from .columns import KernelPasses
from .sources import Sources, in_tables, rows_of
from .specs import Arguments, contiguous_weights, launch_spec, run_rows, weights_gradient, widest


class Update(NamedTuple):
    """What happens to the prefix before its sources are mixed.

    Attributes:
        x: is added to it; None: nothing is.
        joined: where the sum goes; None where there is no x.
        append: whether it is written behind the other sources, where those are one tensor.
    """

    x: Tensor | None
    joined: Tensor | None
    append: bool


NO_UPDATE = Update(None, None, append=False)


def forward(
    v: Sources,
    weights: Weights,
    eps: float,
    norm_eps: float,
    dtype: torch.dtype,
    save: bool,
    device: Device,
    update: Update = NO_UPDATE,
) -> tuple[Tensor, Tensor | None, Statistics] | None:
    """h [..., D] in `dtype`, y where there is a weight for it, and statistics where `save`.

    None where whole rows do not fit on chip and there is a prefix.
    """
    like, n_tokens = v.like, v.n_tokens
    h = allocate(like, v.shape, dtype)
    y = None if weights.output is None else allocate_like(h)
    score = rstd = lse = norm_rstd = None
    by_token = save and keeps_by_token(like, h.dtype, v.width, v.n_rows, device, prefix=v.prefix.rows is not None)
    if save:
        score, rstd = (_allocate_statistic(h, v.n_rows, n_tokens, by_token=by_token) for _ in range(2))
        lse = allocate(h, (n_tokens,), torch.float32)
        norm_rstd = None if y is None else allocate(h, (n_tokens,), torch.float32)
    statistics = Statistics(score, rstd, lse, norm_rstd)
    if not n_tokens:
        return h, y, statistics
    (base, table, aligned, others, *_), width, prefix = v.at, v.width, v.prefix
    x, s_x = (None, 0) if update.x is None else rows_of(update.x)
    joined, s_joined = (None, 0) if update.joined is None else rows_of(update.joined)
    spec = launch_spec(
        device,
        Task.FORWARD,
        width,
        widest(h, like, prefix.rows, x),
        row_stride=max(v.s_token, prefix.stride, s_x, s_joined),
        n_sources=v.n_sources,
        prefix=prefix.rows is not None,
        normalised=y is not None,
        by_token=by_token,
        aligned=aligned,
    )
    with_prefix = (*prefix[:2], x, joined, base if update.append else None)
    strides = (v.n_sources, prefix.stride, s_x, s_joined)

    def arguments(chosen: Any, grid: int) -> Arguments:
        tensors = (base, table, *contiguous_weights(weights), h, y, score, rstd, lse)
        numbers = (v.n_sources, n_tokens, v.s_source, v.s_token)
        if device.kind == "cuda":
            return (*tensors, norm_rstd, *with_prefix, others), (*numbers, eps, norm_eps, *strides)
        return (*tensors, norm_rstd, *with_prefix), (*numbers, eps, norm_eps, *strides)

    if run_rows(spec, n_tokens, arguments):
        return h, y, statistics
    if prefix.rows is not None:
        return None
    h, y, statistics = reference.forward(KernelPasses(in_tables(v, device), device), weights, eps, norm_eps, h.dtype)
    return h.view(v.shape), None if y is None else y.view(v.shape), statistics


def keeps_by_token(like: Tensor, dtype: torch.dtype, width: int, n_sources: int, device: Device, *, prefix: bool) -> bool:
    """Whether a forward from sources of `like`'s dtype to h of `dtype` keeps statistics [tokens, sources]."""
    itemsize = max(like.dtype.itemsize, dtype.itemsize)
    return tiling.statistics_by_token(width, itemsize, n_sources, device, prefix=prefix)


def _allocate_statistic(like: Tensor, n_sources: int, n_tokens: int, *, by_token: bool) -> Tensor:
    """[n_sources, n_tokens]"""
    if by_token:
        return allocate(like, (n_tokens, n_sources), torch.float32).t()
    return allocate(like, (n_sources, n_tokens), torch.float32)


def backward(
    v: Sources,
    dh: Tensor,
    h: Tensor | None,
    weights: Weights,
    statistics: Statistics,
    needed: tuple[bool, bool],
    device: Device,
    djoined: Tensor | None = None,
    dprefix: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None] | None:
    """Writes the gradients of the sources and returns those of query and rms_weight, where needed.

    None where whole rows do not fit on chip and there is a prefix.

    Args:
        h: the forward's, where it was not rounded (fp32).
        djoined: a gradient that reaches the prefix from elsewhere.
        dprefix: where its whole gradient goes; None: it needs none.
    """
    if not v.n_tokens:
        return torch.zeros_like(weights.query), torch.zeros_like(weights.norm)
    dh, s_dh = rows_of(dh)
    weights = contiguous_weights(weights)
    score, rstd, lse, _ = statistics
    assert score is not None and rstd is not None
    (base, table, aligned, *_), (dv, dv_table, also_aligned, *_), width = v.at, v.gradients, v.width
    prefix = v.prefix
    added, s_added = (None, 0) if djoined is None else rows_of(djoined)
    dtype = v.like.dtype if prefix.rows is None else widest(dh, v.like, prefix.rows)
    dg = None

    def arguments(chosen: Any, grid: int) -> Arguments:
        nonlocal dg
        dg = allocate(dh, (chosen.partials(v.n_tokens), width), torch.float32) if needed[0] or needed[1] else None
        given = (dh,) if device.kind == "cuda" else (dh, h)
        ordered = (score.t(), rstd.t()) if chosen.shape.by_token else (score, rstd)
        kept = (*(statistic.contiguous() for statistic in ordered), lse)  # copied where they lie in the other order
        tensors = (*given, base, table, weights.query, weights.norm, *kept, dv, dv_table, dg)
        tensors += (*prefix[:2], added, dprefix)
        numbers = (v.n_sources, v.n_tokens, v.s_source, v.s_token, s_dh, v.n_sources, prefix.stride, s_added)
        if device.kind != "cuda":
            return tensors, numbers
        if chosen.cooperating:
            tensors += (allocate(dh, (chosen.words(v.n_tokens),), torch.int64).zero_(),)
        return (*tensors, v.at.others, v.gradients.others), (*numbers, v.gradients.needed)

    with_prefix = prefix.rows is not None
    by_token = h is None and keeps_by_token(v.like, v.like.dtype, width, v.n_rows, device, prefix=with_prefix)
    kept_dtype = dh.dtype if with_prefix else v.like.dtype  # a tile that keeps <dh, v_i> has no other row
    for order in (True, False) if by_token else (False,):
        spec = launch_spec(
            device,
            Task.BACKWARD,
            width,
            kept_dtype if order else dtype,
            row_stride=max(v.s_token, s_dh, prefix.stride, s_added),
            n_sources=v.n_sources,
            prefix=with_prefix,
            fp32_dh=dh.dtype == torch.float32,
            by_token=order,
            aligned=aligned and also_aligned,
        )
        if run_rows(spec, v.n_tokens, arguments):
            return weights_gradient(dg, weights, needed, device)
    if prefix.rows is not None:
        return None
    return reference.backward(
        KernelPasses(in_tables(v, device), device, need_dg=needed[0] or needed[1]), dh, weights, statistics, needed
    )
