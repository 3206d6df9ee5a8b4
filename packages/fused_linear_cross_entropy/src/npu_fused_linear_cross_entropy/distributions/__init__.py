"""Log-probabilities and their like, and probabilities as targets: the operators and their autograd functions.

The backwards compute logits again. Plans: plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from npu_tiling.dispatch import Function, apply, needs_gradient, save_tensors
from npu_tiling.operators import Operator
from torch import Tensor

from .. import call as calls
from ..call import Options
from ..operator import TRAINED, Gradients, forward_flops, operator_of
from ..tokens import are_columns
from .reference import Moments, coefficients

MOMENTS = ("maximum", "log_sum", "entropy", "square_sum", "mean_logit")
DISTRIBUTIONS = operator_of(
    "distributions",
    calls.Distributions,
    (*MOMENTS, "ids_log_probs", "top_log_probs", "top_ids", "first"),
    "distributions.plan",
    "forward",
    forward_flops,
)
_DISTRIBUTION_GRADIENTS = Gradients(
    "distribution_gradients", calls.DistributionGradients, DISTRIBUTIONS, "distributions.plan", "backward", "rates"
)
PROBABILITY_TARGETS = operator_of(
    "probability_targets",
    calls.ProbabilityTargets,
    ("cross_entropy", "lse", "maximum", "log_sum", "sums"),
    "distributions.plan",
    "forward_of_targets",
    forward_flops,
)
_PROBABILITY_GRADIENTS = Gradients(
    "probability_target_gradients",
    calls.ProbabilityTargetGradients,
    PROBABILITY_TARGETS,
    "distributions.plan",
    "backward_of_targets",
)


class _Distributions(Function):
    """All results but the columns of largest logits have gradients."""

    @staticmethod
    def forward(ctx, run, *arguments):  # type: ignore[no-untyped-def]
        *tensors, (*options, top_k, find_first) = arguments
        ctx.options, ctx.weight_grad = Options(*options), tensors[-1]
        ctx.set_materialize_grads(False)
        found = run(*tensors, *options, top_k, find_first)
        save_tensors(ctx, *tensors[:-1], *found[:-1])
        maximum, log_sum, *_, top_ids, first = found
        ctx.mark_non_differentiable(*(output for output in (maximum, log_sum, top_ids, first) if output is not None))
        return tuple(found)

    @staticmethod
    def backward(ctx, dmaximum, dlog_sum, dentropy, dsquare_sum, dmean_logit, dids, dtop, dtop_ids, dfirst):  # type: ignore[no-untyped-def]
        x, weight, bias, ids, rates, frozen, *known, of_ids, of_top, top_ids = ctx.saved_tensors
        options, named = ctx.options, []
        if dids is not None:
            known_ids = are_known(ids, options)
            values = (torch.where(known_ids, value, 0.0) for value in (of_ids, dids))
            named.append((torch.where(known_ids, ids, -1), *values))
        if dtop is not None:
            named.append((top_ids, of_top, dtop))
        ids, log_probs, did = (torch.cat(parts, 1) for parts in zip(*named, strict=True)) if named else (None, None, None)
        rows = coefficients(Moments(*known), options.vocab_size, dentropy, dsquare_sum, dmean_logit, did)
        return _DISTRIBUTION_GRADIENTS(ctx, (rows, log_probs, did), (x, weight, bias, ids, rates, frozen))


def are_known(ids: Tensor, options: Options) -> Tensor:
    """bool, of the ids' shape: columns of the vocabulary, and not ignored."""
    return are_columns(ids, 0, options.vocab_size) & (ids != options.ignore_index)


class _ProbabilityTargets(Function):
    @staticmethod
    def forward(ctx, run, *arguments):  # type: ignore[no-untyped-def]
        *tensors, options = arguments
        ctx.options, ctx.weight_grad = Options(*options), tensors[-1]
        ctx.set_materialize_grads(False)
        found, lse, *known = run(*tensors, *options)
        save_tensors(ctx, *tensors[:-1], *known)
        ctx.mark_non_differentiable(*known)
        return found, lse, *known

    @staticmethod
    def backward(ctx, dfound, dlse, *_):  # type: ignore[no-untyped-def]
        *tensors, maximum, log, sums = ctx.saved_tensors
        a = zero = torch.zeros_like(log)  # nothing is changed in place: there may be several gradients at once
        if dfound is not None:
            a = a + dfound * sums
        if dlse is not None:
            a = a + dlse
        return _PROBABILITY_GRADIENTS(ctx, (torch.stack((maximum, log, a, *[zero] * 4)), dfound), tensors)


def _with_gradient(function: Any, operator: Operator, trained: Sequence[str]) -> Callable[..., Any]:
    places, n = [operator.signature.tensors.index(field) for field in trained], len(operator.signature.tensors)

    def record(run: Callable[..., Any], *arguments: Any) -> Any:
        if needs_gradient([arguments[place] for place in places]):
            return apply(function, run, *arguments[:n], arguments[n:])
        with torch.no_grad():  # class weights that require a gradient would give plain PyTorch one to record
            return run(*arguments)

    return record


DISTRIBUTIONS.autograd(_with_gradient(_Distributions, DISTRIBUTIONS, (*TRAINED, "rates")))
PROBABILITY_TARGETS.autograd(_with_gradient(_ProbabilityTargets, PROBABILITY_TARGETS, TRAINED))
