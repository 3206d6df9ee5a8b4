"""What one call of an operator did, as steps that are run again for other tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ..launching import listening
from ..launching.direct import DirectCall, Watchers
from ..launching.launcher import current_device, descriptor_type

_MOST_STEPS = 256  # a longer call computes for longer than its host decides
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_UNREPEATABLE = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
}
_CONSTANTS = (int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

_Values = list[Any]
"""A call's tensors, one a slot: its arguments, then those that it makes, which are None outside of their lifetime."""


@dataclass(frozen=True, slots=True)
class _Place:
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
class _Descriptor:
    """A descriptor for TMA: the place of its tensor, and the rest of it."""

    base: _Place
    rest: Any

    def filled(self, values: _Values) -> Any:
        descriptor = copy.copy(self.rest)
        (descriptor.base,) = _tensors((self.base,), values)
        return descriptor


def _tensors(places: Sequence[Any], values: _Values) -> list[Any]:
    """The places with their tensors; what is no place is left as it is."""
    found: list[Any] = []
    for place in places:
        kind = type(place)
        if kind is _Place:
            whole = values[place.slot]
            found.append(whole if place.is_whole else place.view(whole))
        elif isinstance(place, (tuple, list)):
            found.append(getattr(kind, "_make", kind)(_tensors(place, values)))
        else:
            found.append(place.filled(values) if kind is _Descriptor else place)
    return found


def _addresses(places: Sequence[Any], values: _Values) -> list[Any]:
    """The places with the addresses of their tensors."""
    found: list[Any] = []
    for place in places:
        if type(place) is _Place:
            found.append(values[place.slot].data_ptr() + place.start)
        elif type(place) is tuple:
            found.append(tuple(_addresses(place, values)))
        else:
            found.append(place.filled(values) if type(place) is _Descriptor else place)
    return found


class _Whole(NamedTuple):
    """Of a slot's tensor: its first byte in its memory, its dtype, and bytes of a row, 0 if it is not contiguous."""

    start: int
    dtype: torch.dtype
    row: int


class _Step(NamedTuple):
    """A part of the call.

    Attributes:
        run: does it.
        uses: slots that it reads or writes.
        makes: slots that it fills.
        has_effect: it is run even if nothing uses what it makes.
    """

    run: Callable[[_Values], None]
    uses: frozenset[int]
    makes: tuple[int, ...]
    has_effect: bool


class Repetition:
    """A call that is done again for other tensors, of the same sizes, strides, dtypes and device."""

    def __init__(self, tape: _Tape, results: Any) -> None:
        """Of a tape, and of the call's results with places for tensors."""
        made = range(tape.arguments, tape.slots)
        self._steps = tuple(_with_ends(_needed(tape.steps, results), {*made} - _slots(results)))
        self._blank = [None] * len(made)
        self._results = (results,)
        self._kind, self._index, self._calls_pytorch = tape.device.type, tape.device.index, tape.calls_pytorch
        self._current = current_device(self._kind)
        self._watchers = tuple(tape.watchers)

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
        return _tensors(self._results, values)[0]


def record(run: Callable[..., Any], arguments: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, Repetition | str]:
    """A call's results, and the call to repeat, or why it cannot be repeated.

    Args:
        run: an operator's implementation.
        arguments: the call's.
        tensors: those among them.
    """
    tape = _Tape(tensors)
    before, listening.here.listener = listening.here.listener, tape
    try:
        with tape:
            results = run(*arguments)
    finally:
        listening.here.listener = before
    places = tape.places_of(results)
    return results, tape.refused or Repetition(tape, places)


class _Tape(TorchDispatchMode):
    """Notes what PyTorch is asked for, and hears of launches."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.device = tensors[0].device
        self.steps: list[_Step] = []
        self.watchers: set[Watchers] = set()
        self.calls_pytorch = False
        self.refused = ""
        self.arguments = len(tensors)
        self._is_noting = True
        self._whole: list[_Whole] = []  # of each slot
        self._places: MutableMapping[Tensor, _Place] = WeakTensorKeyDictionary()  # keeps no tensor alive
        for tensor in tensors:
            self._add_whole(tensor)

    @property
    def slots(self) -> int:
        """How many tensors there are, of arguments and made."""
        return len(self._whole)

    def refuse(self, reason: str) -> None:
        """See `listening.Listener`."""
        self.refused = self.refused or reason

    def launched(
        self, call: DirectCall, grid: int, tensors: Sequence[Any], scalars: tuple[Any, ...], watchers: Watchers
    ) -> None:
        """See `listening.Listener`."""
        places = self.places_of(tuple(tensors))
        if self.refused:
            return
        # Triton's launcher takes addresses, that of triton-ascend tensors.
        pointers = _addresses if self.device.type == "cuda" else _tensors
        index: int = self.device.index

        def run(values: _Values) -> None:
            call.launch(index, grid, pointers(places, values), scalars)

        self._add(_Step(run, _slots(places), (), has_effect=True))
        self.watchers.add(watchers)

    def call(self, run: Callable[..., None], tensors: Sequence[Any]) -> None:
        """See `listening.Listener`."""
        self._is_noting = False
        run(*tensors)
        self._is_noting = True
        places = self.places_of(tuple(tensors))
        if not self.refused:
            self._add(_Step(lambda values: run(*_tensors(places, values)), _slots(places), (), has_effect=True))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """PyTorch is asked for an operator."""
        results = func(*args, **(kwargs or {}))
        if self._is_noting and not self.refused:
            self._note(func, args, kwargs or {}, results)
        return results

    def places_of(self, value: Any) -> Any:
        """The value with a place for each tensor."""
        return tree_map(self._place_of, value)

    def _place_of(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf not in self._places:
                self.refuse("a tensor is neither an argument nor made by the call")
            return self._places.get(leaf)
        if descriptor_type() is not None and isinstance(leaf, descriptor_type()):
            rest = copy.copy(leaf)
            rest.base = None
            return _Descriptor(self._place_of(leaf.base), rest)
        if not isinstance(leaf, _CONSTANTS):
            self.refuse(f"a {type(leaf).__name__} may have tensors")
        return leaf

    def _note(self, operator: Any, args: Any, kwargs: Any, results: Any) -> None:
        if operator.namespace != "aten" or not _UNREPEATABLE.isdisjoint(operator.tags):
            return self.refuse(f"{operator} may do something else the next time")
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        where = self.places_of((args, kwargs))
        made: list[tuple[int, int]] = []
        for position, tensor in enumerate(results if isinstance(results, (tuple, list)) else [results]):
            if not isinstance(tensor, Tensor) or tensor.device != self.device:
                return self.refuse(f"{operator} returns no tensor on the device")
            if tensor in self._places or self.refused:
                continue
            viewed = next((each for each in used if _share_memory(each, tensor)), None)
            if viewed is None:
                made.append((self._add_whole(tensor), position))
            else:
                self._add_view(tensor, viewed)
                if operator is torch.ops.aten.as_strided.default and self._starts_elsewhere(viewed, *args[3:], **kwargs):
                    self.refuse("a view starts at a given element of an argument's memory")
        is_mutable = operator._schema.is_mutable
        if self.refused or not (made or is_mutable):
            return None
        makes = tuple(slot for slot, _ in made)
        if operator in _ALLOCATIONS:
            self._add(_Step(_allocation(makes[0], tensor), frozenset(), makes, has_effect=False))
        else:
            self.calls_pytorch = True
            self._add(_Step(_operation(operator, where[0], where[1], made), _slots(where), makes, is_mutable))

    def _starts_elsewhere(self, viewed: Tensor, storage_offset: int | None = None) -> bool:
        return storage_offset is not None and self._places[viewed].slot < self.arguments

    def _add(self, step: _Step) -> None:
        self.steps.append(step)
        if len(self.steps) > _MOST_STEPS:
            self.refuse("the call is long")

    def _add_whole(self, tensor: Tensor) -> int:
        slot = len(self._whole)
        start = int(tensor.storage_offset() * tensor.itemsize)
        row = tensor.shape[-1] * tensor.itemsize if tensor.dim() and tensor.is_contiguous() else 0
        self._whole.append(_Whole(start, tensor.dtype, row))
        self._places[tensor] = _Place(slot, True, 0, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return slot

    def _add_view(self, view: Tensor, viewed: Tensor) -> None:
        slot = self._places[viewed].slot
        whole = self._whole[slot]
        if view.dtype != whole.dtype and (not whole.row or whole.row % view.itemsize):
            self.refuse("parts of rows are read as another dtype")
        start = int(view.storage_offset() * view.itemsize) - whole.start
        self._places[view] = _Place(slot, False, start, tuple(view.shape), view.stride(), view.dtype)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _needed(steps: Sequence[_Step], results: Any) -> list[_Step]:
    """The steps with an effect, and those that make what these use or what is returned."""
    wanted = {*_slots(results)}
    kept = []
    for step in reversed(steps):
        if step.has_effect or not wanted.isdisjoint(step.makes):
            wanted |= step.uses
            kept.append(step)
    return kept[::-1]


def _with_ends(steps: Sequence[_Step], temporary: set[int]) -> Iterator[tuple[Callable[[_Values], None], tuple[int, ...]]]:
    """What each step runs, and the temporary tensors that no later step uses."""
    last = {slot: number for number, step in enumerate(steps) for slot in (*step.uses, *step.makes)}
    for number, step in enumerate(steps):
        yield step.run, tuple(slot for slot in temporary if last.get(slot) == number)


def _slots(places: Any) -> frozenset[int]:
    leaves = [leaf.base if isinstance(leaf, _Descriptor) else leaf for leaf in tree_leaves(places)]
    return frozenset(leaf.slot for leaf in leaves if isinstance(leaf, _Place))


def _allocation(slot: int, like: Tensor) -> Callable[[_Values], None]:
    sizes, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    # Code that Inductor generates allocates with it, on the current device: it takes half of the time of empty_strided.
    allocate: Any = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if allocate is None:
        allocate = functools.partial(_empty_strided, device)

    def run(values: _Values) -> None:
        values[slot] = allocate(sizes, strides, dtype)

    return run


def _empty_strided(device: torch.device, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _operation(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[tuple[int, int]]
) -> Callable[[_Values], None]:
    names, named = tuple(kwargs), tuple(kwargs.values())

    def run(values: _Values) -> None:
        results = operator(*_tensors(args, values), **dict(zip(names, _tensors(named, values), strict=True)))
        for slot, position in made:
            values[slot] = results if isinstance(results, Tensor) else results[position]

    return run
