"""Attention Residuals over blocks: the public functions, which check their arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, overload

import torch
from npu_tiling import arguments
from npu_tiling.dtensor import is_distributed
from torch import Tensor

from .checks import as_blocks, attn_res_of_parts, check_sources, count_blocks
from .operator import FORWARD
from .records import AttnResResult, Forward
from .reference import scaled_query, softmax


@overload
def attn_res(
    residuals: Tensor | Sequence[Tensor],
    query: Tensor,
    rms_weight: Tensor,
    output_rms_weight: None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    *,
    output_rms_eps: float | None = None,
    return_weights: Literal[False] = False,
) -> Tensor: ...


@overload
def attn_res(
    residuals: Tensor | Sequence[Tensor],
    query: Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    *,
    output_rms_eps: float | None = None,
    return_weights: bool = False,
) -> Tensor | AttnResResult: ...


def attn_res(
    residuals: Tensor | Sequence[Tensor],
    query: Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    *,
    output_rms_eps: float | None = None,
    return_weights: bool = False,
) -> Tensor | AttnResResult:
    """A layer's input as a softmax over depth: attention of one learned query over the outputs of earlier blocks.

        k_i = v_i / sqrt(mean(v_i^2) + rms_eps) * rms_weight
        alpha = softmax_i(scale <query, k_i>)        h = sum_i alpha_i v_i

    Arithmetic is fp32, h is rounded once, to v's dtype. Under autocast nothing is cast but listed blocks of several dtypes,
    to the widest of them, as by `torch.stack`. A block that needs no gradient gets none computed; its score still counts in
    those of the others. Of DTensors, see checks.py, each rank computes its own tokens.

    A token's results have the same bits whatever the other tokens are, however many, and wherever it stands, among blocks
    that lie alike: contiguous ones always do. One exception, on Ascend: where a token's later score is higher by 30 than its
    first, tokens that the same core computes may differ in the last bits.

    Args:
        residuals: v, the blocks: a tensor [N, ..., D] or a list (tuple, deque, nn.ParameterList) of N tensors [..., D],
            which is not stacked or copied; fp32, bf16 or fp16 (fp64 too on a CPU). N from 1. Rows may lie at any stride, the
            same for all blocks; others are copied. A tensor may stand in the list more than once: its gradients are added.
        query, rms_weight: [D], v's dtype or fp32.
        output_rms_weight: [D], v's dtype or fp32: of the RMSNorm that follows, computed in the same pass, from h as it is
            rounded.
        rms_eps: added to the mean square.
        scale: of the scores.
        output_rms_eps: added to the mean square of h, with an output_rms_weight; None: rms_eps.
        return_weights: return alpha too, which carries no gradient.

    Returns:
        h [..., D] in v's dtype. With an output_rms_weight, or the weights: an AttnResResult.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: "Attention Residuals", arXiv 2603.15031.
    """
    stacked = isinstance(residuals, Tensor)
    blocks = [residuals] if isinstance(residuals, Tensor) else as_blocks(residuals)
    call = Forward(
        blocks=blocks,
        device_count=None,
        prefix=None,
        layer_output=None,
        query=query,
        rms_weight=rms_weight,
        output_rms_weight=output_rms_weight,
        stacked=stacked,
        n_blocks=count_blocks(blocks, stacked=stacked),
        eps=rms_eps,
        norm_eps=rms_eps if output_rms_eps is None else output_rms_eps,
        dtype=None,
        save=return_weights,
    )
    results = FORWARD.if_checked("attn_res", call) if type(scale) is float and scale == 1.0 else None
    if results is None:
        weights = (query, rms_weight, output_rms_weight)
        rms_eps, scale, output_rms_eps = check_sources(blocks, stacked, weights, (rms_eps, scale, output_rms_eps))
        arguments.flags(return_weights=return_weights)
        if is_distributed((blocks, *weights)):
            run = functools.partial(attn_res, rms_eps=rms_eps, scale=scale, output_rms_eps=output_rms_eps)
            given = residuals if stacked else blocks
            return attn_res_of_parts(functools.partial(run, return_weights=return_weights), given, weights)
        call = call._replace(query=scaled_query(query, scale), eps=rms_eps, norm_eps=output_rms_eps)
        results = FORWARD(call, "attn_res")
    h, y, _, score, *_ = results
    if output_rms_weight is None and not return_weights:
        output: Tensor = h
        return output
    alpha = None
    if return_weights:
        with torch.no_grad():
            alpha = softmax(score)[0].view(len(score), *h.shape[:-1])
    return AttnResResult(h, None if output_rms_weight is None else y, None, alpha)


def fused_attnres(
    query: Tensor,
    residuals: Tensor | Sequence[Tensor],
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    checkpoint_level: int = 1,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attn_res` under the signature of flash-linear-attention's `fused_attnres`.

    Args:
        query: [D] or [D, 1].
        residuals, rms_weight, output_rms_weight, rms_eps, scale, return_weights: as for `attn_res`.
        checkpoint_level: 0 or 1; changes nothing here.

    Returns:
        h [..., D], or RMSNorm(h) alone where there is an output_rms_weight. With `return_weights` a tuple of that and alpha
        [N, ...].

    Raises:
        TypeError, ValueError: as `attn_res` does.

    Source: fla.ops.attnres of flash-linear-attention 0.6.0.
    """
    if checkpoint_level not in (0, 1):
        raise ValueError(f"checkpoint_level is {checkpoint_level} and must be 0 or 1.")
    if isinstance(query, Tensor) and query.dim() == 2 and query.shape[1] == 1:  # noqa: PLR2004
        query = query.squeeze(1)
    weights, numbers = (query, rms_weight, output_rms_weight), (rms_eps, scale)
    result = attn_res(residuals, *weights, *numbers, return_weights=return_weights)
    if isinstance(result, Tensor):
        return result
    output = result.output if result.normalized is None else result.normalized
    return output if result.weights is None else (output, result.weights)
