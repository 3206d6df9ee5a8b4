"""Recognises a call that is equal to an earlier one, in less time than it takes to list what a call depends on.

Tensors are compared by what torch.compile guards its graphs with, in one call: types, dispatch keys, dtypes, indices of
devices, sizes, strides, and whether they require gradients. That is False where one tensor is given twice, so each is given
once. Dispatch keys say which views are negated, and whether autocast is on, but not what it casts to.
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
        tensors_of: given a call's arguments, its tensors, if it is one of these and they are aligned; None if it is not. A
            function that is written for these calls.
    """

    tensors_of: Callable[[Sequence[Any]], Sequence[Tensor] | None]

    def __init__(self, arguments: Sequence[Any], repetition: Repetition) -> None:
        """For the calls that are equal to the one with these arguments."""
        self.repetition = repetition
        names = Names()
        tensors: list[tuple[str, Tensor]] = []
        lines = _unpacked("arguments", arguments, tensors, names)
        first: dict[int, str] = {}  # names of tensors, where each stands first
        for name, tensor in tensors:
            first.setdefault(id(tensor), name)
        once = [tensor for name, tensor in tensors if first[id(tensor)] == name]
        again = [(name, first[id(tensor)]) for name, tensor in tensors if first[id(tensor)] != name]
        sizes, strides = ([[*get(tensor)] for tensor in once] for get in (Tensor.size, Tensor.stride))
        guards = _Guards(*once, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        lines += [f"if {name} is not {other}: return None" for name, other in again]
        lines.append(f"if not {names.of(guards.check)}({', '.join(first.values())}): return None")
        lines.append(f"if ({' | '.join(f'{name}.data_ptr()' for name in first.values())}) % {ALIGNMENT}: return None")
        lines.append(f"return ({', '.join(name for name, _ in tensors)},)")
        scope = dict(names.constants)
        exec("\n    ".join(["def tensors_of(arguments):", *lines, ""]), scope)
        self.tensors_of = scope["tensors_of"]


def _unpacked(name: str, values: Sequence[Any], tensors: list[tuple[str, Tensor]], names: Names) -> list[str]:
    """Lines that return None unless a list or tuple has the constants and the lists of `values`, each in its place.

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
            rest += _unpacked(variable, value, tensors, names)
        elif isinstance(value, Tensor):
            tensors.append((variable, value))
        else:
            conditions.append(_equals(variable, value, names))
    if conditions:
        lines.append(f"if not ({' and '.join(conditions)}): return None")
    return lines + rest


def _equals(variable: str, constant: Any, names: Names) -> str:
    """The condition that a variable has this constant. 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    name, kind = names.of(constant), type(constant)
    if kind not in (int, float, str):
        return f"{variable} is {name}"
    equal = f"type({variable}) is {kind.__name__} and {variable} == {name}"
    if kind is float and not constant:
        equal += f" and {names.of(copysign)}(1.0, {variable}) == {copysign(1.0, constant)}"
    return f"({variable} is {name} or {equal})"
