"""The operators of the two phases, and their autograd functions."""

from __future__ import annotations

from typing import Any

from npu_tiling.dispatch import Function, apply
from npu_tiling.operators import Operator
from npu_tiling.plans import Plan

from ..operator import LIBRARY, split_gradient
from ..records import DWEIGHTS
from .records import (
    Merge,
    MergeBackward,
    Phase1,
    Phase1Backward,
    compute_merge,
    compute_merge_backward,
    compute_phase1,
    compute_phase1_backward,
)


# The modules of plans are imported when a plan is written: they import kernels, and kernels import Triton.
def _plan_phase1(p: Plan, call: Any) -> Any:
    from .plans import phase1

    return phase1(p, call)


def _plan_phase1_backward(p: Plan, call: Any) -> Any:
    from .plans import phase1_backward

    return phase1_backward(p, call)


def _plan_merge(p: Plan, call: Any) -> Any:
    from .plans import merge

    return merge(p, call)


def _plan_merge_backward(p: Plan, call: Any) -> Any:
    from .plans import merge_backward

    return merge_backward(p, call)


PHASE1 = Operator(
    LIBRARY,
    "phase1",
    Phase1,
    ["o", "lse", "score", "rstd"],
    plan=_plan_phase1,
    reference=compute_phase1,
    forward_mode=True,
    batched=True,
)
PHASE1_BACKWARD = Operator(
    LIBRARY,
    "phase1_backward",
    Phase1Backward,
    ["dblocks", "dqueries", "drms_weight"],
    plan=_plan_phase1_backward,
    reference=compute_phase1_backward,
    lists=["dblocks"],
    forward_mode=True,
    batched=True,
)
MERGE = Operator(
    LIBRARY,
    "merge",
    Merge,
    ["h", "y", "new_prefix", "score", "rstd", "norm_rstd"],
    plan=_plan_merge,
    reference=compute_merge,
    forward_mode=True,
)
MERGE_BACKWARD = Operator(
    LIBRARY,
    "merge_backward",
    MergeBackward,
    ["do", "dlse", "dprefix_sum", *DWEIGHTS],
    plan=_plan_merge_backward,
    reference=compute_merge_backward,
    forward_mode=True,
)


class _Phase1(Function):
    @staticmethod
    def forward(ctx, run, stacked, eps, save, queries, rms_weight, *blocks):  # type: ignore[no-untyped-def]
        save_statistics = True
        o, lse, score, rstd = run(queries, blocks, rms_weight, stacked, eps, save_statistics)
        ctx.save_for_backward(queries, rms_weight, score, rstd, *blocks)
        ctx.stacked = stacked
        ctx.set_materialize_grads(False)
        if not save:
            return o, lse, None, None
        ctx.mark_non_differentiable(score, rstd)
        return o, lse, score, rstd

    @staticmethod
    def backward(ctx, do, dlse, *_):  # type: ignore[no-untyped-def]
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        queries, rms_weight, score, rstd, *blocks = ctx.saved_tensors
        _, _, _, _, need_queries, need_rms_weight, *need_blocks = ctx.needs_input_grad
        call = Phase1Backward(
            do=do,
            dlse=dlse,
            queries=queries,
            blocks=blocks,
            rms_weight=rms_weight,
            score=score,
            rstd=rstd,
            stacked=ctx.stacked,
            need_blocks=tuple(need_blocks),
            need_weights=(need_queries, need_rms_weight),
        )
        dblocks, *dweights = PHASE1_BACKWARD(call)
        return None, None, None, None, *dweights, *dblocks


class _Merge(Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, run, o, lse, prefix, layer_output, query, rms_weight, output_rms_weight, eps, norm_eps, save
    ):
        weights, save_statistics = (query, rms_weight, output_rms_weight), True
        h, y, new_prefix, *statistics = run(o, lse, prefix, layer_output, *weights, eps, norm_eps, save_statistics)
        kept = None if output_rms_weight is None else h
        ctx.save_for_backward(kept, o, lse, prefix if layer_output is None else new_prefix, *weights, *statistics)
        ctx.output_dtype = None if layer_output is None else layer_output.dtype
        ctx.set_materialize_grads(False)
        if not save:
            return h, y, new_prefix, None, None, None
        ctx.mark_non_differentiable(*[each for each in statistics if each is not None])
        return h, y, new_prefix, *statistics

    @staticmethod
    def backward(ctx, dh, dy, dprefix, *_):  # type: ignore[no-untyped-def]
        _, _, _, need_prefix, need_output, need_query, need_rms_weight, need_output_weight, *_ = ctx.needs_input_grad
        state, dweights = [None] * 2, [None] * 3
        if dh is not None or dy is not None:
            needed = (need_query, need_rms_weight, need_output_weight and dy is not None)
            *state, dprefix, dquery, dnorm, dweight = MERGE_BACKWARD(
                MergeBackward(dh, dy, dprefix, *ctx.saved_tensors, needed)
            )
            dweights = [dquery, dnorm, dweight]
        of_prefix = split_gradient(dprefix, need_prefix, need_output, ctx.output_dtype)
        return None, *state, *of_prefix, *dweights, None, None, None


def _record_phase1(run: Any, queries: Any, blocks: Any, rms_weight: Any, stacked: Any, eps: Any, save: Any) -> Any:
    return apply(_Phase1, run, stacked, eps, save, queries, rms_weight, *blocks)


def _record_merge(run: Any, *arguments: Any) -> Any:
    return apply(_Merge, run, *arguments)


PHASE1.autograd(_record_phase1)
MERGE.autograd(_record_merge)
PHASE1_BACKWARD.gradient()
MERGE_BACKWARD.gradient()
