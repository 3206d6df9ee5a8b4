"""What one call of an operator did, as steps that need nothing but its tensors."""

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
from ..launching.direct import DirectCall
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

_Values = list[Any]
"""A call's tensors: those of its arguments, then those that it makes, None before and after their use."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor of the call is: a view of one of `_Values`.

    Attributes:
        slot: the index of that one.
        is_whole: whether it is that very tensor.
        start: bytes from the start of that one.
        sizes, strides, dtype: of the view.
        is_reread: whether that one has another dtype.
    """

    slot: int
    is_whole: bool
    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_reread: bool

    def view(self, whole: Tensor) -> Tensor:
        """The tensor, of that one."""
        if self.is_reread:
            whole = whole.view(self.dtype)
        return whole.as_strided(self.sizes, self.strides, whole.storage_offset() + self.start // self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class _Descriptor:
    """Where the tensor of a descriptor is, of which Triton makes a tensor map; `blank` is the descriptor without it."""

    base: _Place
    blank: Any

    def filled(self, values: _Values) -> Any:
        descriptor = copy.copy(self.blank)
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
    """Of a tensor that a slot has: its first byte in its memory, its dtype, and bytes of its rows, 0 if there are gaps."""

    start: int
    dtype: torch.dtype
    row: int


class _Step(NamedTuple):
    """A part of the call.

    Attributes:
        run: does it.
        reads: slots of what it reads, or writes in place.
        makes: slots of what it makes.
        is_needed: whatever becomes of what it makes.
    """

    run: Callable[[_Values], None]
    reads: frozenset[int]
    makes: tuple[int, ...]
    is_needed: bool


class Repetition:
    """A call, done again for other tensors of the same sizes, strides, dtypes and device."""

    def __init__(self, tape: _Tape, results: Any) -> None:
        """For the call that a tape has, whose results are at these places."""
        made = range(tape.arguments, tape.slots)
        self._steps = tuple(_with_ends(_needed(tape.steps, results), {*made} - _slots(results)))
        self._blank = [None] * len(made)
        self._results = (results,)
        self._kind, self._index, self._calls_pytorch = tape.device.type, tape.device.index, tape.calls_pytorch
        self._current = current_device(self._kind)
        self._watchers = tuple(tape.watchers)

    def is_possible(self) -> bool:
        """Whether it may be done now: launches are on its device, and nobody wants to hear of them."""
        if self._current is not None and self._current() != self._index:
            return False
        return not any(is_watched() for is_watched in self._watchers)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """The call's results for these tensors."""
        if self._calls_pytorch and torch.is_autocast_enabled(self._kind):  # its casts are among the steps
            with torch.autocast(self._kind, enabled=False):
                return self(tensors)
        values = [*tensors, *self._blank]
        for run, ended in self._steps:
            run(values)
            for slot in ended:
                values[slot] = None
        return _tensors(self._results, values)[0]


def record(run: Callable[..., Any], arguments: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, Repetition | str]:
    """A call's results, and the call to repeat, or why it would not be the same for other tensors.

    Args:
        run: an operator's implementation.
        arguments: the call's.
        tensors: those among them, no two the same.
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
        self.watchers: list[Callable[[], bool]] = []
        self.calls_pytorch = False
        self.refused = ""
        self._is_noting = True
        self.arguments = len(tensors)
        self._whole: list[_Whole] = []  # of each slot
        self._places: MutableMapping[Tensor, _Place] = WeakTensorKeyDictionary()  # no memory is kept longer than else
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
        self,
        call: DirectCall,
        index: int,
        grid: int,
        tensors: Sequence[Any],
        scalars: tuple[Any, ...],
        is_watched: Callable[[], bool],
    ) -> None:
        """See `listening.Listener`."""
        places = self.places_of(tuple(tensors))
        if not self.refused:
            pointers = _addresses if self.device.type == "cuda" else _tensors  # see launcher.py
            run = _launch(call, index, grid, functools.partial(pointers, places), scalars)
            self._add(_Step(run, _slots(places), (), is_needed=True))
            self.watchers.append(is_watched)

    def called(self, run: Callable[..., None], tensors: Sequence[Any]) -> None:
        """See `listening.Listener`."""
        self._is_noting = False
        run(*tensors)
        self._is_noting = True
        places = self.places_of(tuple(tensors))
        if not self.refused:
            self._add(_Step(lambda values: run(*_tensors(places, values)), _slots(places), (), is_needed=True))

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
        if descriptor_type() is not None and isinstance(leaf, descriptor_type()):
            blank = copy.copy(leaf)
            blank.base = None
            return _Descriptor(self._place_of(leaf.base), blank)
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf not in self._places:
            self.refuse("a tensor is neither an argument nor made by the call")
        return self._places.get(leaf)

    def _note(self, operator: Any, args: Any, kwargs: Any, results: Any) -> None:
        if operator.namespace != "aten" or not _UNREPEATABLE.isdisjoint(operator.tags):
            return self.refuse(f"{operator} may do something else the next time")
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        where = self.places_of((args, kwargs))
        made: list[tuple[int, int]] = []
        for position, tensor in enumerate(tree_leaves(results)):
            if not isinstance(tensor, Tensor) or tensor.device != self.device:
                return self.refuse(f"{operator} gives the host something to read")
            if tensor in self._places or self.refused:
                continue
            viewed = next((each for each in read if _share_memory(each, tensor)), None)
            if viewed is None:
                made.append((self._add_whole(tensor), position))
            else:
                self._add_view(tensor, viewed)
        is_mutable = operator._schema.is_mutable
        if self.refused or not (made or is_mutable):
            return None
        makes = tuple(slot for slot, _ in made)
        if operator in _ALLOCATIONS:
            self._add(_Step(_allocation(makes[0], tensor), frozenset(), makes, is_needed=False))
        else:
            self.calls_pytorch = True
            self._add(_Step(_call(operator, where[0], where[1], made), _slots(where), makes, is_mutable))

    def _add(self, step: _Step) -> None:
        self.steps.append(step)
        if len(self.steps) > _MOST_STEPS:
            self.refuse("the call is long")

    def _add_whole(self, tensor: Tensor) -> int:
        slot = len(self._whole)
        start = int(tensor.storage_offset() * tensor.itemsize)
        row = tensor.shape[-1] * tensor.itemsize if tensor.dim() and tensor.is_contiguous() else 0
        self._whole.append(_Whole(start, tensor.dtype, row))
        self._places[tensor] = _Place(slot, True, 0, tuple(tensor.shape), tensor.stride(), tensor.dtype, False)
        return slot

    def _add_view(self, view: Tensor, viewed: Tensor) -> None:
        slot = self._places[viewed].slot
        whole = self._whole[slot]
        is_reread = view.dtype != whole.dtype
        if is_reread and (not whole.row or whole.row % view.itemsize):
            self.refuse("parts of rows are read as another dtype")
        start = int(view.storage_offset() * view.itemsize) - whole.start
        self._places[view] = _Place(slot, False, start, tuple(view.shape), view.stride(), view.dtype, is_reread)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _needed(steps: Sequence[_Step], results: Any) -> list[_Step]:
    """The steps that write to memory, and those that make what these or the results read."""
    wanted = {*_slots(results)}
    kept = []
    for step in reversed(steps):
        if step.is_needed or not wanted.isdisjoint(step.makes):
            wanted |= step.reads
            kept.append(step)
    return kept[::-1]


def _with_ends(steps: Sequence[_Step], temporary: set[int]) -> Iterator[tuple[Callable[[_Values], None], tuple[int, ...]]]:
    """What each step runs, and the temporary tensors that no later step reads."""
    last = {slot: number for number, step in enumerate(steps) for slot in (*step.reads, *step.makes)}
    for number, step in enumerate(steps):
        yield step.run, tuple(slot for slot in temporary if last.get(slot) == number)


def _slots(places: Any) -> frozenset[int]:
    leaves = [leaf.base if isinstance(leaf, _Descriptor) else leaf for leaf in tree_leaves(places)]
    return frozenset(leaf.slot for leaf in leaves if isinstance(leaf, _Place))


def _allocation(slot: int, like: Tensor) -> Callable[[_Values], None]:
    sizes, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    # Code that Inductor generates allocates with it, on the current device: it takes half of the time of empty_strided.
    allocate = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)

    def run(values: _Values) -> None:
        if allocate is not None:
            values[slot] = allocate(sizes, strides, dtype)
        else:
            values[slot] = torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return run


def _launch(
    call: DirectCall, index: int, grid: int, pointers: Callable[[_Values], list[Any]], scalars: tuple[Any, ...]
) -> Callable[[_Values], None]:
    launch, stream_of, handles, rest = call.run, call.stream_of, call.handles, (*scalars, *call.rest)

    def run(values: _Values) -> None:
        launch(grid, 1, 1, stream_of(index), *handles, *pointers(values), *rest)

    return run


def _call(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[tuple[int, int]]
) -> Callable[[_Values], None]:
    names, named = tuple(kwargs), tuple(kwargs.values())

    def run(values: _Values) -> None:
        results = operator(*_tensors(args, values), **dict(zip(names, _tensors(named, values), strict=True)))
        for slot, position in made:
            values[slot] = results if isinstance(results, Tensor) else results[position]

    return run
