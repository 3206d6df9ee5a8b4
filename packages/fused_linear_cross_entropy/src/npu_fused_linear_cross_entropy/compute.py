"""The operators of the loss, on a device: kernels on accelerators, `reference` on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.autograd import can_bypass_dispatcher
from npu_tiling.pytorch.repeats import Repeats
from npu_tiling.pytorch.tensors import without_autocast
from torch import Tensor

from . import matmul, parallel, rows
from .calls import LossInputs, Needs, split
from .launch import chunk as launch
from .launch.product import is_possible
from .options import DistillationOptions, EachOptions, Options
from .shape import Shape, Task
from .ways import start

_Way = TypeVar("_Way")
# Fields of the operators' records of tensors that have the tokens' leading dimensions.
_MATRICES, _VECTORS = ("x", "teacher_x", "teacher_probs"), ("target", "token_weight")


def is_unfinished(inputs: Any, options: EachOptions) -> bool:
    """Whether the forward leaves factors of the gradients to the backward (see `reference.rows.target_facts`)."""
    of_classes, of_tokens = getattr(inputs, "class_weight", None), getattr(inputs, "token_weight", None)
    is_weighted = of_classes is not None or of_tokens is not None
    is_small = is_weighted or isinstance(options, DistillationOptions)  # or large
    is_scaled = options.reduction == "mean" or options.reduction == "sum" and is_small
    return inputs.x.dtype == torch.float16 and is_scaled


@without_autocast
def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The six outputs, statistics, three gradients and the factors that these lack (see `gradients.Gradients`)."""
    inputs, options, (save_statistics, *needed) = split(arguments, LossInputs, Options)
    needs, shape = Needs(*needed), inputs.target.shape
    if not any(needs):
        loss = begin(start, Task.LOSS, inputs, options, needs)
        statistics = loss.statistics()
        saved = statistics[: count_saved(options)] if save_statistics else None
        return *loss.losses(statistics, shape), saved, None, None, None, None
    loss = begin(start, Task.LOSS_AND_GRADIENTS, inputs, options, needs)
    statistics, gradients = loss.statistics_and_gradients()
    return *loss.losses(statistics, shape), None, *gradients.of(inputs.x), gradients.unfinished


@without_autocast
def backward(
    dloss: Tensor | None, dentropy: Tensor | None, statistics: Tensor, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """Three gradients: everything is computed again but the statistics."""
    inputs, options, needed = split(arguments, LossInputs, Options)
    loss = begin(start, Task.GRADIENTS, inputs, options, Needs(*needed))
    dloss, dentropy = (d if d is None or d.dim() == 0 else d.reshape(-1) for d in (dloss, dentropy))
    return loss.gradients_of(statistics, dloss, dentropy).of(inputs.x)


def scale(gradients: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    """The gradients times a factor each, in new memory."""
    found = [torch.empty_like(gradient) for gradient in gradients]
    _scale(gradients, factors, found)
    return found


def _scale(gradients: list[Tensor], factors: list[Tensor], into: list[Tensor] | None = None) -> None:
    """Writes the gradients times a factor each; None: in place, where a gradient whose factor is 1 is not touched."""
    device = device_for(factors[0].device) if factors else None
    for gradient, factor, out in zip(gradients, factors, into or gradients, strict=True):
        if device is not None:
            launch.scale(gradient, factor, out, device)
        elif out is not gradient or factor != 1:
            torch.mul(gradient, factor.item(), out=out)


scale_ = Repeats(_scale)  # in place


def _flat(inputs: Any, options: EachOptions) -> Any:
    """A record of tensors with all ranks' tokens in one dimension."""
    changed = {}
    for name, tensor in inputs._asdict().items():
        if tensor is not None and name in _MATRICES:
            matrix = tensor.reshape(-1, tensor.shape[-1])
            changed[name] = matrix if name == "teacher_probs" else parallel.whole_rows(matrix, options)
        elif tensor is not None and name in _VECTORS:
            changed[name] = tensor.reshape(-1)
    return inputs._replace(**changed)


def begin(way: Callable[..., _Way], task: Task, inputs: Any, options: EachOptions, needs: Needs) -> _Way:
    """Prepares an operator's tensors, and gives them to a way with their `Shape` and device.

    Args:
        way: a class of ways/, or a function that chooses one.
        inputs: the operator's record of tensors.
    """
    device, weight_dtype = device_for(inputs.x.device), inputs.weight.dtype
    is_loss = isinstance(inputs, LossInputs)
    if is_loss and device is None:
        check_columns("target", inputs.target, options)
    if inputs.x.dim() != 2 or options.sequence_parallel:
        inputs = _flat(inputs, options)
    if device is not None and inputs.x.stride(1) != 1 and inputs.x.shape[1] > 1:
        inputs = inputs._replace(x=inputs.x.contiguous())  # kernels read rows whose columns are adjacent
    x, bias, frozen = inputs.x, inputs.bias, inputs.frozen
    if weight_dtype != x.dtype:
        inputs = inputs._replace(weight=inputs.weight.to(x.dtype))
    shape = Shape(
        task=task,
        tokens=x.shape[0],
        width=x.shape[1],
        vocabulary=inputs.weight.shape[0],
        x_dtype=x.dtype,
        weight_dtype=weight_dtype,
        bias_dtype=None if bias is None else bias.dtype,
        options=options.of_head,
        needs=needs,
        unfinished=task is Task.LOSS_AND_GRADIENTS and is_unfinished(inputs, options),
        writes_fp32=matmul.writes_fp32(x.device, x.dtype),
        is_readable=is_loss and is_possible(x, inputs.weight, inputs.weight_grad, device),
        device=device,
        frozen_width=0 if frozen is None else frozen.shape[1],
    )
    return way(inputs, options, shape, device)


def can_be_read(*tensors: Any) -> bool:
    """Whether values of tensors, on the device of the first, can be read: on a CPU, and not while a graph is made."""
    return can_bypass_dispatcher(tensors) and device_for(tensors[0].device) is None


def check_columns_early(name: str, target: Tensor, options: EachOptions) -> None:
    """`check_columns` of an argument as it was given, if it can be read: on a CPU, and not while a graph is made."""
    if can_be_read(target):
        check_columns(name, target, options)


def check_columns(name: str, target: Tensor, options: EachOptions, counted: Tensor | None = None) -> None:
    """Raises IndexError where one that is `counted`, by default any, is neither a column of the vocabulary nor ignored."""
    ignore_index, vocab_size = options.ignore_index, options.vocab_size
    wrong = rows.are_counted(target, ignore_index) & ((target < 0) | (target >= vocab_size))
    if counted is not None:
        wrong = wrong & counted
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        index = ", ".join(map(str, place))
        raise IndexError(
            f"{name}{f'[{index}]' if place else ''} is {target[tuple(place)].item()} and must be from 0 to "
            f"{vocab_size - 1}, or ignore_index, {ignore_index}."
        )


def count_saved(options: Options) -> int:
    return rows.SAVED_ENTROPY if options.return_entropy else rows.SAVED
