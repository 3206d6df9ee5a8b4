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

from collections.abc import Sequence

import torch
from npu_tiling.pytorch.tensors import without_autocast
from torch import Tensor

from .calls import Backward, Forward, Merge, MergeBackward, Phase1, Phase1Backward
from .passes import Passes, flat


def scaled_query(query: Tensor, scale: float) -> Tensor:
    """scale * query, in fp32 where it changes."""
    return query if scale == 1.0 else query.to(torch.promote_types(query.dtype, torch.float32)) * scale


def fuse_qk_weight(query: Tensor, rms_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """g in the arithmetic's dtype."""
    return query.to(dtype) * rms_weight.to(dtype)


def fuse_qk_weight_backward(
    dg: Tensor, query: Tensor, rms_weight: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of query [S, D] and rms_weight [D] or [S, D] (or of both [D]) from dg [S, D], where needed."""
    dquery = (dg * rms_weight).view(query.shape).to(query.dtype) if needed[0] else None
    dnorm = (dg * query).sum_to_size(rms_weight.shape).to(rms_weight.dtype) if needed[1] else None
    return dquery, dnorm


@without_autocast
def forward(v: Passes, call: Forward) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
    """h [T, D], its RMSNorm where there is a weight, and s, r, log(sum(exp(s))) and 1 / rms(h)."""
    g = fuse_qk_weight(call.query, call.rms_weight, v.dtype).unsqueeze(0)
    score, rstd = v.scores(g, call.eps)
    alpha, lse = softmax(score)
    h = v.weighted_sum(alpha, call.dtype or call.like.dtype).squeeze(1)
    norm_rstd = y = None
    if call.output_rms_weight is not None:
        norm_rstd = v.rstd(h, call.norm_eps)
        y = scaled(h, call.output_rms_weight, norm_rstd)
    return h, y, score.squeeze(-1), rstd, lse.squeeze(-1), norm_rstd


@without_autocast
def backward(v: Passes, call: Backward, dh: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of query and rms_weight, where needed, from dh [..., D]; those of the sources stay with `v`."""
    g = fuse_qk_weight(call.query, call.rms_weight, v.dtype).unsqueeze(0)
    do, score = dh.reshape(-1, 1, v.width), call.score.unsqueeze(-1)
    alpha, _ = softmax(score)
    dg = _gradients(v, do, g, alpha, score, call.rstd, softmax_backward(alpha, v.products(do)))
    return fuse_qk_weight_backward(dg, call.query, call.rms_weight, call.need_weights)


@without_autocast
def phase1(v: Passes, call: Phase1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o [T, S, D] and lse [T, S]; s [N, T, S] and r [N, T]."""
    score, rstd = v.scores(fuse_qk_weight(call.queries, call.rms_weight, v.dtype), call.eps)
    alpha, lse = softmax(score)
    return v.weighted_sum(alpha, v.dtype), lse, score, rstd


@without_autocast
def phase1_backward(v: Passes, call: Phase1Backward) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the queries and of rms_weight, where needed; those of the sources stay with `v`."""
    do, score = call.do, call.score
    g = fuse_qk_weight(call.queries, call.rms_weight, v.dtype)
    if do is None:
        do = score.new_zeros((*score.shape[1:], v.width))
    elif do.stride(-1) != 1:
        do = do.contiguous()
    alpha, _ = softmax(score)
    dscore = softmax_backward(alpha, v.products(do))
    dscore = dscore if call.dlse is None else dscore + alpha * call.dlse.t()
    dg = _gradients(v, do, g, alpha, score, call.rstd, dscore)
    return fuse_qk_weight_backward(dg, call.queries, call.rms_weight, call.need_weights)


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
def merge(call: Merge) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, Tensor | None]:
    """h, its RMSNorm and the new prefix [..., D] in the prefix's dtype, None where not asked for; s, r, 1 / rms(h) [T]."""
    prefix, new_prefix, dtype = call.prefix, None, call.o.dtype
    if call.layer_output is not None:
        prefix = new_prefix = (prefix.to(dtype) + call.layer_output).to(prefix.dtype)
    o, p = flat(call.o), flat(prefix).to(dtype)
    rstd = torch.rsqrt(p.square().mean(-1) + call.eps)
    score = (p @ fuse_qk_weight(call.query, call.rms_weight, dtype)) * rstd
    w, a = shares(call.lse.reshape(-1), score)
    h = (o * w.unsqueeze(-1) + p * a.unsqueeze(-1)).to(prefix.dtype)
    norm_rstd = y = None
    if call.output_rms_weight is not None:
        norm_rstd = torch.rsqrt(h.to(dtype).square().mean(-1) + call.norm_eps)
        y = scaled(h, call.output_rms_weight, norm_rstd).view(prefix.shape)
    return h.view(prefix.shape), y, new_prefix, score, rstd, norm_rstd


@without_autocast
def merge_backward(call: MergeBackward, dh: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """do, dlse and the gradients of the prefix, with `dprefix` added, of query and of rms_weight, from dh [..., D]."""
    score, rstd, dtype = call.score, call.rstd, call.o.dtype
    o, dh, p = flat(call.o), flat(dh).to(dtype), flat(call.prefix).to(dtype)
    w, a = shares(call.lse.reshape(-1), score)
    dscore = a * w * ((dh * p).sum(-1) - (dh * o).sum(-1))
    ds_rstd = dscore * rstd
    dv_coef = ds_rstd * score * rstd / call.prefix.shape[-1]
    g = fuse_qk_weight(call.query, call.rms_weight, dtype)
    dp = dh * a.unsqueeze(-1) + ds_rstd.unsqueeze(-1) * g - dv_coef.unsqueeze(-1) * p
    if call.dprefix is not None:
        dp = dp + flat(call.dprefix)
    return (
        (dh * w.unsqueeze(-1)).view(call.o.shape),
        -dscore.view(call.lse.shape),
        dp.to(call.prefix.dtype).view(call.prefix.shape),
        *fuse_qk_weight_backward(ds_rstd @ p, call.query, call.rms_weight, call.need_weights),
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
