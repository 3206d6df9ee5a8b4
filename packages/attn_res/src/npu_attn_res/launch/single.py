"""`attn_res` by kernels: whole rows, one launch each way. Rows that do not fit on chip: split_d.py."""

from __future__ import annotations

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference, tiling
from ..reference import Statistics, Weights
from ..tiling import Kind
from .sources import Sources, rows_of
from .specs import Arguments, contiguous_weights, row_spec, run_rows, sources_on_chip, weights_gradient
from .split_d import Columns


def forward(
    v: Sources, weights: Weights, eps: float, norm_eps: float, save: bool, device: Device
) -> tuple[Tensor, Tensor | None, Statistics]:
    """h [..., D], y where there is a weight for it, and statistics where `save`."""
    like, n_tokens = v.like, v.n_tokens
    h = allocate(like, v.shape, like.dtype)
    y = None if weights.output is None else allocate(h, v.shape, h.dtype)
    score = rstd = lse = norm_rstd = None
    if save:
        score = allocate(h, (v.n_sources, n_tokens), torch.float32)
        rstd = allocate(h, (v.n_sources, n_tokens), torch.float32)
        lse = allocate(h, (n_tokens,), torch.float32)
        norm_rstd = None if y is None else allocate(h, (n_tokens,), torch.float32)
    statistics = Statistics(score, rstd, lse, norm_rstd)
    if not n_tokens:
        return h, y, statistics
    kind = Kind.FORWARD if y is None else Kind.FORWARD_NORMALISED
    (base, table, aligned), width = v.at, v.width
    tiled, listed = sources_on_chip(v.n_sources, device), device.kind == "cuda" and table is not None
    spec = row_spec(kind, width, h.dtype, v.s_token, device, 1, tiled, listed, aligned)

    def arguments(launch: tiling.Launch, grid: int) -> Arguments:
        tensors = (base, table, *contiguous_weights(weights), h, y, score, rstd, lse)
        numbers = (v.n_sources, n_tokens, v.s_source, v.s_token)
        if launch.block_n:
            return (*tensors, norm_rstd), (*numbers, eps, norm_eps)
        return (*tensors, None, norm_rstd), (*numbers, width, eps, norm_eps)

    if run_rows(spec, n_tokens, arguments):
        return h, y, statistics
    h, y, statistics = reference.forward(Columns(v, device), weights, eps, norm_eps, h.dtype)
    return h.view(v.shape), None if y is None else y.view(v.shape), statistics


def backward(
    v: Sources,
    dh: Tensor,
    h: Tensor | None,
    weights: Weights,
    statistics: Statistics,
    needed: tuple[bool, bool],
    device: Device,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes the gradients of the sources and returns those of w_query and w_norm, where needed.

    h: the forward's, where it was not rounded (fp32).
    """
    if not v.n_tokens:
        return torch.zeros_like(weights.query), torch.zeros_like(weights.norm)
    dh, s_dh = rows_of(dh)
    weights = contiguous_weights(weights)
    score, rstd, lse, _ = statistics
    (base, table, aligned), (dv, dv_table, also_aligned), width = v.at, v.gradients, v.width
    kind = Kind.BACKWARD_FP32 if dh.dtype == torch.float32 else Kind.BACKWARD
    tiled, listed = sources_on_chip(v.n_sources, device), device.kind == "cuda" and table is not None
    stride = max(v.s_token, s_dh)
    spec = row_spec(kind, width, v.like.dtype, stride, device, 1, tiled, listed, aligned and also_aligned)
    dg = None

    def arguments(launch: tiling.Launch, grid: int) -> Arguments:
        nonlocal dg
        dg = allocate(dh, (grid, width), torch.float32) if needed[0] or needed[1] else None
        given = (dh,) if launch.block_n else (dh, h)
        tensors = (*given, base, table, weights.query, weights.norm, score, rstd, lse, dv, dv_table, dg)
        return tensors, (v.n_sources, v.n_tokens, v.s_source, v.s_token, s_dh)

    if run_rows(spec, v.n_tokens, arguments):
        return weights_gradient(dg, weights, needed, device)
    return reference.backward(Columns(v, device, needed[0] or needed[1]), dh, weights, statistics, needed)
