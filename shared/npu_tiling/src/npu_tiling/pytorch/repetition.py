"""A call of an operator as steps, which are run again for other tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..launching.direct import Watchers
from ..launching.launcher import current_device

Values = list[Any]
"""A call's tensors, one a slot: its arguments, then those that it makes, which are None outside of their lifetime."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of the call is: a view of a slot's tensor.

    Attributes:
        slot: that slot.
        is_whole: whether it is the slot's tensor itself.
        start: bytes from the start of the slot's tensor.
        sizes, strides, dtype: of the view.
    """

    slot: int
    is_whole: bool
    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def view(self, whole: Tensor) -> Tensor:
        """The view of the slot's tensor."""
        if self.dtype != whole.dtype:
            whole = whole.view(self.dtype)
        return whole.as_strided(self.sizes, self.strides, whole.storage_offset() + self.start // self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A descriptor for TMA: the place of its tensor, and the rest of it."""

    base: Place
    rest: Any

    def filled(self, values: Values) -> Any:
        descriptor = copy.copy(self.rest)
        (descriptor.base,) = tensors_at((self.base,), values)
        return descriptor


def tensors_at(places: Sequence[Any], values: Values) -> list[Any]:
    """The places with their tensors; what is no place is left as it is."""
    found: list[Any] = []
    for place in places:
        kind = type(place)
        if kind is Place:
            whole = values[place.slot]
            found.append(whole if place.is_whole else place.view(whole))
        elif isinstance(place, (tuple, list)):
            found.append(getattr(kind, "_make", kind)(tensors_at(place, values)))
        else:
            found.append(place.filled(values) if kind is Descriptor else place)
    return found


def addresses_at(places: Sequence[Any], values: Values) -> list[Any]:
    """The places with the addresses of their tensors."""
    found: list[Any] = []
    for place in places:
        if type(place) is Place:
            found.append(values[place.slot].data_ptr() + place.start)
        elif type(place) is tuple:
            found.append(tuple(addresses_at(place, values)))
        else:
            found.append(place.filled(values) if type(place) is Descriptor else place)
    return found


class Step(NamedTuple):
    """A part of the call.

    Attributes:
        run: does it.
        uses: slots that it reads or writes.
        makes: slots that it fills.
        has_effect: it is run even if nothing uses what it makes.
    """

    run: Callable[[Values], None]
    uses: frozenset[int]
    makes: tuple[int, ...]
    has_effect: bool


class Repetition:
    """A call that is done again for other tensors, of the same sizes, strides, dtypes and device."""

    def __init__(
        self,
        steps: Sequence[Step],
        made: range,
        results: Any,
        device: torch.device,
        watchers: Iterable[Watchers],
        *,
        calls_pytorch: bool,
    ) -> None:
        """Of the call's steps.

        Args:
            steps: all of them.
            made: the slots of tensors that the call makes; those of its arguments are in front.
            results: what it returned, with places for tensors.
            device: of all tensors.
            watchers: of the kernels that it launches.
            calls_pytorch: whether steps are operators of PyTorch.
        """
        self._steps = tuple(_with_ends(_needed(steps, results), {*made} - slots_of(results)))
        self._blank = [None] * len(made)
        self._results = (results,)
        self._kind, self._index, self._calls_pytorch = device.type, device.index, calls_pytorch
        self._current = current_device(self._kind)
        self._watchers = tuple(watchers)

    def is_possible(self) -> bool:
        """Whether it may be done now: the device is the current one, and no profiler watches Triton's launches."""
        if self._current is not None and self._current() != self._index:
            return False
        return not any(self._watchers)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The call's results for these tensors."""
        if not self._calls_pytorch:
            return self._run(tensors)
        with torch.no_grad():
            if not torch.is_autocast_enabled(self._kind):
                return self._run(tensors)
            with torch.autocast(self._kind, enabled=False):  # what it casts is among the steps
                return self._run(tensors)

    def _run(self, tensors: Sequence[Tensor]) -> Any:
        values = [*tensors, *self._blank]
        for run, ended in self._steps:
            run(values)
            for slot in ended:
                values[slot] = None
        return tensors_at(self._results, values)[0]


def _needed(steps: Sequence[Step], results: Any) -> list[Step]:
    """The steps with an effect, and those that make what these use or what is returned."""
    wanted = {*slots_of(results)}
    kept = []
    for step in reversed(steps):
        if step.has_effect or not wanted.isdisjoint(step.makes):
            wanted |= step.uses
            kept.append(step)
    return kept[::-1]


def _with_ends(steps: Sequence[Step], temporary: set[int]) -> Iterator[tuple[Callable[[Values], None], tuple[int, ...]]]:
    """What each step runs, and the temporary tensors that no later step uses."""
    last = {slot: number for number, step in enumerate(steps) for slot in (*step.uses, *step.makes)}
    for number, step in enumerate(steps):
        yield step.run, tuple(slot for slot in temporary if last.get(slot) == number)


def slots_of(places: Any) -> frozenset[int]:
    leaves = [leaf.base if isinstance(leaf, Descriptor) else leaf for leaf in tree_leaves(places)]
    return frozenset(leaf.slot for leaf in leaves if isinstance(leaf, Place))
