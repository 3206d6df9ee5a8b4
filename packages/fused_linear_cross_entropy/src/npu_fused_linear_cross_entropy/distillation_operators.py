"""The registered operators of distillation and their autograd.

`distillation` computes the losses, and the gradients of a loss that is one number if they are needed.
`distillation_backward` computes the gradients of losses of single tokens, with logits that are computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.autograd import Function, apply, needs_gradient
from npu_tiling.pytorch.schemas import schema
from npu_tiling.pytorch.tensors import nothing, statistics_dtype, without_autocast
from torch import Tensor

from . import ids, parallel, rows
from .compute import shape_of
from .gradients import Gradients
from .operators import OPERATORS, define_gradient, fake_gradients, gradient_of, scaled
from .options import GRADIENTS, NEEDS, DistillationOptions, Needs, split
from .rows import NO_COLUMN
from .shape import Task
from .ways.distillation import Distillation, DistillationInputs

_ARGUMENTS = schema(DistillationInputs, DistillationOptions)
_NOTHING_NEEDED = Needs(False, False, False)


def _is_unfinished(x: Tensor, options: DistillationOptions) -> bool:
    """Whether the forward leaves the gradients' 1 / N to the backward, where fp16 has no room for it."""
    return x.dtype == torch.float16 and options.reduction == "mean"


def _flat(inputs: DistillationInputs, options: DistillationOptions) -> DistillationInputs:
    """All ranks' tokens, without leading dimensions."""
    if inputs.x.dim() == 2 and not options.sequence_parallel:
        return inputs

    def rows_of(matrix: Tensor | None) -> Tensor | None:
        return None if matrix is None else matrix.reshape(-1, matrix.shape[-1])

    def whole(x: Tensor | None) -> Tensor | None:
        return None if x is None else parallel.whole_rows(x.reshape(-1, x.shape[-1]), options.of_head)

    x = whole(inputs.x)
    assert x is not None

    return inputs._replace(
        x=x,
        target=None if inputs.target is None else inputs.target.reshape(-1),
        teacher_x=whole(inputs.teacher_x),
        teacher_probs=rows_of(inputs.teacher_probs),
        token_weight=None if inputs.token_weight is None else inputs.token_weight.reshape(-1),
    )


def _start(inputs: DistillationInputs, options: DistillationOptions, needs: Needs, task: Task) -> Distillation:
    x, device = inputs.x, device_for(inputs.x.device)
    unfinished = task is Task.LOSS_AND_GRADIENTS and _is_unfinished(x, options)
    shape = shape_of(
        task, x, inputs.weight, inputs.bias, inputs.frozen, options.of_head, needs, device, unfinished=unfinished
    )
    return Distillation(inputs, options, shape, device)


class _Rows:
    """Which tokens count, and their columns.

    Attributes:
        columns: int32 [N] where targets have cross entropies, negative: none; else None.
        counted: bool [N]; None: all.
        known: bool [N]: counted, and within the vocabulary where targets have cross entropies; None: all.
        weights: [N], of the losses; None: 1.
        divisor: how many count, at least 1, or the sum of their weights, where the loss is a mean; else 1.
    """

    def __init__(self, inputs: DistillationInputs, options: DistillationOptions) -> None:
        target, self.weights, exact = inputs.target, inputs.token_weight, statistics_dtype(inputs.x.dtype)
        self.columns = self.counted = self.known = None
        self.divisor: Tensor | int = 1
        if target is not None:
            self.counted = self.known = rows.are_counted(target, options.ignore_index)
            if options.hard_weight:
                self.known = self.counted & ids.are_columns(target, 0, options.vocab_size)
                self.columns = torch.where(self.known, target, NO_COLUMN).to(torch.int32)
            if self.weights is not None:
                self.weights = torch.where(self.counted, self.weights, 0.0)
        if options.reduction != "mean":
            return
        if self.weights is not None:
            total = self.weights.sum()
            self.divisor = torch.where(total == 0.0, 1.0, total)
        elif self.counted is not None:
            self.divisor = self.counted.sum().to(exact).clamp_min_(1)
        else:
            self.divisor = max(1, inputs.x.shape[0])

    def factors(self, x: Tensor, dloss: Tensor | None, divisor: Tensor | int) -> Tensor:
        """Of the gradients, [N]."""
        value = torch.ones((), dtype=statistics_dtype(x.dtype), device=x.device) if dloss is None else dloss
        value = value / divisor
        if self.weights is not None:
            value = value * self.weights
        if self.known is not None:
            return torch.where(self.known, value, 0.0)
        return value.expand(x.shape[0]).contiguous()

    def masked(self, values: Tensor) -> Tensor:
        """Of losses [N], times their weights: 0 where ignored, NaN where the target is outside the vocabulary."""
        if self.weights is not None:
            values = values * self.weights
        if self.known is None or self.counted is None:
            return values
        return torch.where(self.known, values, torch.where(self.counted, torch.nan, 0.0))


@without_autocast
def distillation(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The loss and its two parts, three gradients and the factors that these lack."""
    inputs, options, needs = split(arguments, DistillationInputs, DistillationOptions)
    shape, whole = inputs.x.shape, parallel.whole_shape(inputs.x, options.of_head)
    inputs = _flat(inputs, options)
    facts = _Rows(inputs, options)
    gradients = Gradients(None, None, None, None)
    if any(needs):
        run = _start(inputs, options, Needs(*needs), Task.LOSS_AND_GRADIENTS)
        unfinished, scale = _is_unfinished(inputs.x, options), run.tiling.dweight_scale
        factors = facts.factors(inputs.x, None, 1 if unfinished else facts.divisor)
        losses, gradients = run.losses_and_gradients(facts.columns, factors)
        if unfinished:
            left = losses.new_tensor([1.0, 1.0 / scale, 1.0 / scale]) / facts.divisor
            gradients = gradients._replace(unfinished=left)
    else:
        losses = _start(inputs, options, Needs(*needs), Task.LOSS).losses(facts.columns)

    def reduced(values: Tensor) -> Tensor:
        values = facts.masked(values)
        return values.view(whole) if options.reduction == "none" else values.sum() / facts.divisor

    loss = options.soft_weight * losses[0]
    if options.hard_weight:
        loss = loss + options.hard_weight * losses[1]
    soft = reduced(losses[0]) if options.return_parts else None
    hard = reduced(losses[1]) if options.return_parts and options.hard_weight else None
    return reduced(loss), soft, hard, *_shaped(gradients, shape), gradients.unfinished


@without_autocast
def distillation_backward(dloss: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Three gradients, given those of the tokens' losses, or of the one loss: everything is computed again."""
    inputs, options, needs = split(arguments, DistillationInputs, DistillationOptions)
    shape = inputs.x.shape
    inputs = _flat(inputs, options)
    facts = _Rows(inputs, options)
    factors = facts.factors(inputs.x, dloss.reshape(-1), facts.divisor)
    _, gradients = _start(inputs, options, Needs(*needs), Task.GRADIENTS).losses_and_gradients(facts.columns, factors)
    return _shaped(gradients, shape)


def _shaped(gradients: Gradients, shape: torch.Size) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx, dweight, dbias, _ = gradients
    return None if dx is None else dx.view(shape), dweight, dbias


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, needs = split(arguments, DistillationInputs, DistillationOptions)
    x, dtype = inputs.x, statistics_dtype(inputs.x.dtype)
    size = parallel.whole_shape(x, options.of_head) if options.reduction == "none" else ()
    wanted = (True, options.return_parts, options.return_parts and options.hard_weight != 0.0)
    losses = (x.new_empty(size, dtype=dtype) if asked else nothing(x) for asked in wanted)
    unfinished = any(needs) and _is_unfinished(x, options)
    return *losses, *fake_gradients(inputs, needs), x.new_empty(3, dtype=dtype) if unfinished else nothing(x)


def _fake_backward(dloss: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, _, needs = split(arguments, DistillationInputs, DistillationOptions)
    return fake_gradients(inputs, needs)


OPERATORS.define(
    f"distillation({_ARGUMENTS}, {NEEDS}) -> (Tensor loss, Tensor soft, Tensor hard, {GRADIENTS}, Tensor unfinished)",
    distillation,
    _fake,
)
define_gradient(
    f"distillation_backward(Tensor dloss, {_ARGUMENTS}, {NEEDS}) -> ({GRADIENTS})",
    distillation_backward,
    _fake_backward,
)


class _Distillation(Function):
    """Of the results the loss has gradients."""

    @staticmethod
    def forward(ctx, run, *arguments):  # type: ignore[no-untyped-def]
        *tensors, weight_grad, options = arguments
        ctx.options, ctx.weight_grad = options, weight_grad
        ctx.set_materialize_grads(False)
        ctx.has_gradients = options.reduction != "none" and weight_grad is None
        needs = _needs(ctx) if ctx.has_gradients else _NOTHING_NEEDED
        found = run(*tensors, weight_grad, *options, *needs)
        *outputs, dx, dweight, dbias, unfinished = found
        if ctx.has_gradients:
            gradients = [gradient if need else None for gradient, need in zip((dx, dweight, dbias), needs, strict=True)]
            ctx.save_for_backward(*gradients, unfinished if _is_unfinished(tensors[0], options) else None)
        else:
            ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(part for part in outputs[1:] if part is not None))
        return tuple(outputs)

    @staticmethod
    def backward(ctx, dloss, dsoft, dhard):  # type: ignore[no-untyped-def]
        needs = _needs(ctx)
        if dloss is None:
            found = (None, None, None)
        elif ctx.has_gradients:
            *gradients, unfinished = ctx.saved_tensors
            found = scaled(gradients, dloss, None if unfinished is None else unfinished.unbind())
        else:
            found = OPERATORS(
                gradient_of("distillation_backward", ctx.weight_grad),
                dloss,
                *ctx.saved_tensors,
                ctx.weight_grad,
                *ctx.options,
                *needs,
            )
        dx, dweight, dbias = (gradient if needed else None for gradient, needed in zip(found, needs, strict=True))
        return (
            None,
            dx,
            dweight if ctx.weight_grad is None else None,
            None,
            dbias,
            *[None] * (len(DistillationInputs._fields) - 3),
        )


def _needs(ctx) -> Needs:  # type: ignore[no-untyped-def]
    _, dx, dweight, _, dbias = ctx.needs_input_grad[:5]
    return Needs(dx, dweight, dbias)


def _recorded(run, *arguments):  # type: ignore[no-untyped-def]
    inputs, options, needs = split(arguments, DistillationInputs, DistillationOptions)
    if needs_gradient((inputs.x, inputs.weight, inputs.bias)) and not any(needs):
        return *apply(_Distillation, run, *inputs, options), None, None, None, None
    return run(*arguments)


OPERATORS.autograd("distillation", _recorded)


def distill(inputs: DistillationInputs, options: DistillationOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its two parts, recorded by autograd; parts that are not asked for are empty or None."""
    loss, soft, hard, *_ = OPERATORS("distillation", *inputs, *options, *_NOTHING_NEEDED)
    return loss, soft, hard
