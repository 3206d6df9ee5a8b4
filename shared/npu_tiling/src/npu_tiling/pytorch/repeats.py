"""Equal calls of an operator, done again: its memory, its launches and PyTorch's operators, without deciding them again.

To decide what a small call launches takes the host longer than to launch it. The decision follows from the tensors' sizes,
strides, dtypes and devices, and from the other arguments: for each of these `Repeats` keeps what a call did (tape.py). To
list all that takes longer than the call itself, so that most calls are recognised in another way (equal_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..chips.detection import is_overridden
from ..launching import recording
from .equal_calls import ALIGNMENT, CAN_RECOGNISE, EqualCalls
from .repetition import Repetition
from .tape import record

PLAIN_TENSORS = frozenset((Tensor, Parameter))
CONSTANTS = frozenset((int, float, bool, str, torch.dtype, type(None)))
"""Kinds of arguments, beside tensors and lists of them, of a call that is repeated, and of one that skips the dispatcher."""

_DECIDED = 3  # equal calls before the one that is recorded: `Launcher` calls a kernel directly from its third launch on
_MOST_KEYS = 1024
_MOST_ALIKE = 4  # calls with first arguments of one shape that are recognised: each is compared with a call
_REFUSED = 1
_index_of = methodcaller("get_device")  # of its device, below 0 for a CPU


class Repeats:
    """An operator's implementation, whose equal calls on an accelerator are repeated.

    An implementation must do the same whenever sizes, strides, dtypes and options are equal. If its launches depend on
    addresses, it calls `listening.refuse`. What reads values, makes random numbers or takes a tensor from elsewhere is found
    out, and not repeated.

    Not repeated are calls with tensors on a CPU or not aligned to 16 bytes; under `use_device`, `plain_pytorch` or a
    dispatch mode of PyTorch; while launches are listed; and while a profiler watches Triton's launches. PyTorch's
    deterministic mode fills new memory with NaN, but not that of repeated calls.
    """

    def __init__(self, implementation: Callable[..., Any]) -> None:
        self._implementation = implementation
        # How many calls there were, then how to repeat them, or why that is not possible.
        self._known: dict[Hashable, int | Repetition | str] = {}
        self._recognised: dict[Hashable, list[EqualCalls]] = {}  # the same for some of them, by shapes of first arguments

    def __call__(self, *arguments: Any) -> Any:
        if recording.active is not None or is_overridden() or torch._C._len_torch_dispatch_stack():
            return self._implementation(*arguments)
        first = arguments[0]
        first = len(first) if type(first) is list else getattr(first, "shape", None)
        for equal in self._recognised.get(first, ()):
            found = equal.tensors_of(arguments)
            if found is not None and equal.repetition.is_possible():
                return equal.repetition(found)
        facts: list[Any] = []
        tensors: list[Tensor] = []
        addresses = _list_facts(arguments, facts, tensors)
        if addresses % ALIGNMENT or not tensors:
            return self._implementation(*arguments)
        kind = tensors[0].device.type
        recognise = CAN_RECOGNISE
        if torch.is_autocast_enabled(kind):
            recognise = False
            facts.append(torch.get_autocast_dtype(kind))
        ids = [*map(id, tensors)]
        if len(set(ids)) < len(ids):
            recognise = False
            facts.append(tuple(map(ids.index, ids)))  # which arguments are one tensor
        key = tuple(facts)
        known = self._known.get(key, 0)
        if type(known) is Repetition and known.is_possible():
            if recognise and len(alike := self._recognised.setdefault(first, [])) < _MOST_ALIKE:
                alike.insert(0, EqualCalls(arguments, tensors, known))
            return known(tensors)
        if not isinstance(known, int):
            return self._implementation(*arguments)
        if len(self._known) >= _MOST_KEYS:
            self._known.clear()
            self._recognised.clear()
        if known < _DECIDED:
            self._known[key] = known + 1
            return self._implementation(*arguments)
        results, self._known[key] = record(self._implementation, arguments, tensors)
        return results


def _list_facts(arguments: Sequence[Any], facts: list[Any], tensors: list[Tensor]) -> int:
    """Adds what a call depends on to `facts`, and its tensors to `tensors`.

    Returns:
        The bitwise or of all addresses; `_REFUSED`, which is not aligned, if the call cannot be repeated.
    """
    addresses = 0
    for argument in arguments:
        kind = type(argument)
        if kind in PLAIN_TENSORS:
            index = _index_of(argument)
            if index < 0:
                return _REFUSED
            tensors.append(argument)
            facts += (argument.shape, argument.stride(), argument.dtype, index)
            addresses |= argument.data_ptr()
        elif kind is list or kind is tuple:
            facts += (kind, len(argument))
            addresses |= _list_facts(argument, facts, tensors)
        elif kind is float:
            facts.append(argument or str(argument))  # a zero as text: 0.0 == -0.0
        elif kind in CONSTANTS:
            facts += (kind, argument)  # with its kind: 1 == 1.0 == True
        else:
            return _REFUSED
    return addresses
