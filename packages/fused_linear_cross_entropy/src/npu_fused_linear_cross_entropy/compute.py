"""The computation of each operator: kernels on accelerators, `reference` on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from npu_tiling import Device, device_for
from npu_tiling.pytorch.tensors import without_autocast
from torch import Tensor

from . import matmul, parallel, rows, tiling
from .gradients import Gradients
from .launch import chunk as launch
from .launch.product import is_possible
from .options import Needs, Options, split
from .shape import Shape, Task
from .ways import Inputs, Loss, start

_Way = TypeVar("_Way")


def is_unfinished(x: Tensor, class_weight: Tensor | None, options: Options) -> bool:
    """Whether the forward leaves factors of the gradients to the backward (see `reference.target_facts`)."""
    return x.dtype == torch.float16 and (options.reduction == "mean" or class_weight is not None)


@without_autocast
def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The six outputs, statistics, three gradients and the factors that these lack (see `gradients.Gradients`)."""
    inputs, options, (save_statistics, *needed) = split(arguments, Inputs, Options)
    needs = Needs(*needed)
    if not any(needs):
        loss = _start(inputs, options, needs, Task.LOSS)
        statistics = loss.statistics()
        saved = statistics[: count_saved(options)] if save_statistics else None
        return *loss.losses(statistics, inputs.target.shape), saved, None, None, None, None
    loss = _start(inputs, options, needs, Task.LOSS_AND_GRADIENTS)
    statistics, gradients = loss.statistics_and_gradients()
    outputs = loss.losses(statistics, inputs.target.shape)
    return *outputs, None, *_shaped(gradients, inputs.x), gradients.unfinished


@without_autocast
def backward(
    dloss: Tensor | None, dentropy: Tensor | None, statistics: Tensor, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """Three gradients: everything is computed again but the statistics."""
    inputs, options, needed = split(arguments, Inputs, Options)
    loss = _start(inputs, options, Needs(*needed), Task.GRADIENTS)
    dloss, dentropy = (d if d is None or d.dim() == 0 else d.reshape(-1) for d in (dloss, dentropy))
    return _shaped(loss.gradients_of(statistics, dloss, dentropy), inputs.x)


def scale(gradients: list[Tensor], factors: list[Tensor]) -> list[Tensor]:
    """The gradients times a number each, in new memory."""
    copies = [gradient.clone() for gradient in gradients]
    scale_(copies, factors)
    return copies


def scale_(gradients: list[Tensor], factors: list[Tensor]) -> None:
    """Multiplies gradients by a number each, in place; a gradient whose number is 1 is neither read nor written."""
    for gradient, factor in zip(gradients, factors, strict=True):
        device = device_for(factor.device)
        if device is not None:
            launch.scale_(gradient, factor, device)
        elif factor != 1:
            gradient *= factor.item()


def _start(inputs: Inputs, options: Options, needs: Needs, task: Task) -> Loss:
    device = device_for(inputs.x.device)
    if device is None:
        check_columns("target", inputs.target, options.ignore_index, options.vocab_size)
    x, weight, bias, frozen = inputs.x, inputs.weight, inputs.bias, inputs.frozen
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
        inputs = inputs._replace(target=inputs.target.reshape(-1))
    x = parallel.whole_rows(x, options)
    inputs = inputs._replace(x=x)
    if weight.dtype != x.dtype:
        inputs = inputs._replace(weight=weight.to(x.dtype))
    unfinished = task is Task.LOSS_AND_GRADIENTS and is_unfinished(x, inputs.class_weight, options)
    is_readable = is_possible(x, inputs.weight, device)
    flags = {"unfinished": unfinished, "is_readable": is_readable}
    shape = shape_of(task, x, weight, bias, frozen, options, needs, device, **flags)
    return start(inputs, options, tiling.choose(shape), device)


def begin(way: Callable[..., _Way], task: Task, inputs: Any, options: Options, needs: Needs) -> _Way:
    """A way of ways/ for x [N, H], or this rank's rows of it, and a weight in its dtype or a wider one."""
    device = device_for(inputs.x.device)
    if inputs.weight.dtype != inputs.x.dtype:
        inputs = inputs._replace(weight=inputs.weight.to(inputs.x.dtype))
    inputs = inputs._replace(x=parallel.whole_rows(inputs.x, options))
    shape = shape_of(task, inputs.x, inputs.weight, inputs.bias, inputs.frozen, options, needs, device)
    return way(inputs, options, tiling.choose(shape), device)


def shape_of(
    task: Task,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    frozen: Tensor | None,
    options: Options,
    needs: Needs,
    device: Device | None,
    *,
    unfinished: bool = False,
    is_readable: bool = False,
) -> Shape:
    """The `Shape` of a call with x [N, H], the weight, and the frozen weight in front of it."""
    return Shape(
        task=task,
        tokens=x.shape[0],
        width=x.shape[1],
        vocabulary=weight.shape[0],
        x_dtype=x.dtype,
        weight_dtype=weight.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        options=options,
        needs=needs,
        unfinished=unfinished,
        writes_fp32=matmul.writes_fp32(x.device, x.dtype),
        is_readable=is_readable,
        device=device,
        frozen_width=0 if frozen is None else frozen.shape[1],
    )


def check_columns(name: str, target: Tensor, ignore_index: int, vocab_size: int) -> None:
    """Raises IndexError where one of these is neither a column of the vocabulary nor ignored."""
    wrong = rows.are_counted(target, ignore_index) & ((target < 0) | (target >= vocab_size))
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        index = ", ".join(map(str, place))
        raise IndexError(
            f"{name}{f'[{index}]' if place else ''} is {target[tuple(place)].item()} and must be from 0 to "
            f"{vocab_size - 1}, or ignore_index, {ignore_index}."
        )


def _shaped(gradients: Gradients, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx, dweight, dbias, _ = gradients
    return dx if dx is None or x.dim() == 2 else dx.view(x.shape), dweight, dbias


def count_saved(options: Options) -> int:
    return rows.SAVED_ENTROPY if options.return_entropy else rows.SAVED
