"""Listens to a call of an operator, and writes lines that do the same."""

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
from .repetition import Descriptor, Names, Place, Repetition, Step

_MOST_STEPS = 256  # a longer call computes for longer than its host decides
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_FUNCTIONS = {  # called in place of an operator's overloads, which take more time to call
    torch.ops.aten.mm: torch.mm,
    torch.ops.aten.addmm: torch.addmm,
}
_UNREPEATABLE = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
    torch.Tag.nondeterministic_seeded,
}
_CONSTANTS = (int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Base(NamedTuple):
    """Of an argument or a new tensor: its first byte in its storage, its dtype, and bytes of a row, 0 if not contiguous."""

    start: int
    dtype: torch.dtype
    row: int


def record(run: Callable[..., Any], arguments: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Any, Repetition | str]:
    """A call's results, and the call to repeat, or why it cannot be repeated.

    Args:
        run: an operator's implementation.
        arguments: the call's.
        tensors: those among them, also in lists.
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
        self._names = Names()
        self._watchers: set[Watchers] = set()
        self._calls_pytorch = False
        self.refused = ""
        self._argument_count = len(tensors)
        self._is_noting = True
        self._next_number = 0
        self._bases: dict[int, _Base] = {}  # by their numbers
        self._views: dict[str, int] = {}  # numbers of views by the text that makes them
        self._places: MutableMapping[Tensor, Place] = WeakTensorKeyDictionary()  # keeps no tensor alive
        for tensor in tensors:
            self._add_base(tensor)
            if tensor.device != self._device:
                self.refuse("arguments are on several devices")

    def repetition(self, results: Any) -> Repetition:
        """The call to repeat, whose results these are, with places for tensors."""
        return Repetition(
            self._steps,
            self._names,
            self._argument_count,
            results,
            self._device,
            self._watchers,
            calls_pytorch=self._calls_pytorch,
        )

    def refuse(self, reason: str) -> None:
        """See `listening.Listener`."""
        self.refused = self.refused or reason

    def launched(
        self, call: DirectCall, grid: int, tensors: Sequence[Any], scalars: tuple[Any, ...], watchers: Watchers
    ) -> None:
        """See `listening.Listener`."""
        places, names = self._places_to_note(tensors), self._names
        if places is None:
            return
        # Triton's launcher takes addresses. That of triton-ascend takes tensors.
        spell = names.spell_address if self._device.type == "cuda" else names.spell
        stream = f"{names.of(call.stream_of)}({self._device.index})"
        values = [*map(names.spell, call.handles), *map(spell, places), *map(names.spell, (*scalars, *call.rest))]
        self._add(f"{names.of(call.run)}({grid}, 1, 1, {stream}, {', '.join(values)})")
        self._watchers.add(watchers)

    def call(self, run: Callable[..., None], tensors: Sequence[Any]) -> None:
        """See `listening.Listener`."""
        was_noting, self._is_noting = self._is_noting, False
        try:
            run(*tensors)
        finally:
            self._is_noting = was_noting
        places = self._places_to_note(tensors)
        if places is not None:
            self._calls_pytorch = True
            self._add(f"{self._names.of(run)}({', '.join(map(self._names.spell, places))})")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """PyTorch is asked for an operator."""
        results = func(*args, **(kwargs or {}))
        if self._is_noting and not self.refused:
            self._note(func, args, kwargs or {}, results)
        return results

    def places_of(self, value: Any) -> Any:
        """The value with a place for each tensor, which may be in tuples and lists."""
        return tree_map(self._place_of, value, is_leaf=lambda part: isinstance(part, dict))

    def _places_to_note(self, tensors: Sequence[Any]) -> tuple[Any, ...] | None:
        """Places of tensors that a step takes; None if it is not noted: after a refusal new tensors have no places."""
        if not self._is_noting or self.refused:
            return None
        places: tuple[Any, ...] = self.places_of(tuple(tensors))
        return None if self.refused else places

    def _place_of(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf not in self._places:
                self.refuse("a tensor is neither an argument nor made by the call")
            if leaf.is_conj() or leaf.is_neg():
                self.refuse("a tensor is conjugated or negated where it is read")
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
            return self.refuse(f"{operator} is random, reads values or is not known")
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = self.places_of(args), dict(zip(kwargs, self.places_of(tuple(kwargs.values())), strict=True))
        returned = results if isinstance(results, (tuple, list)) else [results]
        made: dict[int, int] = {}  # numbers of new tensors by their position among the results
        for position, tensor in enumerate(returned):
            if not isinstance(tensor, Tensor) or tensor.device != self._device:
                return self.refuse(f"{operator} returns no tensor on the device")
            if tensor in self._places or self.refused:
                continue
            viewed = next((each for each in used if _share_memory(each, tensor)), None)
            if viewed is None:
                made[position] = self._add_base(tensor)
            else:
                self._add_view(tensor, viewed)
                if operator is torch.ops.aten.as_strided.default and self._is_absolute(viewed, *args[3:], **kwargs):
                    self.refuse("a view starts at a given element of an argument's memory")
        if self.refused or not (made or operator._schema.is_mutable):
            return None
        makes = tuple(made.values())
        if operator in _ALLOCATIONS:
            self._add(f"t{makes[0]} = {self._allocation(returned[0])}", makes, has_effect=False)
            return None
        self._calls_pytorch = True
        text = self._operation(operator, *places)
        if made:
            targets = [f"t{made[position]}" if position in made else "_" for position in range(len(returned))]
            text = f"{', '.join(targets)}{',' if returned is results else ''} = {text}"
        self._add(text, makes, has_effect=operator._schema.is_mutable)
        return None

    def _is_absolute(self, viewed: Tensor, storage_offset: int | None = None) -> bool:
        """Whether as_strided was given where to start: from the storage's start, and not from that of an argument in it."""
        return storage_offset is not None and self._places[viewed].base < self._argument_count

    def _add(self, text: str, makes: tuple[int, ...] = (), *, has_effect: bool = True) -> None:
        self._steps.append(Step(text, makes, has_effect))
        if len(self._steps) > _MOST_STEPS:
            self.refuse("the call is long")

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _add_base(self, tensor: Tensor) -> int:
        number = self._new_number()
        start = int(tensor.storage_offset() * tensor.itemsize)
        row = tensor.shape[-1] * tensor.itemsize if tensor.dim() and tensor.is_contiguous() else 0
        self._bases[number] = _Base(start, tensor.dtype, row)
        self._places[tensor] = Place(number, number, 0)
        return number

    def _add_view(self, view: Tensor, viewed: Tensor) -> None:
        number = base = self._places[viewed].base
        start_of_base, dtype, row = self._bases[base]
        if view.dtype != dtype:
            if view.itemsize != dtype.itemsize and (not row or row % view.itemsize):
                return self.refuse("parts of rows are read as another dtype")
            number = self._view_of(base, f"view({self._names.of(view.dtype)})")
        start = int(view.storage_offset() * view.itemsize) - start_of_base
        offset = ""
        if start and base < self._argument_count:
            offset = f", t{number}.storage_offset() + {start // view.itemsize}"
        elif start:  # a new tensor starts where it started in the recorded call
            offset = f", {view.storage_offset()}"
        number = self._view_of(number, f"as_strided({tuple(view.shape)}, {view.stride()}{offset})")
        self._places[view] = Place(number, base, start)
        return None

    def _view_of(self, tensor: int, method: str) -> int:
        """The number of a view, which is made once."""
        text = f"t{tensor}.{method}"
        if text not in self._views:
            self._calls_pytorch = True
            number = self._views[text] = self._new_number()
            self._add(f"t{number} = {text}", (number,), has_effect=False)
        return self._views[text]

    def _allocation(self, like: Tensor) -> str:
        # Code that Inductor generates allocates with it, on the current device: it takes half of the time of empty_strided.
        allocate: Any = getattr(torch._C._dynamo.guards, f"_empty_strided_{like.device.type}", None)
        if allocate is None:
            allocate = functools.partial(_empty_strided, like.device)
        return f"{self._names.of(allocate)}({tuple(like.shape)}, {like.stride()}, {self._names.of(like.dtype)})"

    def _operation(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        values = [*map(self._names.spell, args), *(f"{name}={self._names.spell(kwargs[name])}" for name in kwargs)]
        return f"{self._names.of(_FUNCTIONS.get(operator.overloadpacket, operator))}({', '.join(values)})"


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _empty_strided(device: torch.device, sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)
