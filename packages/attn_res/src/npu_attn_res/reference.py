"""Attention Residuals in plain PyTorch: the definition, and what runs on a CPU.

    r_i = 1 / sqrt(mean(v_i^2) + eps)        s_i = r_i <g, v_i>        g = query * rms_weight
    alpha = softmax_i(s)                     h = sum_i alpha_i v_i

in fp32 (fp64 for fp64 input), rounded once, to v's dtype. Sources v_i are rows [tokens, D], statistics are [sources, tokens,
layers], with one layer for `forward` and several for `phase1`.

Every result is composed here of `Passes` over the sources: by PyTorch's operators (`passes.TorchPasses`), or, where rows or
layers do not fit on chip, by kernels (`launch.columns.KernelPasses`).

Source: "Attention Residuals", arXiv 2603.15031.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling.pytorch.tensors import without_autocast
from torch import Tensor

from .passes import Passes, flat


class Weights(NamedTuple):
    """query and rms_weight [D], and the weight [D] of the RMSNorm of h, None where there is none."""

    query: Tensor
    norm: Tensor
    output: Tensor | None


class State(NamedTuple):
    """What `phase1` knows of a layer: o [..., D] and lse [...]."""

    o: Tensor
    lse: Tensor


class Statistics(NamedTuple):
    """What a backward needs: s and r of the sources, log(sum(exp(s))) and 1 / rms(h); None for what was not asked for."""

    score: Tensor | None
    rstd: Tensor | None
    lse: Tensor | None
    norm_rstd: Tensor | None


def scaled_query(query: Tensor, scale: float) -> Tensor:
    """scale * query, in fp32 where it changes."""
    return query if scale == 1.0 else query.to(torch.promote_types(query.dtype, torch.float32)) * scale


def fuse_qk_weight(query: Tensor, rms_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """g in the arithmetic's dtype."""
    return query.to(dtype) * rms_weight.to(dtype)


def fuse_qk_weight_backward(
    dg: Tensor, query: Tensor, rms_weight: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of query [S, D] and rms_weight [D] or [S, D] (or of both [D]) from dg [S, D], where needed."""
    dquery = (dg * rms_weight).view(query.shape).to(query.dtype) if needed[0] else None
    dnorm = (dg * query).sum_to_size(rms_weight.shape).to(rms_weight.dtype) if needed[1] else None
    return dquery, dnorm


@without_autocast
def forward(
    v: Passes, weights: Weights, eps: float, norm_eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Statistics]:
    """h [T, D] in `dtype`, its RMSNorm where there is a weight, and the statistics."""
    g = fuse_qk_weight(weights.query, weights.norm, v.dtype).unsqueeze(0)
    score, rstd = v.scores(g, eps)
    alpha, lse = softmax(score)
    h = v.weighted_sum(alpha, dtype).squeeze(1)
    norm_rstd = y = None
    if weights.output is not None:
        norm_rstd = v.rstd(h, norm_eps)
        y = scaled(h, weights.output, norm_rstd)
    return h, y, Statistics(score.squeeze(-1), rstd, lse.squeeze(-1), norm_rstd)


@without_autocast
def backward(
    v: Passes, dh: Tensor, weights: Weights, statistics: Statistics, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of query and rms_weight, where needed, from dh [..., D]; those of the sources stay with `v`."""
    assert statistics.score is not None and statistics.rstd is not None
    g = fuse_qk_weight(weights.query, weights.norm, v.dtype).unsqueeze(0)
    do, score = dh.reshape(-1, 1, v.width), statistics.score.unsqueeze(-1)
    alpha, _ = softmax(score)
    dg = _gradients(v, do, g, alpha, score, statistics.rstd, softmax_backward(alpha, v.products(do)))
    return fuse_qk_weight_backward(dg, weights.query, weights.norm, needed)


@without_autocast
def phase1(v: Passes, queries: Tensor, rms_weight: Tensor, eps: float) -> tuple[State, Tensor, Tensor]:
    """o [T, S, D] with lse [T, S]; s [N, T, S] and r [N, T]."""
    score, rstd = v.scores(fuse_qk_weight(queries, rms_weight, v.dtype), eps)
    alpha, lse = softmax(score)
    return State(v.weighted_sum(alpha, v.dtype), lse), score, rstd


@without_autocast
def phase1_backward(
    v: Passes,
    gradient: tuple[Tensor | None, Tensor | None],
    queries: Tensor,
    rms_weight: Tensor,
    score: Tensor,
    rstd: Tensor,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the queries and of rms_weight, where needed; `gradient` is that of a State, or None."""
    do, dlse = gradient
    g = fuse_qk_weight(queries, rms_weight, v.dtype)
    if do is None:
        do = score.new_zeros((*score.shape[1:], v.width))
    elif do.stride(-1) != 1:
        do = do.contiguous()
    alpha, _ = softmax(score)
    dscore = softmax_backward(alpha, v.products(do))
    dscore = dscore if dlse is None else dscore + alpha * dlse
    return fuse_qk_weight_backward(_gradients(v, do, g, alpha, score, rstd, dscore), queries, rms_weight, needed)


def _gradients(v: Passes, do: Tensor, g: Tensor, weights: Tensor, score: Tensor, rstd: Tensor, dscore: Tensor) -> Tensor:
    """`Passes.gradients`, from ds [N, T, S]: through s_i = r_i <g, v_i> and r_i."""
    ds_rstd = dscore * rstd.unsqueeze(-1)
    return v.gradients(do, g, weights, ds_rstd, (ds_rstd * score).sum(-1) * rstd / v.width)


def softmax_backward(weights: Tensor, e: Tensor) -> Tensor:
    """ds_i = alpha_i (e_i - delta), delta = sum_i alpha_i e_i."""
    return weights * (e - (weights * e).sum(0))


def softmax(score: Tensor) -> tuple[Tensor, Tensor]:
    """alpha_i = exp(s_i) / sum_i exp(s_i), and the logarithm of that sum, whose rounding exp(s_i - lse) would feel."""
    maximum = score.amax(0)
    weights = torch.exp(score - maximum)
    # One token's at a time: PyTorch adds in an order that is the same for any number of tokens.
    total = weights.movedim(0, -1).contiguous().sum(-1)
    return weights / total, maximum + total.log()


def shares(lse: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """exp(lse) and exp(score) over their sum."""
    largest = torch.maximum(lse, score)
    first, second = torch.exp(lse - largest), torch.exp(score - largest)
    total = first + second
    return first / total, second / total


@without_autocast
def merge(
    state: State, partial: Tensor, x: Tensor | None, weights: Weights, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Statistics]:
    """h, y and partial + x [..., D] in partial's dtype, y and the sum None where not asked for, and the statistics [T]."""
    joined = None if x is None else (partial.to(state.o.dtype) + x).to(partial.dtype)
    v = partial if joined is None else joined
    o, wide = flat(state.o), flat(v).to(state.o.dtype)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    score = (wide @ fuse_qk_weight(weights.query, weights.norm, o.dtype)) * rstd
    w, a = shares(state.lse.reshape(-1), score)
    h = (o * w.unsqueeze(-1) + wide * a.unsqueeze(-1)).to(partial.dtype)
    norm_rstd = y = None
    if weights.output is not None:
        norm_rstd = torch.rsqrt(h.to(o.dtype).square().mean(-1) + norm_eps)
        y = scaled(h, weights.output, norm_rstd).view(partial.shape)
    statistics = Statistics(score, rstd, None, norm_rstd)
    return h.view(partial.shape), y, joined, statistics


@without_autocast
def merge_backward(
    dh: Tensor,
    dpartial: Tensor | None,
    state: State,
    partial: Tensor,
    weights: Weights,
    statistics: Statistics,
    needed: tuple[bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """do, dlse, the gradient of the (new) partial sum with `dpartial` added, and those of query and rms_weight."""
    score, rstd, *_ = statistics
    assert score is not None and rstd is not None
    o = flat(state.o)
    dh, wide = flat(dh).to(o.dtype), flat(partial).to(o.dtype)
    w, a = shares(state.lse.reshape(-1), score)
    dscore = a * w * ((dh * wide).sum(-1) - (dh * o).sum(-1))
    ds_rstd = dscore * rstd
    dv_coef = ds_rstd * score * rstd / partial.shape[-1]
    g = fuse_qk_weight(weights.query, weights.norm, o.dtype)
    dv = dh * a.unsqueeze(-1) + ds_rstd.unsqueeze(-1) * g - dv_coef.unsqueeze(-1) * wide
    if dpartial is not None:
        dv = dv + flat(dpartial)
    dweights = fuse_qk_weight_backward(ds_rstd @ wide, weights.query, weights.norm, needed)
    return (
        (dh * w.unsqueeze(-1)).view(state.o.shape),
        -dscore.view(state.lse.shape),
        dv.to(partial.dtype).view(partial.shape),
        *dweights,
    )


def scaled(h: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """h * rstd * weight in h's dtype."""
    return (h.to(rstd.dtype) * rstd.unsqueeze(-1) * weight).to(h.dtype)


def normalise_backward(dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of h, dh with it, not rounded, and that of the weight."""
    dy = dy.to(rstd.dtype)
    normalised = h.to(rstd.dtype) * rstd.unsqueeze(-1)
    f = dy * weight
    total = (f - normalised * (f * normalised).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return total if dh is None else total + dh, (dy * normalised).reshape(-1, h.shape[-1]).sum(0).to(weight.dtype)
