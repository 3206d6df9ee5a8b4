"""The cross entropy with probabilities as targets: an operator registered with PyTorch, and the loss made of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from npu_tiling.pytorch.schemas import schema
from npu_tiling.pytorch.sharding import is_distributed
from npu_tiling.pytorch.tensors import statistics_dtype, without_autocast
from torch import Tensor

from . import parallel
from .checks import autocast, check
from .compute import begin
from .distribution_rows import COEFFICIENTS, LSE, A, moments
from .operators import OPERATORS, define_gradient, fake_gradients, gradient_of
from .options import GRADIENTS, NEEDS, Needs, Options, split
from .shape import Task
from .token_weights import checked_token_weight
from .ways.probability_targets import ProbabilityInputs, ProbabilityTargets

_ARGUMENTS = schema(ProbabilityInputs, Options)
_REFUSED = ("token_scaling", "return_token_accuracy", "return_predicted_tokens", "return_entropy")


class ProbabilityLosses(NamedTuple):
    """Losses of a probability target, [...] or a number each."""

    loss: Tensor
    z_loss: Tensor | None
    lse: Tensor


@without_autocast
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Rows' cross entropies, L, and the sums of their targets, [N] each."""
    inputs, options, _ = split(arguments, ProbabilityInputs, Options)
    targets = begin(ProbabilityTargets, Task.DISTRIBUTIONS, inputs, options, Needs(False, False, False))
    statistics, (dots, sums) = targets.statistics()
    lse = moments(statistics, options.vocab_size).lse
    return lse * sums - dots, lse, sums.clone()


@without_autocast
def _backward(rows: Tensor, factors: Tensor | None, *arguments: Any) -> tuple[Tensor | None, ...]:
    inputs, options, needed = split(arguments, ProbabilityInputs, Options)
    targets = begin(ProbabilityTargets, Task.DISTRIBUTION_GRADIENTS, inputs, options, Needs(*needed))
    return targets.gradients_of(rows, factors)[:3]


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, _ = split(arguments, ProbabilityInputs, Options)
    rows, dtype = parallel.whole_shape(inputs.x, options), statistics_dtype(inputs.x.dtype)
    return tuple(inputs.x.new_empty(rows, dtype=dtype) for _ in range(3))


def _fake_backward(rows: Tensor, factors: Tensor | None, *arguments: Any) -> Any:
    inputs, _, needed = split(arguments, ProbabilityInputs, Options)
    return fake_gradients(inputs, needed)


OPERATORS.define(
    f"probability_targets({_ARGUMENTS}) -> (Tensor cross_entropy, Tensor lse, Tensor sums)", _forward, _fake_forward
)
define_gradient(
    f"probability_target_gradients(Tensor coefficients, Tensor? factors, {_ARGUMENTS}, {NEEDS}) -> ({GRADIENTS})",
    _backward,
    _fake_backward,
)


class _ProbabilityTargets(Function):
    @staticmethod
    def forward(ctx, run, x, weight, bias, class_weight, probs, frozen, weight_grad, options):  # type: ignore[no-untyped-def]
        tensors = (x, weight, bias, class_weight, probs, frozen)
        ctx.options, ctx.weight_grad = options, weight_grad
        ctx.set_materialize_grads(False)
        found, lse, sums = run(*tensors, weight_grad, *options)
        ctx.save_for_backward(*tensors, lse, sums)
        ctx.mark_non_differentiable(sums)
        return found, lse, sums

    @staticmethod
    def backward(ctx, dfound, dlse, dsums):  # type: ignore[no-untyped-def]
        *tensors, lse, sums = ctx.saved_tensors
        rows = lse.new_zeros(COEFFICIENTS, *lse.shape)
        rows[LSE] = lse
        needed = ctx.needs_input_grad[1:4]
        if dfound is not None:
            rows[A] += dfound * sums
        if dlse is not None:
            rows[A] += dlse
        inputs = (*tensors, ctx.weight_grad)
        found = OPERATORS(
            gradient_of("probability_target_gradients", ctx.weight_grad), rows, dfound, *inputs, *ctx.options, *needed
        )
        dx, dweight, dbias = (gradient if need else None for gradient, need in zip(found, needed, strict=True))
        return None, dx, dweight if ctx.weight_grad is None else None, dbias, None, None, None, None, None


def _recorded(run, x, weight, bias, class_weight, probs, frozen, weight_grad, *options):  # type: ignore[no-untyped-def]
    inputs = (x, weight, bias, class_weight, probs, frozen, weight_grad)
    if needs_gradient((x, weight, bias)):
        return apply(_ProbabilityTargets, run, *inputs, Options(*options))
    return run(*inputs, *options)


OPERATORS.autograd("probability_targets", _recorded)


def probability_loss(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    frozen: Tensor | None,
    weight_grad: Tensor | None,
    options: Options,
) -> ProbabilityLosses:
    """The loss of target [..., V], floating point, with options that were checked."""
    x, weight, bias = autocast(x, weight, bias)
    for name in _REFUSED:
        if getattr(options, name):
            raise ValueError(f"{name} is True and must be False where target has probabilities.")
    shape = torch.Size(parallel.whole_shape(x, options))
    arguments.shape("target", target, (*shape, weight.shape[0]))
    check(x, weight, target.new_zeros(shape, dtype=torch.int64), bias, class_weight, frozen, options)
    arguments.device("target", target, x, "x's")
    if target.requires_grad:
        raise ValueError("target requires a gradient, which it does not get, and must be detached.")
    if is_distributed((x, weight, target, bias, class_weight, weight_grad)):
        raise ValueError("target has probabilities and must be int64 or int32 where there are DTensors.")
    flat = (
        x.reshape(-1, x.shape[-1]),
        weight,
        bias,
        class_weight,
        target.reshape(-1, target.shape[-1]),
        frozen,
        weight_grad,
    )
    loss, lse, _ = OPERATORS("probability_targets", *flat, *options)
    z_loss = options.lse_square_scale * lse.square()
    weights = None if token_weight is None else checked_token_weight(token_weight, x, shape).reshape(-1)
    if options.lse_square_scale:
        loss = loss + z_loss
    loss, z_loss = (_reduced(one, weights, options.reduction, shape) for one in (loss, z_loss))
    return ProbabilityLosses(loss, z_loss if options.return_z_loss else None, lse.detach().view(shape))


def _reduced(rows: Tensor, weights: Tensor | None, reduction: str, shape: torch.Size) -> Tensor:
    rows = rows if weights is None else rows * weights
    if reduction == "none":
        return rows.view(shape)
    if reduction == "sum":
        return rows.sum()
    return rows.sum() / (max(1, rows.numel()) if weights is None else weights.sum())
