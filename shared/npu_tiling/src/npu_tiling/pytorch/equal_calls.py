"""Recognises a call that is equal to an earlier one, in less time than it takes to list what a call depends on.

Tensors are compared by what torch.compile guards its graphs with, in one call: types, dispatch keys, dtypes, indices of
devices, sizes, strides, and whether they require gradients. It takes no tensor twice. A dispatch key says whether autocast
is on, but not what it casts to; another says that a tensor's memory has the other sign.
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
CAN_RECOGNISE = _Guards is not None  # some releases of PyTorch may have no such guards
ALIGNMENT = 16  # bytes: for other addresses Triton compiles other kernels


class EqualCalls:
    """The calls that are equal to one, whose arguments are constants, tensors, and lists of constants and tensors.

    Attributes:
        repetition: does such a call.
    """

    def __init__(self, arguments: Sequence[Any], tensors: Sequence[Tensor], repetition: Repetition) -> None:
        """For the calls that are equal to the one with these arguments.

        Args:
            arguments: of the call.
            tensors: those among them, in their order.
            repetition: of the call.
        """
        self.repetition = repetition
        self._length = len(arguments)
        self._lists = [(i, type(each), len(each)) for i, each in enumerate(arguments) if isinstance(each, (list, tuple))]
        flat = self._flattened(arguments) or arguments
        self._tensors_of = _getter([i for i, each in enumerate(flat) if isinstance(each, Tensor)])
        self._constants_of = _getter([i for i, each in enumerate(flat) if not isinstance(each, Tensor)])
        self._constants = self._constants_of(flat)
        self._kinds = [*map(type, self._constants)]
        self._zeros = [(i, copysign(1.0, each)) for i, each in enumerate(flat) if type(each) is float and not each]
        ids = [*map(id, tensors)]
        firsts = [*map(ids.index, ids)]
        self._again = [(i, first) for i, first in enumerate(firsts) if first < i]  # places of tensors that stand twice
        self._once_of = _getter(sorted({*firsts}))
        once = self._once_of(tensors)
        sizes, strides = ([[*get(tensor)] for tensor in once] for get in (Tensor.size, Tensor.stride))
        self._guards = _Guards(*once, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def tensors_of(self, arguments: Sequence[Any]) -> Sequence[Tensor] | None:
        """The tensors of a call, if it is one of these, and they are aligned."""
        if len(arguments) != self._length:
            return None
        flat = self._flattened(arguments) if self._lists else arguments
        if flat is None:
            return None
        constants = self._constants_of(flat)
        if [*map(type, constants)] != self._kinds or constants != self._constants:  # 1 == 1.0 == True
            return None
        for i, sign in self._zeros:
            if copysign(1.0, flat[i]) != sign:
                return None
        tensors = once = self._tensors_of(flat)
        if self._again:
            for i, first in self._again:
                if tensors[i] is not tensors[first]:
                    return None
            once = self._once_of(tensors)
        if not self._guards.check(*once):
            return None
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        return None if addresses % ALIGNMENT else tensors

    def _flattened(self, arguments: Sequence[Any]) -> Sequence[Any] | None:
        """The arguments, with what stands in lists in place of them; None if a list has another kind or length."""
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
