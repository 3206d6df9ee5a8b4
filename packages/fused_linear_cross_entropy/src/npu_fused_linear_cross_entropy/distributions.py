"""The registered operator for moments and log-probabilities of tokens' distributions. Formulas: distribution_rows.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from npu_tiling.pytorch.schemas import schema
from npu_tiling.pytorch.tensors import statistics_dtype, without_autocast
from torch import Tensor

from . import parallel
from .calls import DistributionInputs, Needs, split
from .compute import begin, check_columns
from .distribution_rows import Moments, coefficients, moments
from .ids import are_columns
from .options import Options
from .registration import OPERATORS, Gradient
from .shape import Task
from .ways.distributions import Distributions


class Wanted(NamedTuple):
    """Outputs that are computed if they are asked for.

    Attributes:
        top_k: how many of the largest logits.
        find_first: whether the first largest logit's column.
    """

    top_k: int = 0
    find_first: bool = False


class Outputs(NamedTuple):
    """Outputs, None where not asked for.

    Attributes:
        maximum, log_sum, entropy, square_sum, mean_logit: [N].
        ids_log_probs: [N, K]; 0 for ids to be ignored, NaN for others outside the vocabulary.
        top_log_probs, top_ids: [N, top_k].
        first: int64 [N], the column of the first largest logit.
    """

    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor
    square_sum: Tensor
    mean_logit: Tensor
    ids_log_probs: Tensor | None
    top_log_probs: Tensor | None
    top_ids: Tensor | None
    first: Tensor | None


_OUTPUTS = ", ".join(f"Tensor {name}" for name in Outputs._fields)


@without_autocast
def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    inputs, options, wanted = split(arguments, DistributionInputs, Options)
    if inputs.ids is not None and device_for(inputs.x.device) is None:
        check_columns("ids", inputs.ids, options)
    found = begin(Distributions, Task.DISTRIBUTIONS, inputs, options, Needs(False, False, False)).found(*wanted)
    known = moments(found.statistics, options.vocab_size)
    of_ids = of_top = None
    if inputs.ids is not None:
        assert found.ids_below is not None
        absent = torch.where(inputs.ids == options.ignore_index, 0.0, torch.nan).to(found.ids_below.dtype)
        of_ids = torch.where(_are_known(inputs.ids, options), found.ids_below - known.log_sum.unsqueeze(1), absent)
    if found.top_below is not None:
        of_top = found.top_below - known.log_sum.unsqueeze(1)
    return Outputs(*known, of_ids, of_top, found.top_ids, found.first)


def _are_known(ids: Tensor, options: Options) -> Tensor:
    return are_columns(ids, 0, options.vocab_size) & (ids != options.ignore_index)


@without_autocast
def _backward(
    rows: Tensor, log_probs: Tensor | None, did_log_probs: Tensor | None, *arguments: Any
) -> tuple[Tensor | None, ...]:
    inputs, options, (*needed, need_drates) = split(arguments, DistributionInputs, Options)
    distributions = begin(Distributions, Task.DISTRIBUTION_GRADIENTS, inputs, options, Needs(*needed))
    found, drates = distributions.gradients_of(rows, log_probs, did_log_probs, need_drates)
    return found.dx, found.dweight, found.dbias, drates


def _fake_forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    inputs, options, (top_k, find_first) = split(arguments, DistributionInputs, Options)
    x, dtype = inputs.x, statistics_dtype(inputs.x.dtype)
    (rows,) = parallel.whole_shape(x, options)
    moment = [x.new_empty(rows, dtype=dtype) for _ in Moments._fields]
    of_ids = None if inputs.ids is None else x.new_empty(inputs.ids.shape, dtype=dtype)
    tops = [x.new_empty(rows, top_k, dtype=kind) if top_k else None for kind in (dtype, torch.int64)]
    return *moment, of_ids, *tops, x.new_empty(rows, dtype=torch.int64) if find_first else None


OPERATORS.define(
    f"distributions({schema(DistributionInputs, Options)}, int top_k, bool find_first) -> ({_OUTPUTS})",
    _forward,
    _fake_forward,
    flops=lambda x, weight, *_: 2 * x.numel() * weight.shape[0],
)
_GRADIENT = Gradient(
    "distribution_gradients",
    "Tensor coefficients, Tensor? log_probs, Tensor? did_log_probs",
    DistributionInputs,
    Options,
    _backward,
    other="rates",
)


class _Distributions(Function):
    """All results but the columns of largest logits have gradients."""

    @staticmethod
    def forward(ctx, run, options, wanted, *tensors):  # type: ignore[no-untyped-def]
        ctx.options, ctx.weight_grad = options, tensors[-1]
        ctx.set_materialize_grads(False)
        found = Outputs(*run(*tensors, *options, *wanted))
        ctx.save_for_backward(*tensors[:-1], *found[:-1])
        constant = (found.maximum, found.log_sum, found.top_ids, found.first)
        ctx.mark_non_differentiable(*(output for output in constant if output is not None))
        return tuple(found)

    @staticmethod
    def backward(ctx, dmaximum, dlog_sum, dentropy, dsquare_sum, dmean_logit, dids, dtop, dtop_ids, dfirst):  # type: ignore[no-untyped-def]
        x, weight, bias, ids, rates, frozen, *known, of_ids, of_top, top_ids = ctx.saved_tensors
        options, named = ctx.options, []
        if dids is not None:
            known_ids = _are_known(ids, options)
            values = (torch.where(known_ids, value, 0.0) for value in (of_ids, dids))
            named.append((torch.where(known_ids, ids, -1), *values))
        if dtop is not None:
            named.append((top_ids, of_top, dtop))
        ids, log_probs, did = (torch.cat(parts, 1) for parts in zip(*named, strict=True)) if named else (None, None, None)
        rows = coefficients(Moments(*known), options.vocab_size, dentropy, dsquare_sum, dmean_logit, did)
        return _GRADIENT(ctx, (rows, log_probs, did), (x, weight, bias, ids, rates, frozen))


def distributions(inputs: DistributionInputs, options: Options, wanted: Wanted) -> Outputs:
    """Moments and log-probabilities of the distributions of x [N, H], recorded by autograd."""
    return Outputs(*OPERATORS("distributions", *inputs, *options, *wanted))


def _recorded(run, *arguments):  # type: ignore[no-untyped-def]
    inputs, options, wanted = split(arguments, DistributionInputs, Options)
    if needs_gradient((inputs.x, inputs.weight, inputs.bias, inputs.rates)):
        return apply(_Distributions, run, options, Wanted(*wanted), *inputs)
    return run(*arguments)


OPERATORS.autograd("distributions", _recorded)
