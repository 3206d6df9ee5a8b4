"""Registration with PyTorch, in the namespace `npu_fused_linear_cross_entropy`: what the operators have in common.

The arguments of an operator are the fields of a record of tensors, those of a record of options, and flags. A result that is
not asked for is None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from npu_tiling.pytorch.autograd import is_asked
from npu_tiling.pytorch.library import OperatorLibrary
from npu_tiling.pytorch.schemas import schema
from torch import Tensor

from .calls import split

OPERATORS = OperatorLibrary("npu_fused_linear_cross_entropy")
NEEDS = "bool need_dx, bool need_dweight, bool need_dbias"  # schema of `Needs`, and of the gradients
GRADIENTS = "Tensor dx, Tensor dweight, Tensor dbias"


class Gradient:
    """An operator that computes the gradients of x, weight and bias, and its call in the backward of a `Function`.

    The `Function` takes the record's tensors as its last arguments, and keeps `options` and `weight_grad` in its ctx.

    The operator is registered twice: under its name, and with `_added`, which adds the weight's gradient to a `weight_grad`.
    torch.func.vmap takes no operator that may change an argument.

    Args:
        name: of the operator.
        given: the schema of its arguments in front of the tensors: upstream gradients, and what a forward saved.
        inputs, options: the records of tensors and options.
        implementation: computes the gradients, given all of these and which are needed.
        other: one more field of `inputs` that has a gradient; "" for none.
    """

    def __init__(
        self,
        name: str,
        given: str,
        inputs: type[tuple[Any, ...]],
        options: type[tuple[Any, ...]],
        implementation: Callable[..., Any],
        other: str = "",
    ) -> None:
        self._name, fields = name, inputs._fields  # type: ignore[attr-defined]
        trained = ("x", "weight", "bias", other) if other else ("x", "weight", "bias")
        self._places = [fields.index(field) - len(fields) for field in trained]
        self.needs = itemgetter(*self._places)  # of ctx.needs_input_grad: which gradients autograd needs
        count = given.count(",") + 1

        def fake(*arguments: Any) -> tuple[Tensor | None, ...]:
            tensors, _, needed = split(arguments[count:], inputs, options)
            return fake_gradients(tensors, needed, *([getattr(tensors, other)] if other else []))

        def flops(*arguments: Any) -> int:
            tensors, _, (need_dx, need_dweight, *_) = split(arguments[count:], inputs, options)
            return gradient_flops(tensors, need_dx, need_dweight)

        more = (f", bool need_d{other}", f", Tensor d{other}") if other else ("", "")
        arguments = f"({given}, {schema(inputs, options)}, {NEEDS}{more[0]}) -> ({GRADIENTS}{more[1]})"
        changing = arguments.replace("Tensor? weight_grad", "Tensor(a!) weight_grad")
        for operator, signature, batched in ((name, arguments, None), (f"{name}_added", changing, _refuse_several)):
            OPERATORS.define(f"{operator}{signature}", implementation, fake, batched=batched, flops=flops)
            OPERATORS.gradient(operator)

    def __call__(self, ctx: Any, given: Sequence[Any], tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The results of a `Function`'s backward; `tensors`: the record without `weight_grad`, its last field."""
        dx, dweight, *others = self.needs(ctx.needs_input_grad)
        name, weight_grad = self._name, ctx.weight_grad
        if weight_grad is not None:
            dweight = dweight and is_asked(ctx.next_functions[1][0])  # of tensors alone: x, weight, ...
            name, weight_grad = (f"{name}_added", weight_grad) if dweight else (name, None)
        return self.in_place(ctx, OPERATORS(name, *given, *tensors, weight_grad, *ctx.options, dx, dweight, *others))

    def in_place(self, ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Gradients in the places of their tensors among the `Function`'s arguments, None for the others."""
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, gradient in zip(self._places, gradients, strict=True):
            found[place] = gradient
        return tuple(found)


def logits_flops(inputs: Any) -> int:
    """Of the product that makes the logits: x [N, H], with an adapter [N, H + R], and V columns."""
    return 2 * inputs.x.numel() * int(inputs.weight.shape[0])


def gradient_flops(inputs: Any, need_dx: bool, need_dweight: bool) -> int:
    """Of the products of dlogits [N, V] with the weights and with x; an adapter's frozen weight has no gradient."""
    rows = inputs.x.shape[:-1].numel()
    return need_dx * logits_flops(inputs) + need_dweight * 2 * rows * inputs.weight.numel()


def _refuse_several(*arguments: Any) -> None:
    raise NotImplementedError("weight_grad must be left out where there are several upstream gradients (is_grads_batched).")


def fake_gradients(inputs: Any, needed: Sequence[bool], *others: Tensor | None) -> tuple[Tensor | None, ...]:
    """Shapes of the gradients of x, weight and bias, and of other tensors."""
    x = inputs.x
    tensors = (x, inputs.weight if inputs.weight_grad is None else None, inputs.bias, *others)
    return tuple(
        x.new_empty(tensor.shape, dtype=tensor.dtype) if need and tensor is not None else None
        for tensor, need in zip(tensors, needed, strict=True)
    )
