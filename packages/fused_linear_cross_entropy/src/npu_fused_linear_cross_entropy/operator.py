"""The operators in PyTorch's namespace `npu_fused_linear_cross_entropy`, and their autograd functions.

`forward` and `distillation` are losses. If the loss is one number, and neither an entropy nor a `weight_grad` is asked for,
the forward computes the gradients: they are known but for a factor, by which the backward multiplies them (`scale`).
Otherwise `backward` and `distillation_backward` compute them, and the logits again. Operators of each token's distribution:
distributions/__init__.py.

An operator of gradients is registered twice: under its name, and with `_added`, which adds the weight's gradient to a
`weight_grad`. torch.func.vmap takes no operator that may change an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any, get_type_hints

import torch
from npu_tiling import dispatch
from npu_tiling.operators import Operator
from torch import Tensor

from . import call as calls

LIBRARY = dispatch.OperatorLibrary("npu_fused_linear_cross_entropy")
OPERATORS: list[Operator] = []
_GRADIENTS = calls.Needs._fields
TRAINED = ("x", "weight", "bias")
_is_none = functools.partial(is_, None)  # without a frame of Python


def _logits_flops(call: Any) -> int:
    """Of the product that makes the logits: x [N, H], with an adapter [N, H + R], and V columns."""
    return 2 * call.x.numel() * int(call.weight.shape[0])


def _gradient_flops(call: Any) -> int:
    """Of the products of dlogits [N, V] with the weights and with x; an adapter's frozen weight has no gradient."""
    rows = call.x.shape[:-1].numel()
    return call.needs.dx * _logits_flops(call) + call.needs.dweight * 2 * rows * call.weight.numel()


def forward_flops(call: Any) -> int:
    teacher_x = getattr(call, "teacher_x", None)
    teacher = 0 if teacher_x is None else 2 * teacher_x.numel() * call.teacher_weight.shape[0]
    return _logits_flops(call) + teacher + (_gradient_flops(call) if hasattr(call, "needs") else 0)


def operator_of(
    name: str, record: Any, results: Sequence[str], module: str, plan: str, flops: Callable[[Any], int], **options: Any
) -> Operator:
    made = Operator(LIBRARY, name, record, results, plan=f"{__package__}.{module}:{plan}", flops=flops, **options)
    OPERATORS.append(made)
    return made


class Gradients:
    """The two operators of the gradients of x, weight, bias and `other`, and their call in a `Function`'s backward.

    The `Function` takes `run` and the arguments of its operator, whose tensors those of `record` begin with, and keeps
    `options` and `weight_grad` in its ctx.
    """

    def __init__(self, name: str, record: Any, of: Operator, module: str, plan: str, other: str = "") -> None:
        trained = (*TRAINED, other) if other else TRAINED
        results = (*_GRADIENTS, f"d{other}") if other else _GRADIENTS
        self._places = [1 + of.signature.tensors.index(field) for field in trained]
        self.needs = itemgetter(*self._places)  # of ctx.needs_input_grad: which gradients autograd needs
        self._record = record
        given = (record, results, module, plan, _gradient_flops)
        self.plain = operator_of(name, *given, is_gradient=True)
        self.added = operator_of(f"{name}_added", *given, is_gradient=True, writes=["weight_grad"], batched=_refuse_several)

    def __call__(self, ctx: Any, given: Sequence[Any], tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The results of a `Function`'s backward; `tensors`: its operator's, without `weight_grad`, the last one."""
        dx, dweight, dbias, *others = self.needs(ctx.needs_input_grad)
        operator, weight_grad = self.plain, ctx.weight_grad
        if weight_grad is not None:
            dweight = dweight and dispatch.is_asked(ctx.next_functions[1][0])  # of tensors alone: x, weight, ...
            operator, weight_grad = (self.added, weight_grad) if dweight else (operator, None)
        call = self._record(*given, *tensors, weight_grad, ctx.options, calls.Needs(dx, dweight, dbias), *others)
        return self.in_place(ctx, operator(call))

    def in_place(self, ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients in the places of their tensors among the `Function`'s arguments, None for the others."""
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, gradient in zip(self._places, gradients, strict=True):
            found[place] = gradient
        return tuple(found)


def _refuse_several(*arguments: Any) -> None:
    raise NotImplementedError("weight_grad must be left out where there are several upstream gradients (is_grads_batched).")


class LossOperator:
    """An operator whose first result is a loss, with its gradients.

    Attributes:
        forward: the operator.
        gradient: the operators of its gradients.
        outputs: how many results a caller asks for: the first ones.
        upstream: places of the outputs that may have gradients.
        saves: whether statistics follow them, for a backward that computes the gradients.
    """

    def __init__(
        self, name: str, record: Any, outputs: Sequence[str], module: str, backward: Any, upstream: Sequence[int]
    ) -> None:
        """`backward`: the record of its gradients."""
        self.outputs, self.upstream = len(outputs), upstream
        self.saves = "save_statistics" in record._fields
        self._options = get_type_hints(record)["options"]
        saved = ["statistics"] if self.saves else []
        results = (*outputs, *saved, *_GRADIENTS, "unfinished")
        self.forward = operator_of(name, record, results, module, "forward", forward_flops)
        self.gradient = Gradients(
            "backward" if name == "forward" else f"{name}_backward", backward, self.forward, module, "backward"
        )
        self.forward.autograd(self._with_gradient)
        self._n_asked = 3 + self.saves  # the last arguments: save_statistics, and which gradients

    def _with_gradient(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """The operator where autograd may record it. A call that asks for gradients itself is not recorded."""
        if any(arguments[-self._n_asked :]):
            return LIBRARY.not_differentiable(self.forward.signature.name, run, *arguments)
        if not dispatch.needs_gradient([arguments[place - 1] for place in self.gradient._places]):
            with torch.no_grad():  # class weights that require a gradient would give plain PyTorch one to record
                return run(*arguments)
        n = len(self.forward.signature.tensors)
        *outputs, _ = dispatch.apply(_Loss, run, *arguments[:n], self._options(*arguments[n : -self._n_asked]), self)
        return *outputs, *[None] * (self._n_asked + 1)


class _Loss(dispatch.Function):
    @staticmethod
    def forward(ctx, run, *arguments):  # type: ignore[no-untyped-def]
        *tensors, options, operator = arguments
        ctx.operator, ctx.options, ctx.weight_grad = operator, options, tensors[-1]
        ctx.set_materialize_grads(False)
        ctx.has_gradients = options.is_one_number and ctx.weight_grad is None
        needs = operator.gradient.needs(ctx.needs_input_grad) if ctx.has_gradients else [False] * 3
        found = run(*tensors, *options, *[not ctx.has_gradients] * operator.saves, *needs)
        outputs, saved, (*gradients, unfinished) = found[: operator.outputs], found[operator.outputs : -4], found[-4:]
        source = outputs[0].new_empty(0)  # a second derivative reaches it, and raises
        if ctx.has_gradients:
            ctx.save_for_backward(*gradients, unfinished, source)
        else:
            dispatch.save_tensors(ctx, *saved, *tensors[:-1])
        differentiable = options.differentiable
        constant = [one for place, one in enumerate(outputs) if one is not None and place not in differentiable]
        ctx.mark_non_differentiable(*constant)
        return *outputs, source

    @staticmethod
    def backward(ctx, *upstream):  # type: ignore[no-untyped-def]
        gradient, given = ctx.operator.gradient, [upstream[place] for place in ctx.operator.upstream]
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
    once = not dispatch.keeps_graph() and all(map(Tensor.is_contiguous, present))  # hooks may give them back otherwise
    if once and not torch.is_grad_enabled() and dispatch.can_bypass_dispatcher((*present, *numbers)):
        for gradient, number in zip(present, numbers, strict=True):
            SCALE_.run(gradient, number)
        return list(gradients)

    def scaled(gradient: Tensor, number: Tensor, _: Tensor) -> Tensor:
        found: Tensor = SCALE(calls.Scale(gradient, number))
        return found

    found = iter([LIBRARY.not_differentiable("scale", scaled, *each, source) for each in zip(present, numbers, strict=True)])
    return [None if gradient is None else next(found) for gradient in gradients]


def _scale_(call: Any) -> tuple[()]:
    if call.factor != 1:
        torch.mul(call.gradient, call.factor.item(), out=call.gradient)
    return ()


FORWARD = LossOperator(
    "forward", calls.Forward, calls.LinearCrossEntropyOutput._fields, "loss.ways", calls.Backward, upstream=(0, 5)
)
DISTILLATION = LossOperator(
    "distillation", calls.Distillation, ("loss", "soft", "hard"), "distillation.plan", calls.DistillationBackward, (0,)
)
SCALE = Operator(
    LIBRARY,
    "scale",
    calls.Scale,
    ["scaled"],
    plan=f"{__package__}.loss.gradients:scale",
    reference=lambda call: [call.gradient * call.factor],
    batched=True,
    is_gradient=True,
)
SCALE_ = Operator(
    LIBRARY,
    "scale_",
    calls.Scale,
    [],
    plan=f"{__package__}.loss.gradients:scale_",
    reference=_scale_,
    writes=["gradient"],
)
