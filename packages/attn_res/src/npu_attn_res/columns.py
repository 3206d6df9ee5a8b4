"""The plans where rows do not fit on chip, or more layers than fit on it together: kernels take blocks of columns.

Sums over a row come as partial sums, one for each block of columns, which PyTorch adds. Every source is read twice.
Statistics are [N, T, S] of N sources, T tokens and S layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling.calls import Empty
from npu_tiling.plans import Plan
from torch import Tensor

from . import reference
from .kernels import attn_res_gradient_kernel, attn_res_products_kernel, attn_res_weighted_sum_kernel
from .records import Backward, Forward, gradients_of
from .shape import Shape, Task, Tiling
from .sources import Sources, choose, row_stride, smaller, sources_of

FP32 = torch.float32


def forward(p: Plan, call: Forward, v: Sources, results: dict[str, Any]) -> tuple[Any, ...]:
    """The results of a forward without a prefix; h is written to the memory that `results` has for it."""
    h, width = results["h"], v.width
    score, rstd, lse = weighted_sum(
        p, v, call.query, call.rms_weight, call.eps, p.view(h, (v.n_tokens, 1, width), (width, width, 1))
    )
    y = norm_rstd = None
    if call.output_rms_weight is not None:
        # By the kernel of scores, whose products are not used: PyTorch's sums of a row depend on the number of rows.
        rows = p.view(h, (v.n_tokens, width), (width, 1))
        any_g = p.torch(_first_row, rows, makes=Empty((1, width), FP32))
        _, norm_rstd = _scores(p, sources_of(p, [rows], stacked=False), any_g, call.norm_eps)
        norm_rstd = p.view(norm_rstd, (v.n_tokens,), (1,))
        y = p.torch(_scaled, rows, call.output_rms_weight, norm_rstd, h.shape, makes=Empty(h.shape, h.dtype))
    if not call.save:
        return h, y, None, None, None, None, None
    score, lse = p.view(score, score.shape[:-1], score.strides[:-1]), p.view(lse, lse.shape[:-1], (1,))
    return h, y, None, score, rstd, lse, norm_rstd


def backward(p: Plan, call: Backward, v: Sources, dh: Any) -> tuple[Any, Any]:
    """The gradients of query and rms_weight; those of the blocks are written where `v` says."""
    do = p.view(dh, (v.n_tokens, 1, v.width), (row_stride(dh), v.width, 1))
    score: Any = call.score
    score = p.view(score, (*score.shape, 1), (*score.strides, 1))
    return gradients(p, v, do, score, call.rstd, None, (call.query, call.rms_weight), call.need_weights)


def weighted_sum(p: Plan, v: Sources, query: Any, rms_weight: Any, eps: float, o: Any) -> tuple[Any, Any, Any]:
    """Writes the sums of the sources to o [T, S, D]; query [S, D] or [D]. Returns s [N, T, S], r [N, T] and lse [T, S]."""
    n_layers = o.shape[1]
    g = p.torch(_fused, query, rms_weight, makes=Empty((n_layers, v.width), FP32))
    score, rstd = _scores(p, v, g, eps)
    makes = [Empty(score.shape, FP32), Empty(score.shape[1:], FP32)]
    alpha, lse = p.torch(reference.softmax, score, makes=makes)
    tiling = _choose(p, v, Task.WEIGHTED_SUM, n_layers)
    p.launch(
        attn_res_weighted_sum_kernel,
        str(tiling.shape),
        tiling.grid(v.n_tokens),
        reads={"p_v": v.at.base, "p_table": v.at.table, "p_weight": alpha},
        writes={"p_o": o},
        sizes=_sizes(v),
    )
    return score, rstd, lse


def gradients(
    p: Plan, v: Sources, do: Any, score: Any, rstd: Any, dlse: Any, weights: tuple[Any, Any], needed: Sequence[bool]
) -> tuple[Any, Any]:
    """Writes the gradients of the sources where `v` says; returns those of query and rms_weight, `weights`, where needed.

    do [T, S, D] and dlse [S, T] are the gradients of o and lse; None: there is none of lse.
    """
    n_layers, (query, rms_weight) = do.shape[1], weights
    g = p.torch(_fused, query, rms_weight, makes=Empty((n_layers, v.width), FP32))
    s_do = (do.strides[0], do.strides[1] if n_layers > 1 else do.strides[0])
    dot, _ = _products(p, v, do, s_do, n_layers, squares=False)
    makes = [Empty(score.shape, FP32), Empty(score.shape, FP32), Empty(rstd.shape, FP32)]
    alpha, ds_rstd, coefficient = p.torch(_sum_to_score_gradients, score, rstd, dot, dlse, v.width, makes=makes)
    tiling = _choose(p, v, Task.GRADIENT, n_layers, also_aligned=v.to.aligned)
    splits = tiling.splits(v.n_tokens)
    partials = p.new(Empty((splits, n_layers, v.width), FP32) if needed[0] or needed[1] else None)
    p.launch(
        attn_res_gradient_kernel,
        str(tiling.shape),
        splits * tiling.column_blocks,
        reads={
            "p_v": v.at.base,
            "p_table": v.at.table,
            "p_do": do,
            "p_g": g,
            "p_alpha": alpha,
            "p_ds_rstd": ds_rstd,
            "p_dv_coef": coefficient,
            "p_dv_table": v.to.table,
        },
        writes={"p_dv": v.to.base, "p_dg": partials},
        sizes={**_sizes(v), "n_splits": splits, "s_do_token": s_do[0], "s_do_row": s_do[1]},
    )
    if partials is None:
        return None, None
    makes_weights = gradients_of(weights, needed[:2])
    dquery, dnorm = p.torch(_sum_to_weight_gradients, partials, query, rms_weight, tuple(needed), makes=makes_weights)
    return dquery, dnorm


def _scores(p: Plan, v: Sources, g: Any, eps: float) -> tuple[Any, Any]:
    """s [N, T, S] and r [N, T] with g [S, D]."""
    n_layers = g.shape[0]
    dot, square = _products(p, v, g, (0, v.width if n_layers > 1 else 0), n_layers, squares=True)
    shape = (v.n_blocks, v.n_tokens)
    found: tuple[Any, Any] = p.torch(
        _sum_to_score, dot, square, v.width, eps, makes=[Empty((*shape, n_layers), FP32), Empty(shape, FP32)]
    )
    return found


def _products(p: Plan, v: Sources, a: Any, strides: tuple[int, int], n_layers: int, *, squares: bool) -> tuple[Any, Any]:
    """Partial sums, one for each block of columns, of <a, v_i> and, where asked for, <v_i, v_i>.

    `strides`: from one token of a to the next, and from one row of a tile: a layer, or a token of one layer.
    """
    tiling = _choose(p, v, Task.PRODUCTS, n_layers)
    shape = (tiling.column_blocks, v.n_blocks, v.n_tokens)
    dot = p.new(Empty((*shape, n_layers), FP32))
    square = p.new(Empty(shape, FP32) if squares else None)
    p.launch(
        attn_res_products_kernel,
        str(tiling.shape),
        tiling.grid(v.n_tokens),
        reads={"p_v": v.at.base, "p_table": v.at.table, "p_a": a},
        writes={"p_dot": dot, "p_square": square},
        sizes={**_sizes(v), "s_a_token": strides[0], "s_a_row": strides[1]},
    )
    return dot, square


def _choose(p: Plan, v: Sources, task: Task, n_layers: int, *, also_aligned: bool = True) -> Tiling:
    """The tiling of a task's launch, decided in the plan under its shape's name."""
    shape = Shape(
        task=task,
        width=v.width,
        itemsize=v.dtype.itemsize,
        layers=n_layers,
        row_stride=v.s_token,
        aligned=v.at.aligned and also_aligned,
    )
    tiling: Tiling = p.choose(str(shape), choose(shape, p.chip), smaller)
    return tiling


def _sizes(v: Sources) -> dict[str, int]:
    return {"n_blocks": v.n_blocks, "n_tokens": v.n_tokens, "s_block": v.s_block, "s_token": v.s_token}


# What PyTorch does in between, of small tensors.


def _fused(query: Tensor, rms_weight: Tensor) -> Tensor:
    g = reference.fuse_qk_weight(query, rms_weight, FP32)
    return g.reshape(-1, g.shape[-1]).contiguous()


def _sum_to_score(dot: Tensor, square: Tensor, width: int, eps: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(_added(square) / width + eps)
    return _added(dot) * rstd.unsqueeze(-1), rstd


def _added(partials: Tensor) -> Tensor:
    """The sum of partial sums [n, ...] over n.

    The copy puts the partial sums of a token side by side. Then PyTorch adds them in one order for any number of tokens.
    """
    return partials.movedim(0, -1).contiguous().sum(-1)


def _first_row(rows: Tensor) -> Tensor:
    return rows[:1].to(FP32)


def _scaled(h: Tensor, weight: Tensor, rstd: Tensor, shape: Sequence[int]) -> Tensor:
    return reference.scaled(h, weight, rstd).view(shape)


def _sum_to_score_gradients(score: Tensor, rstd: Tensor, dot: Tensor, dlse: Tensor | None, width: int) -> tuple[Tensor, ...]:
    found = reference.score_gradients(score, rstd, dot.sum(0), dlse, width)
    return tuple([each.contiguous() for each in found])


def _sum_to_weight_gradients(
    partials: Tensor, query: Tensor, rms_weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    found = reference.fuse_qk_weight_backward(partials.sum(0), query, rms_weight, needed)
    return tuple([None if each is None else each.contiguous() for each in found])
