"""Attention Residuals: the public functions, which check their arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, overload

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import sharding
from .autograd import OPERATORS
from .checks import check_merge, check_phase1, check_sources


@overload
def attn_res(
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor,
    eps: float = 1e-6,
    *,
    return_weights: Literal[False] = False,
    norm_weight: None = None,
    norm_eps: float = 1e-6,
) -> Tensor: ...


@overload
def attn_res(
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor,
    eps: float = 1e-6,
    *,
    return_weights: bool = False,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor | tuple[Tensor, ...]: ...


def attn_res(
    blocks: Tensor | Sequence[Tensor],
    w_query: Tensor,
    w_norm: Tensor,
    eps: float = 1e-6,
    *,
    return_weights: bool = False,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor | tuple[Tensor, ...]:
    """A layer's input as a softmax over depth: attention of one learned query over the outputs of earlier blocks.

        k_i = v_i / sqrt(mean(v_i^2) + eps) * w_norm        alpha = softmax_i(<w_query, k_i>)        h = sum_i alpha_i v_i

    Arithmetic is fp32, h is rounded once, to v's dtype. Under autocast nothing is cast. A block that needs no gradient gets
    none computed; its score still counts in those of the others. Of DTensors, see sharding.py, each rank computes its own
    tokens.

    A token's results have the same bits whatever the other tokens are, however many, and wherever it stands, among blocks
    that lie alike: contiguous ones always do. One exception, on Ascend: where a token's later score is higher by 30 than its
    first, tokens that the same core computes may differ in the last bits.

    Args:
        blocks: v, a tensor [N, ..., D] or a list or tuple of N tensors [..., D], which is not stacked or copied; fp32, bf16
            or fp16 (fp64 too on a CPU). N from 1. Rows may lie at any stride, the same for all blocks; others are copied.
        w_query, w_norm: [D], v's dtype or fp32.
        eps: added to the mean square.
        return_weights: return alpha too, which carries no gradient.
        norm_weight: [D], v's dtype or fp32: of the RMSNorm that follows, computed in the same pass, from h as it is rounded.
        norm_eps: added to that norm's mean square.

    Returns:
        h [..., D] in v's dtype. A tuple of h, then y = h / rms(h) * norm_weight [..., D] where there is a norm_weight, then
        alpha [N, ...] in fp32 where it is asked for.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: "Attention Residuals", arXiv 2603.15031.
    """
    stacked = isinstance(blocks, Tensor)
    sources = [blocks] if stacked else blocks
    weights = {"w_query": w_query, "w_norm": w_norm, "norm_weight": norm_weight}
    eps, norm_eps = check_sources(sources, stacked, weights, eps, norm_eps)
    arguments.flags(return_weights=return_weights)
    if is_distributed((sources, w_query, w_norm, norm_weight)):
        run = functools.partial(attn_res, eps=eps, return_weights=return_weights, norm_eps=norm_eps)
        return sharding.attn_res(run, blocks, weights, return_weights)
    n_blocks = len(blocks)
    of_prefix, options = (None, None, None), (eps, norm_eps, None, return_weights)
    found = OPERATORS("attn_res", sources, stacked, n_blocks, *of_prefix, w_query, w_norm, norm_weight, *options)
    h, y, _, score, _, lse, _ = found
    results = [h]
    if norm_weight is not None:
        results.append(y)
    if return_weights:
        with torch.no_grad():
            results.append(torch.exp(score - lse).view(len(score), *h.shape[:-1]))
    return h if len(results) == 1 else tuple(results)


def attn_res_phase1(
    queries: Tensor, blocks: Tensor | Sequence[Tensor], w_norm: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """The first phase of Block AttnRes: the finished blocks' share of several layers' inputs, for all of them at once.

        s_i = <query, k_i>, as in `attn_res`        max = max_i s_i
        o = sum_i exp(s_i - max) v_i                sum = sum_i exp(s_i - max)

    so that o / sum is what `attn_res` gives for a layer, and `attn_res_merge` joins what comes later. Every block is read
    once where one token's rows of all layers fit on chip, twice otherwise; all three results may be differentiated.

    Args:
        queries: [S, D], one w_query for each layer.
        blocks: as for `attn_res`.
        w_norm: [D], or [S, D], one for each layer.
        eps: added to the mean square.

    Returns:
        o [S, ..., D], max [S, ...] and sum [S, ...], fp32: nothing is rounded before the phases are joined.

    Raises:
        TypeError, ValueError: as for `attn_res`.

    Source: arXiv 2603.15031, the two-phase computation.
    """
    stacked = isinstance(blocks, Tensor)
    sources = [blocks] if stacked else blocks
    first, eps = check_phase1(queries, sources, stacked, w_norm, eps)
    if is_distributed((queries, sources, w_norm)):
        return sharding.phase1(functools.partial(attn_res_phase1, eps=eps), queries, blocks, w_norm)
    o, maximum, total, _, _ = OPERATORS("phase1", queries, sources, stacked, w_norm, eps, False)
    leading = first.shape[1:-1] if stacked else first.shape[:-1]
    o = o.view(*leading, *o.shape[1:]).movedim(-2, 0)
    return o, maximum.view(len(queries), *leading), total.view(len(queries), *leading)


@overload
def attn_res_merge(
    o: Tensor,
    max: Tensor,
    sum: Tensor,
    partial: Tensor,
    w_query: Tensor,
    w_norm: Tensor,
    eps: float = 1e-6,
    *,
    layer_output: None = None,
    norm_weight: None = None,
    norm_eps: float = 1e-6,
) -> Tensor: ...


@overload
def attn_res_merge(
    o: Tensor,
    max: Tensor,
    sum: Tensor,
    partial: Tensor,
    w_query: Tensor,
    w_norm: Tensor,
    eps: float = 1e-6,
    *,
    layer_output: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor | tuple[Tensor, ...]: ...


def attn_res_merge(
    o: Tensor,
    max: Tensor,
    sum: Tensor,
    partial: Tensor,
    w_query: Tensor,
    w_norm: Tensor,
    eps: float = 1e-6,
    *,
    layer_output: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor | tuple[Tensor, ...]:
    """The second phase of Block AttnRes: one more block, the running partial sum, joins a layer's first phase.

        s = <w_query, k(partial)>        m = max(max, s)
        h = (exp(max - m) o + exp(s - m) partial) / (exp(max - m) sum + exp(s - m))

    which is what `attn_res` gives over all blocks and `partial`.

    Args:
        o: [..., D], max: [...], sum: [...]: of one layer, as `attn_res_phase1` returned them.
        partial: [..., D], fp32, bf16 or fp16 (fp64 too on a CPU).
        w_query, w_norm: [D], partial's dtype or fp32: the layer's.
        eps: added to the mean square.
        layer_output: [..., D] in partial's dtype: added to `partial` first, in the same pass; the sum is rounded to it.
        norm_weight, norm_eps: as for `attn_res`.

    Returns:
        h [..., D] in partial's dtype. A tuple of h, then y where there is a norm_weight, then the new partial sum where
        there is a layer_output.

    Raises:
        TypeError, ValueError: as for `attn_res`.

    Source: arXiv 2603.15031, the two-phase computation.
    """
    weights = {"w_query": w_query, "w_norm": w_norm, "norm_weight": norm_weight}
    state = {"o": o, "max": max, "sum": sum}
    eps, norm_eps = check_merge(state, partial, layer_output, weights, eps, norm_eps)
    rows = {**state, "partial": partial, "layer_output": layer_output}
    if is_distributed((*rows.values(), *weights.values())):
        return sharding.merge(functools.partial(attn_res_merge, eps=eps, norm_eps=norm_eps), rows, weights, partial)
    options = (w_query, w_norm, norm_weight, eps, norm_eps, False)
    h, y, joined, *_ = OPERATORS("merge", o, max, sum, partial, layer_output, *options)
    results = [h]
    if norm_weight is not None:
        results.append(y)
    if layer_output is not None:
        results.append(joined)
    return h if len(results) == 1 else tuple(results)
