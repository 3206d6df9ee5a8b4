"""The operators registered with PyTorch, in its namespace `npu_fused_linear_cross_entropy`.

`linear_cross_entropy` computes the outputs, `linear_cross_entropy_with_gradients` the gradients of a loss that is one number
with them, `linear_cross_entropy_backward` those of anything else, from the statistics that the first one saved, and
`linear_cross_entropy_scaled` multiplies gradients by the upstream one, and by factors that were left for later.
Kernels on accelerators, reference.py on a CPU. A result that is not asked for is None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.autograd import OperatorLibrary
from npu_tiling.pytorch.tensors import nothing, statistics_dtype
from torch import Tensor

from . import row_math
from .engine import Engine, Inputs
from .gradients import Gradients
from .launch import chunk as launch
from .layout import defers
from .options import SCHEMA, Needs, Options, is_autocast

OPERATORS = OperatorLibrary("npu_fused_linear_cross_entropy")
_TENSORS = "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor? divisor"
_NEEDS = "bool need_dx, bool need_dweight, bool need_dbias"
_OUTPUTS = "Tensor loss, Tensor z_loss, Tensor token_accuracy, Tensor predicted_tokens, Tensor lse, Tensor entropy"
_GRADIENTS = "Tensor dx, Tensor dweight, Tensor dbias"


_NO_GRADIENTS = Needs(False, False, False)
P = ParamSpec("P")
R = TypeVar("R")


def _as_given(function: Callable[P, R]) -> Callable[P, R]:
    """Without autocast: its casts are done already, and inside it would round fp32 products."""

    @functools.wraps(function)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        tensor = next(argument for argument in arguments if isinstance(argument, Tensor))
        if not is_autocast(tensor):
            return function(*arguments, **options)
        with torch.autocast(tensor.device.type, enabled=False):
            return function(*arguments, **options)

    return called


@_as_given
def linear_cross_entropy(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The six outputs and, where they are to be saved, the statistics that the gradient is made with."""
    inputs, options, (save_statistics,) = _split(arguments)
    engine = _engine(inputs, options, _NO_GRADIENTS, False)
    statistics = engine.statistics()
    saved = statistics[: _saved(options)] if save_statistics else None
    return *engine.losses(statistics, inputs.target.shape), saved


@_as_given
def with_gradients(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The six outputs, three gradients, and their factors (see `gradients.Gradients`)."""
    inputs, options, needs = _split(arguments)
    engine = _engine(inputs, options, Needs(*needs), defers(inputs.x, inputs.class_weight, options))
    statistics, gradients = engine.loss_and_gradients()
    return *engine.losses(statistics, inputs.target.shape), *_shaped(gradients, inputs.x), gradients.factors


@_as_given
def backward(
    dloss: Tensor | None, dentropy: Tensor | None, statistics: Tensor, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """Three gradients: everything is computed again but the statistics."""
    inputs, options, needs = _split(arguments)
    engine = _engine(inputs, options, Needs(*needs), False)
    dloss, dentropy = (d if d is None or d.dim() == 0 else d.reshape(-1) for d in (dloss, dentropy))
    return _shaped(engine.gradients_of(statistics, dloss, dentropy), inputs.x)


def _split(arguments: tuple[Any, ...]) -> tuple[Inputs, Options, tuple[Any, ...]]:
    """An operator's arguments: tensors, options, and what follows them."""
    end = len(Inputs._fields) + len(Options._fields)
    return Inputs(*arguments[: len(Inputs._fields)]), Options(*arguments[len(Inputs._fields) : end]), arguments[end:]


def scaled(gradients: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    """The gradients times a number each, in memory of their own."""
    copies = [gradient.clone() for gradient in gradients]
    scale_(copies, factors)
    return copies


def scale_(gradients: list[Tensor], factors: list[Tensor]) -> None:
    """The same in place; reads and writes no gradient whose number is 1."""
    for gradient, factor in zip(gradients, factors, strict=True):
        device = device_for(factor.device)
        if device is not None:
            launch.scale_(gradient, factor, device)
        elif factor != 1:
            gradient *= factor.item()


def _engine(inputs: Inputs, options: Options, needs: Needs, deferred: bool) -> Engine:
    device = device_for(inputs.x.device)
    if device is None:
        _check_targets(inputs.target, options)
    if inputs.x.dim() != 2:
        inputs = inputs._replace(x=inputs.x.reshape(-1, inputs.x.shape[-1]), target=inputs.target.reshape(-1))
    return Engine(inputs, options, needs, deferred, device)


def _check_targets(target: Tensor, options: Options) -> None:
    wrong = row_math.are_counted(target, options.ignore_index) & ((target < 0) | (target >= options.vocab_size))
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        index = ", ".join(map(str, place))
        raise IndexError(
            f"target{f'[{index}]' if place else ''} is {target[tuple(place)].item()} and must be from 0 to "
            f"{options.vocab_size - 1}, or ignore_index, {options.ignore_index}."
        )


def _shaped(gradients: Gradients, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx, dweight, dbias, _ = gradients
    return dx if dx is None or x.dim() == 2 else dx.view(x.shape), dweight, dbias


def _saved(options: Options) -> int:
    return row_math.SAVED_ENTROPY if options.return_entropy else row_math.SAVED


def _fake_outputs(x: Tensor, target: Tensor, options: Options) -> list[Tensor]:
    dtype = statistics_dtype(x.dtype)
    reduced = target.shape if options.reduction == "none" else ()
    wanted: list[tuple[bool, Any, torch.dtype]] = [
        (True, reduced, dtype),
        (options.return_z_loss, reduced, dtype),
        (options.return_token_accuracy, (), dtype),
        (options.return_predicted_tokens, target.shape, torch.int64),
        (options.return_lse, target.shape, dtype),
        (options.return_entropy, target.shape, dtype),
    ]
    return [x.new_empty(shape, dtype=dtype) if asked else nothing(x) for asked, shape, dtype in wanted]


def _fake_gradients(inputs: Inputs, needs: tuple[bool, ...]) -> tuple[Tensor, ...]:
    (x, weight, _, bias, _, _), (need_dx, need_dweight, need_dbias) = inputs, needs
    dx = x.new_empty(x.shape) if need_dx else nothing(x)
    dweight = weight.new_empty(weight.shape) if need_dweight else nothing(x)
    return dx, dweight, bias.new_empty(bias.shape) if need_dbias and bias is not None else nothing(x)


def _fake_linear_cross_entropy(*arguments: Any) -> tuple[Tensor, ...]:
    (x, _, target, *_), options, (save_statistics,) = _split(arguments)
    outputs = _fake_outputs(x, target, options)
    if not save_statistics:
        return *outputs, nothing(x)
    return *outputs, x.new_empty((_saved(options), target.numel()), dtype=statistics_dtype(x.dtype))


def _fake_with_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, needs = _split(arguments)
    x, deferred = inputs.x, defers(inputs.x, inputs.class_weight, options)
    factors = x.new_empty(3, dtype=statistics_dtype(x.dtype)) if deferred else nothing(x)
    return *_fake_outputs(x, inputs.target, options), *_fake_gradients(inputs, needs), factors


def _fake_backward(dloss: Tensor | None, dentropy: Tensor | None, statistics: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, _, needs = _split(arguments)
    return _fake_gradients(inputs, needs)


def _fake_scaled(gradients: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(gradient) for gradient in gradients]


OPERATORS.define(
    f"linear_cross_entropy({_TENSORS}, {SCHEMA}, bool save_statistics) -> ({_OUTPUTS}, Tensor statistics)",
    linear_cross_entropy,
    _fake_linear_cross_entropy,
)
OPERATORS.define(
    f"linear_cross_entropy_with_gradients({_TENSORS}, {SCHEMA}, {_NEEDS}) -> ({_OUTPUTS}, {_GRADIENTS}, Tensor factors)",
    with_gradients,
    _fake_with_gradients,
)
OPERATORS.define(
    f"linear_cross_entropy_backward(Tensor? dloss, Tensor? dentropy, Tensor statistics, {_TENSORS}, {SCHEMA}, {_NEEDS})"
    f" -> ({_GRADIENTS})",
    backward,
    _fake_backward,
)
OPERATORS.define(
    "linear_cross_entropy_scaled(Tensor[] gradients, Tensor[] factors) -> Tensor[]",
    scaled,
    _fake_scaled,
    batched=lambda gradients, factors: [gradient * factor for gradient, factor in zip(gradients, factors, strict=True)],
)
