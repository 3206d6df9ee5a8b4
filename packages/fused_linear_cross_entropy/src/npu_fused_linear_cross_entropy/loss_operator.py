"""Operators whose result is a loss, and their autograd.

If the loss is one number, and neither an entropy nor a `weight_grad` is asked for, the forward computes the gradients: they
are known but for a factor, by which the backward multiplies them. Otherwise another operator computes them, in the backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from npu_tiling.pytorch.autograd import Function, apply, can_bypass_dispatcher, needs_gradient
from npu_tiling.pytorch.schemas import schema
from torch import Tensor

from .calls import split
from .compute import scale, scale_
from .registration import GRADIENTS, NEEDS, OPERATORS, Gradient, gradient_flops, logits_flops

_is_none = functools.partial(is_, None)  # without a frame of Python


class LossOperator:
    """A registered operator whose first result is a loss.

    Args:
        name: of the operator.
        inputs, options: the records of tensors and options.
        outputs: names of the loss and of the other outputs.
        implementation: computes the outputs, what is saved, three gradients and the factors that these lack.
        fake: the same for tensors without data.
        gradient: computes the gradients, given those of the outputs `upstream`, and what was saved.
        upstream: places of the outputs that may have gradients.
        saved: name of a result that `gradient` takes; "" for none.
    """

    def __init__(
        self,
        name: str,
        inputs: type[tuple[Any, ...]],
        options: type[tuple[Any, ...]],
        outputs: Sequence[str],
        implementation: Callable[..., Any],
        fake: Callable[..., Any],
        gradient: Gradient,
        upstream: Sequence[int],
        saved: str = "",
    ) -> None:
        self._name, self.inputs, self._options, self.gradient, self.upstream = name, inputs, options, gradient, upstream
        self.outputs, self.saves = len(outputs), bool(saved)
        self.nothing = (False,) * (3 + self.saves)
        results = ", ".join(f"Tensor {each}" for each in (*outputs, *([saved] if saved else [])))
        flags = f"bool save_{saved}, {NEEDS}" if saved else NEEDS
        signature = f"({schema(inputs, options)}, {flags}) -> ({results}, {GRADIENTS}, Tensor unfinished)"
        OPERATORS.define(f"{name}{signature}", implementation, fake, flops=self._flops)
        OPERATORS.autograd(name, self._record)

    def __call__(self, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The outputs, recorded by autograd."""
        found: tuple[Tensor, ...] = OPERATORS(self._name, *inputs, *options, *self.nothing)
        return found[: self.outputs]

    def _flops(self, *arguments: Any) -> int:
        inputs, _, flags = split(arguments, self.inputs, self._options)
        need_dx, need_dweight, _ = flags[self.saves :]
        teacher_x = getattr(inputs, "teacher_x", None)
        teacher = 0 if teacher_x is None else 2 * teacher_x.numel() * inputs.teacher_weight.shape[0]  # type: ignore[attr-defined]
        return logits_flops(inputs) + teacher + gradient_flops(inputs, need_dx, need_dweight)

    def _record(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """The operator where autograd may record it. A call that asks for gradients itself is not recorded."""
        inputs, options, flags = split(arguments, self.inputs, self._options)
        if any(flags):
            return OPERATORS.not_differentiable(self._name, run, *arguments)
        if not needs_gradient((inputs.x, inputs.weight, inputs.bias)):  # type: ignore[attr-defined]
            with torch.no_grad():  # class weights that require a gradient would give plain PyTorch one to record
                return run(*arguments)
        *outputs, _ = apply(_Loss, run, self, options, *inputs)
        return *outputs, *[None] * (len(self.nothing) + 1)


class _Loss(Function):
    @staticmethod
    def forward(ctx, run, operator, options, *tensors):  # type: ignore[no-untyped-def]
        ctx.operator, ctx.options, ctx.weight_grad = operator, options, tensors[-1]
        ctx.set_materialize_grads(False)
        ctx.has_gradients = options.is_one_number and ctx.weight_grad is None
        needs = operator.gradient.needs(ctx.needs_input_grad) if ctx.has_gradients else [False] * 3
        found = run(*tensors, *options, *[not ctx.has_gradients] * operator.saves, *needs)
        outputs, saved, (*gradients, unfinished) = found[: operator.outputs], found[operator.outputs : -4], found[-4:]
        source = outputs[0].new_empty(0)  # without data: what says in a second derivative that gradients come from x
        if ctx.has_gradients:
            ctx.save_for_backward(*gradients, unfinished, source)
        else:
            ctx.save_for_backward(*saved, *tensors[:-1])
        differentiable = options.differentiable
        constant = [one for place, one in enumerate(outputs) if one is not None and place not in differentiable]
        ctx.mark_non_differentiable(*constant)
        return *outputs, source

    @staticmethod
    def backward(ctx, *upstream):  # type: ignore[no-untyped-def]
        gradient, given = ctx.operator.gradient, [*map(upstream.__getitem__, ctx.operator.upstream)]
        if all(map(_is_none, given)):
            return (None,) * len(ctx.needs_input_grad)
        if not ctx.has_gradients:
            return gradient(ctx, given, ctx.saved_tensors)
        *gradients, unfinished, source = ctx.saved_tensors
        factors = None if unfinished is None else unfinished.unbind()
        return gradient.in_place(ctx, _scaled(gradients, given[0], factors, source))


def _scaled(
    gradients: Sequence[Tensor | None], dloss: Tensor, factors: Sequence[Tensor] | None, source: Tensor
) -> list[Tensor | None]:
    """Gradients times the upstream gradient and a factor each: in place unless the graph is kept for another backward."""
    present = [gradient for gradient in gradients if gradient is not None]
    numbers = [dloss] * len(present)
    if factors is not None:
        numbers = [dloss * factor for gradient, factor in zip(gradients, factors, strict=True) if gradient is not None]
    once = not torch._C._autograd._get_current_graph_task_keep_graph()
    if once and not torch.is_grad_enabled() and can_bypass_dispatcher((*present, *numbers)):
        scale_(present, numbers)
        return list(gradients)

    def scaled(gradients: list[Tensor], numbers: list[Tensor], _: Tensor) -> list[Tensor]:
        found: list[Tensor] = OPERATORS("scale", gradients, numbers)
        return found

    found = iter(OPERATORS.not_differentiable("scale", scaled, present, numbers, source))
    return [None if gradient is None else next(found) for gradient in gradients]


def _fake_scale(gradients: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(gradient) for gradient in gradients]


OPERATORS.define(
    "scale(Tensor[] gradients, Tensor[] factors) -> Tensor[]",
    scale,
    _fake_scale,
    batched=lambda gradients, factors: [gradient * factor for gradient, factor in zip(gradients, factors, strict=True)],
)
OPERATORS.gradient("scale")
