"""Memory that operators ask PyTorch for, and the dtype that they compute in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and arithmetic for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def allocate(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for a result or a workspace, contiguous, on the device of `like`."""
    return like.new_empty(*shape or (shape,), dtype=dtype)  # one by one: half of the time that PyTorch takes for a tuple


def allocate_like(tensor: Tensor) -> Tensor:
    """Memory for a result of a tensor's shape and dtype, contiguous."""
    if tensor.is_contiguous():  # two thirds of the time that PyTorch takes for `allocate`
        return torch.empty_like(tensor)
    return allocate(tensor, tensor.shape, tensor.dtype)


def is_autocast(tensor: Tensor) -> bool:
    """Whether autocast is enabled where a tensor is. The meta device has no autocast, and PyTorch raises an error there."""
    kind = tensor.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose operations compute in the dtypes of its arguments, also where its caller has enabled autocast.

    The first tensor of the arguments, which may be in a list or tuple, says on which device.
    """

    @functools.wraps(function)
    def called(*arguments: P.args, **options: P.kwargs) -> R:
        tensor = next(_tensors(arguments))
        if not is_autocast(tensor):
            return function(*arguments, **options)
        with torch.autocast(tensor.device.type, enabled=False):
            return function(*arguments, **options)

    return called


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


class Neighbours(tuple[Tensor, ...]):
    """Tensors on a CPU that an emulated kernel reaches through one pointer, that of the first.

    An emulation checks that a kernel stays inside the tensors that it is given; a pointer on a device reaches anything.
    """

    @property
    def dtype(self) -> torch.dtype:
        return self[0].dtype

    @property
    def device(self) -> torch.device:
        return self[0].device

    def data_ptr(self) -> int:
        return self[0].data_ptr()
