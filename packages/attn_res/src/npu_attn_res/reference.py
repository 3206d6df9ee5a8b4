"""Attention Residuals in plain PyTorch: the definition, and what runs on a CPU.

    r_i = 1 / sqrt(mean(v_i^2) + eps)        s_i = r_i <g, v_i>        g = w_query * w_norm
    alpha = softmax_i(s)                     h = sum_i alpha_i v_i

in fp32 (fp64 for fp64 input), rounded once, to v's dtype. Blocks are rows [tokens, D], statistics are [blocks, tokens,
layers], with one layer for `forward` and several for `phase1`.
Source: "Attention Residuals", arXiv 2603.15031.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def _without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Matrix products in the dtype of their factors."""

    @functools.wraps(function)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        first = arguments[0][0] if isinstance(arguments[0], (list, tuple)) else arguments[0]
        assert isinstance(first, Tensor)
        with torch.autocast(first.device.type, enabled=False):
            return function(*arguments, **options)

    return called


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and arithmetic for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fuse_qk_weight(w_query: Tensor, w_norm: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """g in the arithmetic's dtype."""
    return w_query.to(dtype) * w_norm.to(dtype)


def fuse_qk_weight_backward(
    dg: Tensor, w_query: Tensor, w_norm: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of w_query [S, D] and w_norm [D] or [S, D] (or of both [D]) from dg [S, D], where needed."""
    dquery = (dg * w_norm).view(w_query.shape).to(w_query.dtype) if needed[0] else None
    dnorm = (dg * w_query).sum_to_size(w_norm.shape).to(w_norm.dtype) if needed[1] else None
    return dquery, dnorm


@_without_autocast
def scores(blocks: Sequence[Tensor], g: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s [N, T, S] and r [N, T] of N blocks [T, D] with g [S, D]."""
    dtype = statistics_dtype(blocks[0].dtype)
    score, rstd = [], []
    for block in blocks:
        wide = block.to(dtype)
        rstd.append(torch.rsqrt(wide.square().mean(-1) + eps))
        # A matrix product's sums of a row depend on how many rows there are; of one layer this costs little more.
        dot = (wide * g).sum(-1, keepdim=True) if len(g) == 1 else wide @ g.T
        score.append(dot * rstd[-1].unsqueeze(-1))
    return torch.stack(score), torch.stack(rstd)


def weighted_sum(blocks: Sequence[Tensor], weights: Tensor) -> Tensor:
    """[T, S, D], not rounded: the sum of blocks [T, D] with weights [N, T, S]."""
    total = weights.new_zeros((*weights.shape[1:], blocks[0].shape[-1]))
    for block, weight in zip(blocks, weights, strict=True):
        total += weight.unsqueeze(-1) * block.to(weights.dtype).unsqueeze(1)
    return total


@_without_autocast
def products(blocks: Sequence[Tensor], do: Tensor) -> Tensor:
    """[N, T, S]: <do, v_i> of do [T, S, D] and N blocks [T, D]."""
    return torch.stack([(do @ block.to(do.dtype).unsqueeze(-1)).squeeze(-1) for block in blocks])


@_without_autocast
def gradients(
    blocks: Sequence[Tensor],
    do: Tensor,
    g: Tensor,
    weights: Tensor,
    ds_rstd: Tensor,
    dv_coef: Tensor,
    needed: Sequence[bool],
) -> tuple[list[Tensor | None], Tensor]:
    """dv_i = sum over layers of (weight do + ds_rstd g) - dv_coef v_i for blocks that need it, and dg = sum of ds_rstd v_i.

    do is [T, S, D], g [S, D], weights and ds_rstd [N, T, S], dv_coef [N, T].
    """
    dg = torch.zeros_like(g)
    dv: list[Tensor | None] = []
    for i, block in enumerate(blocks):
        wide = block.to(g.dtype)
        dg = dg + ds_rstd[i].T @ wide  # not in place: under torch.func.vmap there may be several of it alone
        if not needed[i]:
            dv.append(None)
            continue
        gradient = (weights[i].unsqueeze(1) @ do).squeeze(1) + ds_rstd[i] @ g - dv_coef[i].unsqueeze(-1) * wide
        dv.append(gradient.to(block.dtype))
    return dv, dg


def score_gradients(score: Tensor, rstd: Tensor, dscore: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """ds r [N, T, S] and the sum over layers of ds s r^2 / D [N, T]."""
    ds_rstd = dscore * rstd.unsqueeze(-1)
    return ds_rstd, (ds_rstd * score).sum(-1) * rstd / width


def softmax_backward(weights: Tensor, e: Tensor) -> Tensor:
    """ds_i = alpha_i (e_i - delta), delta = sum_i alpha_i e_i."""
    return weights * (e - (weights * e).sum(0))


def exponentials_backward(
    score: Tensor, maximum: Tensor, e: Tensor, dmaximum: Tensor | None, dtotal: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The weights exp(s - max) and ds, given e_i = <do, v_i> and the gradients of max = max_i s and sum of the weights.

    Equal largest scores share the gradient of max, as in `torch.amax`.
    """
    weights = torch.exp(score - maximum)
    dexponent = weights * (e if dtotal is None else e + dtotal)
    largest = (score == maximum).to(score.dtype)
    of_maximum = -dexponent.sum(0) if dmaximum is None else dmaximum - dexponent.sum(0)
    return weights, dexponent + largest / largest.sum(0) * of_maximum


@_without_autocast
def merge(
    o: Tensor, maximum: Tensor, total: Tensor, partial: Tensor, g: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [T, D] (not rounded), s, r and lse [T] of o [T, D], max and sum [T] and one more block [T, D]."""
    wide = partial.to(o.dtype)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    score = (wide @ g) * rstd
    largest = torch.maximum(maximum, score)
    first, second = torch.exp(maximum - largest), torch.exp(score - largest)
    whole = first * total + second
    h = (o * first.unsqueeze(-1) + wide * second.unsqueeze(-1)) / whole.unsqueeze(-1)
    return h, score, rstd, largest + whole.log()


@_without_autocast
def merge_backward(
    dh: Tensor,
    dpartial: Tensor | None,
    o: Tensor,
    maximum: Tensor,
    total: Tensor,
    partial: Tensor,
    g: Tensor,
    score: Tensor,
    rstd: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """do, dmax, dsum, the gradient of the block (with `dpartial` added, not rounded) and dg."""
    dh, wide = dh.to(o.dtype), partial.to(o.dtype)
    w, a = torch.exp(maximum - lse), torch.exp(score - lse)
    dot, e = (dh * o).sum(-1), (dh * wide).sum(-1)
    delta = w * dot + a * e
    ds_rstd = a * (e - delta) * rstd
    dv_coef = ds_rstd * score * rstd / partial.shape[-1]
    dblock = dh * a.unsqueeze(-1) + ds_rstd.unsqueeze(-1) * g - dv_coef.unsqueeze(-1) * wide
    if dpartial is not None:
        dblock = dblock + dpartial
    return dh * w.unsqueeze(-1), w * (dot - total * delta), -w * delta, dblock, ds_rstd @ wide


def normalise(h: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = h / rms(h) * weight in h's dtype, and 1 / rms(h)."""
    wide = h.to(statistics_dtype(h.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return scaled(h, weight, rstd), rstd


def scaled(h: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """h * rstd * weight in h's dtype."""
    return (h.to(rstd.dtype) * rstd.unsqueeze(-1) * weight).to(h.dtype)


def normalise_backward(dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The whole gradient of h, not rounded, and that of the weight."""
    dy = dy.to(rstd.dtype)
    normalised = h.to(rstd.dtype) * rstd.unsqueeze(-1)
    f = dy * weight
    whole = (f - normalised * (f * normalised).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return whole if dh is None else whole + dh, (dy * normalised).reshape(-1, h.shape[-1]).sum(0).to(weight.dtype)
