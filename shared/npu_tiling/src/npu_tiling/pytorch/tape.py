"""Listens to a call of an operator, and makes steps of what it does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ..launching import listening
from ..launching.direct import DirectCall, Watchers
from ..launching.launcher import descriptor_type
from .repetition import Descriptor, Place, Repetition, Step, Values, addresses_at, slots_of, tensors_at

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


class _Whole(NamedTuple):
    """Of a slot's tensor: its first byte in its memory, its dtype, and bytes of a row, 0 if it is not contiguous."""

    start: int
    dtype: torch.dtype
    row: int


def record(run: Callable[..., Any], arguments: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, Repetition | str]:
    """A call's results, and the call to repeat, or why it cannot be repeated.

    Args:
        run: an operator's implementation.
        arguments: the call's.
        tensors: those among them.
    """
    tape = Tape(tensors)
    before, listening.here.listener = listening.here.listener, tape
    try:
        with tape:
            results = run(*arguments)
    finally:
        listening.here.listener = before
    places = tape.places_of(results)
    return results, tape.refused or tape.repetition(places)


class Tape(TorchDispatchMode):
    """Notes what PyTorch is asked for, and hears of launches."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._device = tensors[0].device
        self._steps: list[Step] = []
        self._watchers: set[Watchers] = set()
        self._calls_pytorch = False
        self.refused = ""
        self._arguments = len(tensors)
        self._is_noting = True
        self._whole: list[_Whole] = []  # of each slot
        self._places: MutableMapping[Tensor, Place] = WeakTensorKeyDictionary()  # keeps no tensor alive
        for tensor in tensors:
            self._add_whole(tensor)

    def repetition(self, results: Any) -> Repetition:
        """Of the call, whose results have places for tensors."""
        made = range(self._arguments, len(self._whole))
        calls_pytorch = self._calls_pytorch
        return Repetition(self._steps, made, results, self._device, self._watchers, calls_pytorch=calls_pytorch)

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
        pointers = addresses_at if self._device.type == "cuda" else tensors_at
        index: int = self._device.index

        def run(values: Values) -> None:
            call.launch(index, grid, pointers(places, values), scalars)

        self._add(Step(run, slots_of(places), (), has_effect=True))
        self._watchers.add(watchers)

    def call(self, run: Callable[..., None], tensors: Sequence[Any]) -> None:
        """See `listening.Listener`."""
        self._is_noting = False
        run(*tensors)
        self._is_noting = True
        places = self.places_of(tuple(tensors))
        if not self.refused:
            self._add(Step(lambda values: run(*tensors_at(places, values)), slots_of(places), (), has_effect=True))

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
            return Descriptor(self._place_of(leaf.base), rest)
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
            if not isinstance(tensor, Tensor) or tensor.device != self._device:
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
            self._add(Step(_allocation(makes[0], tensor), frozenset(), makes, has_effect=False))
        else:
            self._calls_pytorch = True
            self._add(Step(_operation(operator, where[0], where[1], made), slots_of(where), makes, is_mutable))

    def _starts_elsewhere(self, viewed: Tensor, storage_offset: int | None = None) -> bool:
        return storage_offset is not None and self._places[viewed].slot < self._arguments

    def _add(self, step: Step) -> None:
        self._steps.append(step)
        if len(self._steps) > _MOST_STEPS:
            self.refuse("the call is long")

    def _add_whole(self, tensor: Tensor) -> int:
        slot = len(self._whole)
        start = int(tensor.storage_offset() * tensor.itemsize)
        row = tensor.shape[-1] * tensor.itemsize if tensor.dim() and tensor.is_contiguous() else 0
        self._whole.append(_Whole(start, tensor.dtype, row))
        self._places[tensor] = Place(slot, True, 0, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return slot

    def _add_view(self, view: Tensor, viewed: Tensor) -> None:
        slot = self._places[viewed].slot
        whole = self._whole[slot]
        if view.dtype != whole.dtype and (not whole.row or whole.row % view.itemsize):
            self.refuse("parts of rows are read as another dtype")
        start = int(view.storage_offset() * view.itemsize) - whole.start
        self._places[view] = Place(slot, False, start, tuple(view.shape), view.stride(), view.dtype)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _allocation(slot: int, like: Tensor) -> Callable[[Values], None]:
    sizes, strides, dtype, device = tuple(like.shape), like.stride(), like.dtype, like.device
    # Code that Inductor generates allocates with it, on the current device: it takes half of the time of empty_strided.
    allocate: Any = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if allocate is None:
        allocate = functools.partial(_empty_strided, device)

    def run(values: Values) -> None:
        values[slot] = allocate(sizes, strides, dtype)

    return run


def _empty_strided(device: torch.device, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _operation(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Sequence[tuple[int, int]]
) -> Callable[[Values], None]:
    names, named = tuple(kwargs), tuple(kwargs.values())

    def run(values: Values) -> None:
        results = operator(*tensors_at(args, values), **dict(zip(names, tensors_at(named, values), strict=True)))
        for slot, position in made:
            values[slot] = results if isinstance(results, Tensor) else results[position]

    return run
