"""Recognises a call that is equal to an earlier one, with few calls of Python.

Tensors are compared by what torch.compile guards its graphs with, in one call. It compares types, dispatch keys, dtypes,
devices, sizes and strides, and takes no tensor twice. Dispatch keys say whether autocast is on, and which tensors have the
other sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import copysign
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .repetition import Repetition

_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
CAN_RECOGNISE = _Guards is not None
ALIGNMENT = 16  # bytes: for other addresses Triton compiles other kernels


class EqualCalls:
    """The calls that are equal to one, of constants, tensors, and lists of these.

    Attributes:
        repetition: does such a call.
    """

    def __init__(self, arguments: Sequence[Any], tensors: Sequence[Tensor], repetition: Repetition) -> None:
        """For the calls that are equal to the one with these arguments.

        Args:
            arguments: of the call.
            tensors: those among them, in their order, none of them twice.
            repetition: of the call.
        """
        self.repetition = repetition
        self._lists = [(i, type(each), len(each)) for i, each in enumerate(arguments) if isinstance(each, (list, tuple))]
        flat = self._flattened(arguments) or arguments
        self._tensors_of = _getter([i for i, each in enumerate(flat) if isinstance(each, Tensor)])
        self._constants_of = _getter([i for i, each in enumerate(flat) if not isinstance(each, Tensor)])
        self._constants = self._constants_of(flat)
        self._kinds = [*map(type, self._constants)]
        self._zeros = [(i, copysign(1.0, each)) for i, each in enumerate(flat) if type(each) is float and not each]
        sizes, strides = ([[*get(tensor)] for tensor in tensors] for get in (Tensor.size, Tensor.stride))
        self._guards = _Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def tensors_of(self, arguments: Sequence[Any]) -> Sequence[Tensor] | None:
        """The tensors of a call, if it is one of these, and they are aligned."""
        flat = self._flattened(arguments) if self._lists else arguments
        if flat is None:
            return None
        constants = self._constants_of(flat)
        if [*map(type, constants)] != self._kinds or constants != self._constants:  # 1 == 1.0 == True
            return None
        for i, sign in self._zeros:
            if copysign(1.0, flat[i]) != sign:
                return None
        tensors = self._tensors_of(flat)
        if not self._guards.check(*tensors):
            return None
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        return None if addresses % ALIGNMENT else tensors

    def _flattened(self, arguments: Sequence[Any]) -> Sequence[Any] | None:
        """The arguments, with what stands in lists in place of them; None if these lists are others."""
        flat = [*arguments]
        for i, kind, length in reversed(self._lists):
            if type(flat[i]) is not kind or len(flat[i]) != length:
                return None
            flat[i : i + 1] = flat[i]
        return flat


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Gives what stands at these places of a sequence."""
    if len(places) == 1:
        (place,) = places
        return lambda sequence: (sequence[place],)
    return itemgetter(*places) if places else lambda sequence: ()
