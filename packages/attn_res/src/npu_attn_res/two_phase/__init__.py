"""Attention Residuals in two phases: the public functions, which check their arguments."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from npu_tiling.dtensor import is_distributed
from torch import Tensor

from .. import sharding
from ..checks import as_blocks, check_merge, check_phase1
from ..records import AttnResResult, Phase1Result
from ..reference import scaled_query
from .operator import MERGE, PHASE1
from .records import Merge, Phase1


def attn_res_phase1(
    queries: Tensor, residuals: Tensor | Sequence[Tensor], rms_weight: Tensor, rms_eps: float = 1e-6, scale: float = 1.0
) -> Phase1Result:
    """The first phase of Block AttnRes: the finished blocks' share of several layers' inputs, for all of them at once.

        s_i = scale <query, k_i>, as in `attn_res`
        o = sum_i softmax_i(s_i) v_i                      lse = log(sum_i exp(s_i))

    so that o is what `attn_res` gives for a layer, and `attn_res_merge` joins what comes later. Every block is read twice,
    or once on CUDA where one token's rows of all layers fit in registers; both results may be differentiated.

    Args:
        queries: [S, D], one query for each layer.
        residuals: as for `attn_res`.
        rms_weight: [D], or [S, D], one for each layer.
        rms_eps: added to the mean square.
        scale: of the scores.

    Returns:
        A Phase1Result of o [S, ..., D] and lse [S, ...], fp32: nothing is rounded before the phases are joined.

    Raises:
        TypeError, ValueError: as for `attn_res`.

    Source: arXiv 2603.15031, the two-phase computation.
    """
    stacked = isinstance(residuals, Tensor)
    sources = [residuals] if isinstance(residuals, Tensor) else as_blocks(residuals)
    first, rms_eps, scale = check_phase1(queries, sources, stacked, rms_weight, rms_eps, scale)
    if is_distributed((queries, sources, rms_weight)):
        run = functools.partial(attn_res_phase1, rms_eps=rms_eps, scale=scale)
        return Phase1Result(*sharding.phase1(run, queries, residuals if stacked else sources, rms_weight))
    call = Phase1(scaled_query(queries, scale), sources, rms_weight, stacked, eps=rms_eps, save=False)
    o, lse, *_ = PHASE1(call)
    leading = first.shape[1:-1] if stacked else first.shape[:-1]
    o = o.view(*leading, *o.shape[1:]).movedim(-2, 0)
    return Phase1Result(o, lse.view(len(queries), *leading))


def attn_res_merge(
    o: Tensor,
    lse: Tensor,
    prefix: Tensor,
    query: Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    *,
    layer_output: Tensor | None = None,
    output_rms_eps: float | None = None,
) -> AttnResResult:
    """The second phase of Block AttnRes: one more block, the prefix, joins a layer's first phase.

        s = scale <query, k(prefix)>        a = exp(s) / (exp(lse) + exp(s))        h = (1 - a) o + a prefix

    which is what `attn_res` gives over all blocks and the prefix.

    Args:
        o: [..., D], lse: [...]: of one layer, as `attn_res_phase1` returned them.
        prefix: [..., D], the running sum of a block's layers; fp32, bf16 or fp16 (fp64 too on a CPU).
        query, rms_weight: [D], the prefix's dtype or fp32: the layer's.
        output_rms_weight: as for `attn_res`.
        rms_eps: added to the mean square.
        scale: of the scores.
        layer_output: [..., D], of any of these dtypes: added to the prefix first, in the same pass; the sum is rounded to
            the prefix's dtype.
        output_rms_eps: as for `attn_res`.

    Returns:
        An AttnResResult, h [..., D] in the prefix's dtype.

    Raises:
        TypeError, ValueError: as for `attn_res`.

    Source: arXiv 2603.15031, the two-phase computation.
    """
    weights, state = (query, rms_weight, output_rms_weight), {"o": o, "lse": lse}
    numbers = (rms_eps, scale, output_rms_eps)
    rms_eps, scale, output_rms_eps = check_merge(state, prefix, layer_output, weights, numbers)
    rows = {**state, "prefix": prefix, "layer_output": layer_output}
    if is_distributed((*rows.values(), *weights)):
        run = functools.partial(attn_res_merge, rms_eps=rms_eps, scale=scale, output_rms_eps=output_rms_eps)
        return sharding.with_prefix(run, rows, weights)
    call = Merge(
        o=o,
        lse=lse,
        prefix=prefix,
        layer_output=layer_output,
        query=scaled_query(query, scale),
        rms_weight=rms_weight,
        output_rms_weight=output_rms_weight,
        eps=rms_eps,
        norm_eps=output_rms_eps,
        save=False,
    )
    h, y, new_prefix, *_ = MERGE(call)
    return AttnResResult(h, None if output_rms_weight is None else y, prefix if layer_output is None else new_prefix)
