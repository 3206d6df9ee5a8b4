"""`attn_res` by kernels: whole rows, one launch each way. Rows that do not fit on chip: split_d.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference, tiling
from ..reference import Statistics, Weights
from ..tiling import Kind
from .sources import Sources, in_tables, rows_of
from .specs import Arguments, contiguous_weights, row_spec, run_rows, sources_on_chip, weights_gradient, widest
from .split_d import Columns


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


# Columns from which on a forward beside a prefix takes one row a tile: of several CANN 8.5 sets a flag twice, by token.
_LEAST_BESIDE = 4448
NO_UPDATE = Update(None, None, False)


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

    None where whole rows do not fit on chip beside a prefix.
    """
    like, n_tokens = v.like, v.n_tokens
    h = allocate(like, v.shape, dtype)
    y = None if weights.output is None else allocate(h, v.shape, h.dtype)
    score = rstd = lse = norm_rstd = None
    by_token = save and keeps_by_token(v.like, h.dtype, v.width, v.n_rows, device, v.prefix.rows is not None)
    if save:
        score, rstd = (_allocate_statistic(h, v.n_rows, n_tokens, by_token) for _ in range(2))
        lse = allocate(h, (n_tokens,), torch.float32)
        norm_rstd = None if y is None else allocate(h, (n_tokens,), torch.float32)
    statistics = Statistics(score, rstd, lse, norm_rstd)
    if not n_tokens:
        return h, y, statistics
    (base, table, aligned, others, *_), width, prefix = v.at, v.width, v.prefix
    x, s_x = (None, 0) if update.x is None else rows_of(update.x)
    joined, s_joined = (None, 0) if update.joined is None else rows_of(update.joined)
    kind = Kind.FORWARD if y is None else Kind.FORWARD_NORMALISED
    if prefix.rows is not None:
        kind = Kind.BANK
    tiled, listed = sources_on_chip(v.n_sources, device), (v.at.listed,) if device.kind == "cuda" else ()
    stride = max(v.s_token, prefix.stride, s_x, s_joined)
    order = by_token if device.kind == "ascend" else None
    spec = row_spec(kind, width, widest(h, like, prefix.rows, x), stride, device, 1, tiled, aligned, listed, order)
    beside = (*prefix[:2], x, joined, base if update.append else None), (v.n_sources, prefix.stride, s_x, s_joined)

    def arguments(launch: tiling.Launch, grid: int) -> Arguments:
        tensors = (base, table, *contiguous_weights(weights), h, y, score, rstd, lse)
        numbers = (v.n_sources, n_tokens, v.s_source, v.s_token)
        if launch.block_n:
            return (*tensors, norm_rstd, *beside[0], *others), (*numbers, eps, norm_eps, *beside[1])
        return (*tensors, norm_rstd, *beside[0]), (*numbers, eps, norm_eps, *beside[1])

    if run_rows(spec, n_tokens, arguments):
        return h, y, statistics
    if prefix.rows is not None:
        return None
    h, y, statistics = reference.forward(Columns(in_tables(v, device), device), weights, eps, norm_eps, h.dtype)
    return h.view(v.shape), None if y is None else y.view(v.shape), statistics


def keeps_by_token(like: Tensor, dtype: torch.dtype, width: int, n_sources: int, device: Device, beside: bool) -> bool:
    """Whether a forward from sources of `like`'s dtype to h of `dtype` keeps statistics [tokens, sources]."""
    if beside and width < _LEAST_BESIDE:
        return False
    itemsize = max(like.dtype.itemsize, dtype.itemsize)
    return tiling.statistics_by_token(width, itemsize, n_sources, device)


def _allocate_statistic(like: Tensor, n_sources: int, n_tokens: int, by_token: bool) -> Tensor:
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

    None where whole rows do not fit on chip beside a prefix.

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
    kind = Kind.BACKWARD_FP32 if dh.dtype == torch.float32 else Kind.BACKWARD
    if prefix.rows is not None:
        kind = Kind.BANK_BACKWARD
    tiled = sources_on_chip(v.n_sources, device)
    listed = (v.at.listed, v.gradients.listed) if device.kind == "cuda" else ()
    stride = max(v.s_token, s_dh, prefix.stride, s_added)
    dtype = v.like.dtype if prefix.rows is None else widest(dh, v.like, prefix.rows)
    aligned = aligned and also_aligned
    dg = None

    def arguments(launch: tiling.Launch, grid: int) -> Arguments:
        nonlocal dg
        dg = allocate(dh, (launch.partials(v.n_tokens), width), torch.float32) if needed[0] or needed[1] else None
        given = (dh,) if launch.block_n else (dh, h)
        ordered = (score.t(), rstd.t()) if launch.problem.kind in tiling.ROW_BACKWARDS else (score, rstd)
        kept = (*(one.contiguous() for one in ordered), lse)  # copied where another kernel runs than the forward expected
        tensors = (*given, base, table, weights.query, weights.norm, *kept, dv, dv_table, dg)
        tensors += (*prefix[:2], added, dprefix)
        if launch.share:
            tensors += (allocate(dh, (launch.words(v.n_tokens),), torch.int64).zero_(),)
        numbers = (v.n_sources, v.n_tokens, v.s_source, v.s_token, s_dh, v.n_sources, prefix.stride, s_added)
        if launch.block_n:
            return (*tensors, *v.at.others, *v.gradients.others), (*numbers, v.gradients.needed)
        return tensors, numbers

    kinds = [kind]
    if (
        h is None
        and score.stride(0) == 1
        and keeps_by_token(v.like, v.like.dtype, width, v.n_rows, device, prefix.rows is not None)
    ):
        kinds.insert(0, Kind.ROW_BACKWARD if prefix.rows is None else Kind.BANK_ROW_BACKWARD)
    for kind in kinds:
        itemtype = v.like.dtype if kind == Kind.ROW_BACKWARD else dh.dtype if kind == Kind.BANK_ROW_BACKWARD else dtype
        if run_rows(row_spec(kind, width, itemtype, stride, device, 1, tiled, aligned, listed), v.n_tokens, arguments):
            return weights_gradient(dg, weights, needed, device)
    if prefix.rows is not None:
        return None
    return reference.backward(Columns(in_tables(v, device), device, needed[0] or needed[1]), dh, weights, statistics, needed)
