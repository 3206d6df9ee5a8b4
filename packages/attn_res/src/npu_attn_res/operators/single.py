"""`attn_res` and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from .. import reference
from ..launch import single
from ..launch.sources import follow
from ..passes import Rows
from ..reference import Statistics, Weights
from .library import OPERATORS, SAVED, STATISTICS, WEIGHTS, allocate_gradients, fake_gradients, whole_gradient


def attn_res(
    blocks: Sequence[Tensor],
    stacked: bool,
    w_query: Tensor,
    w_norm: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
) -> tuple[Tensor | None, ...]:
    like, weights = blocks[0], Weights(w_query, w_norm, norm_weight)
    device = device_for(like.device)
    if device is not None:
        h, y, statistics = single.forward(follow(blocks, stacked, device), weights, eps, norm_eps, save, device)
    else:
        shape = like.shape[1:] if stacked else like.shape
        h, y, statistics = reference.forward(Rows(blocks, stacked), weights, eps, norm_eps, like.dtype)
        h, y = h.view(shape), None if y is None else y.view(shape)
    return h, y, *(statistics if save else (None, None, None, None))


def attn_res_backward(
    dh: Tensor | None,
    dy: Tensor | None,
    h: Tensor | None,
    blocks: Sequence[Tensor],
    stacked: bool,
    w_query: Tensor,
    w_norm: Tensor,
    norm_weight: Tensor | None,
    score: Tensor,
    rstd: Tensor,
    lse: Tensor,
    norm_rstd: Tensor | None,
    need_blocks: Sequence[bool],
    need_weights: Sequence[bool],
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None, Tensor | None]:
    weights, statistics = Weights(w_query, w_norm, norm_weight), Statistics(score, rstd, lse, norm_rstd)
    needed = (need_weights[0], need_weights[1])
    device = device_for(score.device)
    dh, dweight = whole_gradient(dh, dy, h, weights, statistics, need_weights[2])
    if device is None:
        rows = Rows(blocks, stacked, need_blocks)
        dquery, dnorm = reference.backward(rows, dh, weights, statistics, needed)
        return rows.dv, dquery, dnorm, dweight
    gradients = allocate_gradients(blocks, need_blocks)
    sources = follow(blocks, stacked, device, gradients)
    unrounded = h if reads_h(blocks[0]) else None
    return gradients, *single.backward(sources, dh, unrounded, weights, statistics, needed, device), dweight


def reads_h(source: Tensor) -> bool:
    """Whether the backward takes delta from h: where h is not rounded, on Ascend; elsewhere it sums delta up again."""
    if source.dtype != torch.float32:
        return False
    device = device_for(source.device)
    return device is not None and device.kind == "ascend"


def _fake(blocks, stacked, w_query, w_norm, norm_weight, eps, norm_eps, save):  # type: ignore[no-untyped-def]
    like, dtype = blocks[0], statistics_dtype(blocks[0].dtype)
    shape = like.shape[1:] if stacked else like.shape
    n_blocks, n_tokens = like.shape[0] if stacked else len(blocks), prod(shape[:-1])
    h, y = like.new_empty(shape), None if norm_weight is None else like.new_empty(shape)
    if not save:
        return h, y, None, None, None, None
    shapes = ((n_blocks, n_tokens), (n_blocks, n_tokens), (n_tokens,))
    norm_rstd = None if y is None else like.new_empty((n_tokens,), dtype=dtype)
    return h, y, *(like.new_empty(shape, dtype=dtype) for shape in shapes), norm_rstd


def _fake_backward(dh, dy, h, blocks, stacked, w_query, w_norm, norm_weight, *rest):  # type: ignore[no-untyped-def]
    need_blocks, need_weights = rest[-2:]
    weights = (w_query, w_norm, w_query if norm_weight is None else norm_weight)
    return fake_gradients(blocks, need_blocks), *fake_gradients(weights, need_weights)


OPERATORS.define(
    f"attn_res(Tensor[] blocks, bool stacked, {WEIGHTS}, float eps, float norm_eps, bool save) -> (Tensor h, Tensor y,"
    f" {STATISTICS})",
    attn_res,
    _fake,
    forward_mode=True,
    batched=attn_res,
)
OPERATORS.define(
    f"attn_res_backward(Tensor? dh, Tensor? dy, Tensor? h, Tensor[] blocks, bool stacked, {WEIGHTS}, {SAVED},"
    " bool[] need_blocks, bool[] need_weights) -> (Tensor[] dblocks, Tensor dw_query, Tensor dw_norm, Tensor dnorm_weight)",
    attn_res_backward,
    _fake_backward,
    forward_mode=True,
    batched=attn_res_backward,
)
