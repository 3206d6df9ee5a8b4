"""Recognises a call that is equal to an earlier one, in less time than it takes to list what a call depends on.

Tensors are compared by what torch.compile guards its graphs with, in one call: types, dispatch keys, dtypes, indices of
devices, sizes, strides, and whether they require gradients. It takes no tensor twice. A dispatch key says whether autocast
is on, but not what it casts to; another says that a tensor's memory has the other sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import copysign
from typing import Any

import torch
from torch import Tensor

from .repetition import Names, Repetition

_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)
CAN_RECOGNISE = _Guards is not None  # some releases of PyTorch may have no such guards
ALIGNMENT = 16  # bytes: for other addresses Triton compiles other kernels


class EqualCalls:
    """The calls that are equal to one, whose arguments are constants, tensors, and lists of constants and tensors.

    Attributes:
        repetition: does such a call.
        tensors_of: given a call's arguments, its tensors, if it is one of these and they are aligned; None if it is not.
        source: that function, which was written for these calls.
    """

    tensors_of: Callable[[Sequence[Any]], Sequence[Tensor] | None]

    def __init__(self, arguments: Sequence[Any], repetition: Repetition) -> None:
        """For the calls that are equal to the one with these arguments."""
        self.repetition = repetition
        self._names = Names()
        tensors: list[tuple[str, Tensor]] = []
        lines = self._unpacked("arguments", arguments, tensors)
        first: dict[int, str] = {}  # names of tensors, where each stands first
        for name, tensor in tensors:
            first.setdefault(id(tensor), name)
        once = [tensor for name, tensor in tensors if first[id(tensor)] == name]
        again = [(name, first[id(tensor)]) for name, tensor in tensors if first[id(tensor)] != name]
        sizes, strides = ([[*get(tensor)] for tensor in once] for get in (Tensor.size, Tensor.stride))
        guards = _Guards(*once, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        lines += [f"if {name} is not {other}: return None" for name, other in again]
        lines.append(f"if not {self._names.of(guards.check)}({', '.join(first.values())}): return None")
        lines.append(f"if ({' | '.join(f'{name}.data_ptr()' for name in first.values())}) % {ALIGNMENT}: return None")
        lines.append(f"return ({', '.join(name for name, _ in tensors)},)")
        self.source = "\n    ".join(["def tensors_of(arguments):", *lines, ""])
        scope = dict(self._names.constants)
        exec(self.source, scope)
        self.tensors_of = scope["tensors_of"]

    def _unpacked(self, name: str, values: Sequence[Any], tensors: list[tuple[str, Tensor]]) -> list[str]:
        """Lines that return None unless a list or tuple has equal constants, and lists, in the places of these.

        Adds all tensors, with their names, to `tensors`.
        """
        inner = [f"{name}_{place}" for place in range(len(values))]
        lines = [f"if len({name}) != {len(values)}: return None"]
        if values:
            lines.append(f"{', '.join(inner)}, = {name}")
        conditions, rest = [], []
        for variable, value in zip(inner, values, strict=True):
            if isinstance(value, (list, tuple)):
                conditions.append(f"type({variable}) is {type(value).__name__}")
                rest += self._unpacked(variable, value, tensors)
            elif isinstance(value, Tensor):
                tensors.append((variable, value))
            else:
                conditions.append(self._equals(variable, value))
        if conditions:
            lines.append(f"if not ({' and '.join(conditions)}): return None")
        return lines + rest

    def _equals(self, variable: str, constant: Any) -> str:
        """The condition that a variable has this constant: 1 == 1.0 == True, and 0.0 == -0.0."""
        name, kind = self._names.of(constant), type(constant)
        if kind not in (int, float, str):
            return f"{variable} is {name}"
        equal = f"type({variable}) is {kind.__name__} and {variable} == {name}"
        if kind is float and not constant:
            equal += f" and {self._names.of(copysign)}(1.0, {variable}) == {copysign(1.0, constant)}"
        return f"({variable} is {name} or {equal})"
