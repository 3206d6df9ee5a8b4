"""Equal calls of an operator, done again: its memory, its launches and PyTorch's operators, without deciding them again.

To decide what a small call launches takes the host longer than to launch it. What is decided depends on facts: sizes,
strides, dtypes and devices of tensors, which of them are one, what autocast casts to, and the other arguments. `Repeats`
keeps, for the facts of a call, what it did (tape.py). To list facts takes longer than to repeat a small call; so most calls
are recognised in another way (equal_calls.py). A new fact is added to both: to `_list_facts` or `Repeats.__call__`, and to
`EqualCalls` or `Repeats.find`.
"""

from __future__ import annotations

import threading
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
"""Kinds of arguments that are no tensors, of a call that is repeated; they may stand in lists too."""

_DECIDED = 3  # equal calls before the one that is recorded: `Launcher` calls a kernel directly from its third launch on
_MOST_KEYS = 1024
_MOST_ALIKE = 4  # kinds of calls of equal sizes that are recognised: a call is compared with one after the other
_LISTS = (list, tuple)
_REFUSED = 1
_recording = threading.Lock()
_index_of = methodcaller("get_device")  # of its device, below 0 for a CPU


class Repeats:
    """An operator's implementation, whose equal calls on an accelerator are repeated.

    An implementation must launch the same whenever facts are equal. If its launches depend on addresses, it calls
    `listening.refuse`. What reads values, makes random numbers or takes a tensor from elsewhere is found out, and not
    repeated, unless `listening.call` hides it.

    Not repeated are long calls; calls with tensors on a CPU, on several devices, on another than the current one, or not
    aligned to 16 bytes; with arguments of other kinds than `CONSTANTS`; under `use_device`, `plain_pytorch` or a dispatch
    mode of PyTorch; while launches are listed; and while a profiler watches Triton's launches. PyTorch's
    deterministic mode fills new memory with NaN, but not that of repeated calls.

    Attributes:
        recognised: what recognises calls, by their sizes (see `_sizes`).
    """

    def __init__(self, implementation: Callable[..., Any]) -> None:
        self._implementation = implementation
        # How many calls there were, then how to repeat them, or why that is not possible.
        self._known: dict[Hashable, int | Repetition | str] = {}
        self.recognised: dict[Hashable, list[EqualCalls]] = {}
        self._count = 0  # of the arguments of calls that are recognised
        self._lists: tuple[int, ...] = ()  # places among them where a list or tuple of tensors has stood

    def find(self, arguments: Sequence[Any]) -> tuple[Repetition, Sequence[Tensor]] | None:
        """How to repeat an equal call, if it is recognised and may be repeated now, and the tensors of this one."""
        if recording.active is not None or is_overridden() or torch._C._len_torch_dispatch_stack():
            return None
        if len(arguments) != self._count:
            return None
        for equal in self.recognised.get(self._sizes(arguments), ()):
            tensors = equal.tensors_of(arguments)
            if tensors is not None and equal.repetition.is_possible():
                return equal.repetition, tensors
        return None

    def __call__(self, *arguments: Any) -> Any:
        found = self.find(arguments) if self.recognised else None
        if found is not None:
            repetition, given = found
            return repetition(given)
        if recording.active is not None or is_overridden() or torch._C._len_torch_dispatch_stack():
            return self._implementation(*arguments)
        facts: list[Any] = []
        tensors: list[Tensor] = []
        addresses = _list_facts(arguments, facts, tensors)
        if addresses % ALIGNMENT or not tensors:
            return self._implementation(*arguments)
        kind = tensors[0].device.type
        is_casting = torch.is_autocast_enabled(kind)
        if is_casting:
            facts.append(torch.get_autocast_dtype(kind))
        ids = [*map(id, tensors)]
        if len(set(ids)) < len(ids):
            facts.append(tuple(map(ids.index, ids)))  # which arguments are one tensor
        key = tuple(facts)
        known = self._known.get(key, 0)
        if type(known) is Repetition and known.is_possible():
            if CAN_RECOGNISE and not is_casting:
                self._recognise(arguments, known)
            return known(tensors)
        if not isinstance(known, int):
            return self._implementation(*arguments)
        if len(self._known) >= _MOST_KEYS:
            self._known.clear()
            self.recognised.clear()
        if known < _DECIDED:
            self._known[key] = known + 1
            return self._implementation(*arguments)
        if not _recording.acquire(blocking=False):  # modes of PyTorch set flags of the whole process: one thread at a time
            return self._implementation(*arguments)
        try:
            results, self._known[key] = record(self._implementation, arguments, tensors)
        finally:
            _recording.release()
        return results

    def _recognise(self, arguments: Sequence[Any], repetition: Repetition) -> None:
        """From now on recognises calls that are equal to this one, unless enough calls of these sizes are recognised."""
        lists = {
            place
            for place, each in enumerate(arguments)
            if type(each) in _LISTS and any(type(e) in PLAIN_TENSORS for e in each)
        }
        if len(arguments) != self._count or not lists.issubset(self._lists):
            self._count, self._lists = len(arguments), tuple(sorted(lists.union(self._lists)))
            self.recognised.clear()
        alike = self.recognised.setdefault(self._sizes(arguments), [])
        if len(alike) < _MOST_ALIKE:
            alike.insert(0, EqualCalls(arguments, repetition))

    def _sizes(self, arguments: Sequence[Any]) -> Hashable:
        """The shape of the tensor that a call begins with, alone or in a list, and the lengths of lists of tensors."""
        first = arguments[0]
        if type(first) in _LISTS and first:
            first = first[0]
        shape = first.shape if type(first) in PLAIN_TENSORS else None
        if not self._lists:
            return shape
        return shape, *[len(each) if type(each := arguments[place]) in _LISTS else None for place in self._lists]


def _list_facts(arguments: Sequence[Any], facts: list[Any], tensors: list[Tensor], *, is_list: bool = False) -> int:
    """Adds what a call depends on to `facts`, and its tensors to `tensors`.

    Args:
        is_list: the arguments are a list among the call's.

    Returns:
        The bitwise or of all addresses: a multiple of 16 if all are. `_REFUSED`, no multiple of 16, if a call with such
        arguments is not repeated.
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
        elif kind in _LISTS and not is_list:
            facts += (kind, len(argument))
            addresses |= _list_facts(argument, facts, tensors, is_list=True)
        elif kind is float:
            # A zero and NaN as text: 0.0 == -0.0, and no NaN equals another.
            facts += (kind, argument if argument and argument == argument else str(argument))
        elif kind in CONSTANTS:
            facts += (kind, argument)  # with its kind: 1 == 1.0 == True
        else:
            return _REFUSED
    return addresses
