"""Equal calls of an operator, done again: its memory, its launches and PyTorch's operators, without deciding them again.

To decide what a small call launches takes the host longer than to launch it. It follows from the sizes, strides and dtypes
of the arguments, and from their values where they are no tensors: by these `Repeats` keeps what a call did (tape.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..chips.detection import is_overridden
from ..launching import recording
from .tape import Repetition, record

PLAIN_TENSORS = frozenset((Tensor, Parameter))
CONSTANTS = frozenset((int, float, bool, str, torch.dtype, type(None)))

_CALLS_BEFORE = 3  # a kernel is compiled in its first launch, watched in the second, and called directly from the third on
_MOST_KEYS = 1024
_ALIGNMENT = 16  # bytes: for other addresses Triton compiles other kernels
_NO_ADDRESS = -1  # of an argument whose kind is not known
_is_on_host = attrgetter("is_cpu")


class Repeats:
    """An operator's implementation, which repeats what it did for equal arguments on an accelerator.

    A call goes to the implementation while launches are listed; where `use_device` names the chip; under a mode of PyTorch,
    which would see what the implementation asks PyTorch for; and where a profiler has hooked into Triton's launches.
    """

    def __init__(self, implementation: Callable[..., Any]) -> None:
        self._implementation = implementation
        # How many calls there were, then how to repeat them, or why that is not possible.
        self._known: dict[Hashable, int | Repetition | str] = {}

    def __call__(self, *arguments: Any) -> Any:
        if recording.active is not None or is_overridden() or torch._C._len_torch_dispatch_stack():
            return self._implementation(*arguments)
        facts: list[Any] = []
        tensors: list[Tensor] = []
        addresses = _list_facts(arguments, facts, tensors)
        if addresses % _ALIGNMENT or _is_on_host(tensors[0]):
            return self._implementation(*arguments)
        key = tuple(facts)
        known = self._known.get(key, 0)
        if type(known) is Repetition and known.is_possible():
            return known(tensors)
        if not isinstance(known, int):
            return self._implementation(*arguments)
        if len(self._known) >= _MOST_KEYS:
            self._known.clear()
        if known < _CALLS_BEFORE or len(set(map(id, tensors))) < len(tensors):
            self._known[key] = known + 1
            return self._implementation(*arguments)
        results, self._known[key] = record(self._implementation, arguments, tensors)
        return results


def _list_facts(arguments: Sequence[Any], facts: list[Any], tensors: list[Tensor]) -> int:
    """Adds what a call depends on to `facts`, and tensors to `tensors`; returns the addresses, joined bit by bit."""
    addresses = 0
    for argument in arguments:
        kind = type(argument)
        if kind in PLAIN_TENSORS:
            tensors.append(argument)
            facts += (argument.shape, argument.stride(), argument.dtype, argument.get_device())
            addresses |= argument.data_ptr()
        elif kind is list or kind is tuple:
            facts.append(len(argument))
            addresses |= _list_facts(argument, facts, tensors)
        elif kind in CONSTANTS:
            facts.append(argument)
        else:
            return _NO_ADDRESS
    return addresses
