"""The cross entropy with probabilities as targets: an operator registered with PyTorch, and the loss made of it."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from npu_tiling.pytorch.schemas import schema
from npu_tiling.pytorch.sharding import is_distributed
from npu_tiling.pytorch.tensors import statistics_dtype, without_autocast
from torch import Tensor

from . import parallel
from .calls import LossInputs, Needs, ProbabilityInputs, split
from .checks import check
from .compute import begin
from .distribution_rows import MAXIMUM, SUM
from .options import Options
from .registration import OPERATORS, Gradient
from .rows import LinearCrossEntropyOutput, total_weight
from .shape import Task
from .token_weights import checked_token_weight
from .ways.probability_targets import ProbabilityTargets

_REFUSED = ("token_scaling", "return_token_accuracy", "return_predicted_tokens", "return_entropy")


@without_autocast
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Rows' cross entropies, L, its parts k and log S, and the sums of their targets, [N] each."""
    inputs, options, _ = split(arguments, ProbabilityInputs, Options)
    targets = begin(ProbabilityTargets, Task.DISTRIBUTIONS, inputs, options, Needs(False, False, False))
    statistics, (dots, sums) = targets.statistics()
    maximum, log = statistics[MAXIMUM].clone(), statistics[SUM].log()
    return dots + log * sums, maximum + log, maximum, log, sums.clone()


@without_autocast
def _backward(rows: Tensor, factors: Tensor | None, *arguments: Any) -> tuple[Tensor | None, ...]:
    inputs, options, needed = split(arguments, ProbabilityInputs, Options)
    targets = begin(ProbabilityTargets, Task.DISTRIBUTION_GRADIENTS, inputs, options, Needs(*needed))
    return targets.gradients_of(rows, factors)[:3]


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, _ = split(arguments, ProbabilityInputs, Options)
    rows, dtype = parallel.whole_shape(inputs.x, options), statistics_dtype(inputs.x.dtype)
    return tuple(inputs.x.new_empty(rows, dtype=dtype) for _ in range(5))


OPERATORS.define(
    f"probability_targets({schema(ProbabilityInputs, Options)}) -> "
    "(Tensor cross_entropy, Tensor lse, Tensor maximum, Tensor log_sum, Tensor sums)",
    _forward,
    _fake_forward,
    flops=lambda x, weight, *_: 2 * x.numel() * weight.shape[0],
)
_GRADIENT = Gradient(
    "probability_target_gradients", "Tensor coefficients, Tensor? factors", ProbabilityInputs, Options, _backward
)


class _ProbabilityTargets(Function):
    @staticmethod
    def forward(ctx, run, options, *tensors):  # type: ignore[no-untyped-def]
        ctx.options, ctx.weight_grad = options, tensors[-1]
        ctx.set_materialize_grads(False)
        found, lse, *known = run(*tensors, *options)
        ctx.save_for_backward(*tensors[:-1], *known)
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
        return _GRADIENT(ctx, (torch.stack((maximum, log, a, zero, zero, zero)), dfound), tensors)


def _recorded(run, *arguments):  # type: ignore[no-untyped-def]
    inputs, options, _ = split(arguments, ProbabilityInputs, Options)
    if needs_gradient((inputs.x, inputs.weight, inputs.bias)):
        return apply(_ProbabilityTargets, run, options, *inputs)
    with torch.no_grad():  # class weights that require a gradient would give plain PyTorch one to record
        return run(*arguments)


OPERATORS.autograd("probability_targets", _recorded)


def probability_loss(inputs: ProbabilityInputs, token_weight: Tensor | None, options: Options) -> LinearCrossEntropyOutput:
    """The loss of x [..., H] and probabilities [..., V], with options that were checked."""
    x, weight, bias, class_weight, target, frozen, weight_grad = inputs
    for name in _REFUSED:
        if getattr(options, name):
            raise ValueError(f"{name} is True and must be False where target has probabilities.")
    if options.ignore_index >= 0:
        raise ValueError(f"ignore_index is {options.ignore_index} and must be negative where target has probabilities.")
    shape = torch.Size(parallel.whole_shape(x, options))
    if target.dim() == len(shape):
        allowed = f"must be torch.int64 or torch.int32, or have shape {(*shape, weight.shape[0])}"
        raise ValueError(f"target is {target.dtype} with shape {tuple(target.shape)} and {allowed}.")
    arguments.shape("target", target, (*shape, weight.shape[0]))
    check(LossInputs(x, weight, target.new_zeros(shape, dtype=torch.int64), bias, class_weight, None, frozen), options)
    arguments.device("target", target, x, "x's")
    if target.requires_grad:
        raise ValueError("target requires a gradient, which it does not get, and must be detached.")
    if is_distributed(inputs):
        raise ValueError("target has probabilities and must be int64 or int32 where there are DTensors.")
    flat = inputs._replace(x=x.reshape(-1, x.shape[-1]), probs=target.reshape(-1, target.shape[-1]))
    loss, lse, *_ = OPERATORS("probability_targets", *flat, *options)
    z_loss = options.lse_square_scale * lse.square()
    weights = None if token_weight is None else checked_token_weight(token_weight, x, shape).reshape(-1)
    if options.lse_square_scale:
        loss = loss + z_loss
    loss, z_loss = (_reduced(one, weights, options.reduction, shape) for one in (loss, z_loss))
    known = lse.detach().view(shape) if options.return_lse else None
    return LinearCrossEntropyOutput(loss, z_loss if options.return_z_loss else None, None, None, known, None)


def _reduced(rows: Tensor, weights: Tensor | None, reduction: str, shape: torch.Size) -> Tensor:
    rows = rows if weights is None else rows * weights
    if reduction == "none":
        return rows.view(shape)
    if reduction == "sum":
        return rows.sum()
    if weights is None:
        return rows.sum() / max(1, rows.numel())
    return rows.sum() / total_weight(weights)
