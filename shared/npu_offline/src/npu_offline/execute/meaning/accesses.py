"""How operations on memory are executed: pointers, loads, stores and atomic updates of several programs at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from xdsl.dialects.builtin import DenseArrayBase
from xdsl.ir import Attribute, Operation, SSAValue

from ...errors import OutOfBoundsError, RaceError, UnsupportedError
from ...module.mlir import name_of, property_of
from ..faults import NARROW_INDEX
from .memory import Memory, OutsideError, RacingError
from .numbers import Array, Numbers, integer_of, kind_of, memory_dtype
from .tiles import BlockPointer, Frame, Mask, Step, column, pure, shape_of, taking_part

_ATOMICS = ["", "and", "or", "xor", "add", "fadd", "max", "min", "umax", "umin", "xchg"]
_DOES = {"load": "read", "store": "write"}
_ZERO_PADDING = 1
_LARGEST_NAN = 2


class Accesses:
    """The steps of operations on memory, by the operation's name.

    Attributes:
        numbers: arithmetic.
    """

    def __init__(self, name: str, place: Callable[[Operation], str], memory: Memory, numbers: Numbers) -> None:
        """
        Args:
            name: of the kernel.
            place: where an operation stands.
            memory: what pointers point to.
            numbers: arithmetic.
        """
        self._name, self._place, self._memory, self.numbers = name, place, memory, numbers
        self._makes_pointers = False  # of integers

    def _tt_int_to_ptr(self, op: Operation) -> Step:
        self._makes_pointers = True
        return pure(op, lambda x: x)

    def _tt_addptr(self, op: Operation) -> Step:
        size = memory_dtype(_pointee(op.operands[0].type)).itemsize
        return pure(op, lambda pointer, offset: pointer + offset.astype(np.int64) * size)

    def _tt_bitcast(self, op: Operation) -> Step:
        if "!tt.ptr" in str(op.results[0].type):
            return pure(op, lambda x: x)
        compute = self.numbers.elementwise(op)
        assert compute is not None
        return pure(op, compute)

    def _tt_make_tensor_ptr(self, op: Operation) -> Step:
        axes = len(op.operands) // 3

        def run(base: Array, *rest: Array) -> BlockPointer:
            wide = [each.astype(np.int64) for each in rest]
            return BlockPointer(base, wide[:axes], wide[axes : 2 * axes], wide[2 * axes :])

        return pure(op, run)

    def _tt_advance(self, op: Operation) -> Step:
        def run(block: BlockPointer, *steps: Array) -> BlockPointer:
            return replace(block, offsets=[each + step for each, step in zip(block.offsets, steps, strict=True)])

        return pure(op, run)

    def _tt_make_tensor_descriptor(self, op: Operation) -> Step:
        axes = len(op.operands) // 2

        def run(base: Array, *rest: Array) -> BlockPointer:
            wide = [each.astype(np.int64) for each in rest]
            return BlockPointer(base, wide[:axes], wide[axes:], [np.zeros(1, np.int64)] * axes)

        return pure(op, run)

    def _tt_descriptor_load(self, op: Operation) -> Step:
        descriptor, *places = op.operands
        return self._load(op, descriptor, None, None, _ZERO_PADDING, places)

    def _tt_descriptor_store(self, op: Operation) -> Step:
        descriptor, value, *places = op.operands
        return self._store(op, descriptor, value, None, places)

    def _through(
        self, op: Operation, block: BlockPointer, kind: Attribute, places: Sequence[Array] = ()
    ) -> tuple[Array, Array | None]:
        """The addresses of a tile behind a block pointer, and which of them are inside along the axes that are checked.

        Those of a tensor descriptor, to which an access gives places, are all checked.
        """
        shape, size = shape_of(kind), memory_dtype(kind_of(kind)).itemsize
        found = property_of(op, "boundaryCheck")
        checked = {int(axis) for axis in found.get_values()} if isinstance(found, DenseArrayBase) else set()
        if places:
            block, checked = replace(block, offsets=[each.astype(np.int64) for each in places]), set(range(len(shape)))
        addresses, inside = block.base.reshape(-1, *(1,) * len(shape)), None
        for axis, length in enumerate(shape):
            spread = (-1, *(length if i == axis else 1 for i in range(len(shape))))
            place = (block.offsets[axis][:, None] + np.arange(length)).reshape(spread)
            addresses = addresses + place * column(block.strides[axis], len(shape)) * size
            if axis in checked:
                here = (place >= 0) & (place < column(block.sizes[axis], len(shape)))
                inside = here if inside is None else inside & here
        return addresses, inside

    def _tt_load(self, op: Operation) -> Step:
        padding = property_of(op, "padding")
        return self._load(op, *_segments(op), integer_of(op, "padding") if padding is not None else 0)

    def _load(
        self,
        op: Operation,
        pointer: SSAValue,
        mask: SSAValue | None,
        other: SSAValue | None,
        padded: int,
        places: Sequence[SSAValue] = (),
    ) -> Step:
        (result,) = op.results
        kind = kind_of(result.type)
        dtype = memory_dtype(kind)

        def run(frame: Frame, active: Mask) -> None:
            address, rest = frame[pointer], frame[other] if other is not None else None
            inside = frame[mask] if mask is not None else None
            if isinstance(address, BlockPointer):
                address, inside = self._through(op, address, result.type, [frame[each] for each in places])
                if padded == _LARGEST_NAN:
                    rest = np.array(np.nan, self.numbers.dtype(kind))
                elif padded == _ZERO_PADDING:
                    rest = np.array(0, self.numbers.dtype(kind))
            taken = taking_part(address, inside, active)
            if taken is not None:
                address, taken = np.broadcast_arrays(address, taken)
            with self._outside(op, frame):
                loaded = self.numbers.from_memory(self._memory.read(address, taken, dtype), kind)
            if inside is not None:
                fill = self.numbers.undefined(loaded.shape, kind) if rest is None else rest
                loaded = np.where(inside, loaded, fill).astype(loaded.dtype, copy=False)
            frame[result] = loaded

        return run

    def _tt_store(self, op: Operation) -> Step:
        pointer, value, mask = (*op.operands, None)[:3]
        return self._store(op, pointer, value, mask)

    def _store(
        self, op: Operation, pointer: SSAValue, value: SSAValue, mask: SSAValue | None, places: Sequence[SSAValue] = ()
    ) -> Step:
        kind = kind_of(value.type)

        def run(frame: Frame, active: Mask) -> None:
            address, inside = frame[pointer], frame[mask] if mask is not None else None
            if isinstance(address, BlockPointer):
                address, inside = self._through(op, address, value.type, [frame[each] for each in places])
            raw = self.numbers.to_memory(frame[value], kind)
            taken = taking_part(address, inside, active, len(raw))
            if taken is None:
                address, raw = np.broadcast_arrays(address, raw)
            else:
                address, raw, taken = np.broadcast_arrays(address, raw, taken)
            with self._outside(op, frame):
                self._memory.write(address, taken, raw)

        return run

    def _tt_atomic_rmw(self, op: Operation) -> Step:
        pointer, value, mask = (*op.operands, None)[:3]
        kind, (result,) = kind_of(value.type), op.results
        combine = self._combined(_ATOMICS[integer_of(op, "atomic_rmw_op")])
        return self._atomic(op, pointer, [value], mask, kind, result, combine)

    def _tt_atomic_cas(self, op: Operation) -> Step:
        pointer, expected, value = op.operands
        kind, (result,) = kind_of(value.type), op.results
        return self._atomic(
            op, pointer, [expected, value], None, kind, result, lambda old, want, new: new if old == want else old
        )

    def _atomic(
        self,
        op: Operation,
        pointer: SSAValue,
        values: Sequence[SSAValue],
        mask: SSAValue | None,
        kind: str,
        result: SSAValue,
        combine: Callable[..., Any],
    ) -> Step:
        """Element by element, in the order of the programs: each returns what was there before."""
        dtype, numbers = memory_dtype(kind), self.numbers

        def run(frame: Frame, active: Mask) -> None:
            given = [frame[pointer], *(frame[each] for each in values), frame[mask] if mask is not None else np.True_]
            given = [each.reshape(each.shape or (1,)) for each in map(np.asarray, given)]
            address, *operands, inside = np.broadcast_arrays(*given)
            address, inside = (np.broadcast_to(each, (frame.count, *each.shape[1:])) for each in (address, inside))
            operands = [np.broadcast_to(each, address.shape) for each in operands]
            if active is not None:
                inside = inside & column(active, inside.ndim - 1)
            old = np.zeros(address.shape, numbers.dtype(kind))
            chosen = [np.asarray(each[inside]) for each in operands]
            with self._outside(op, frame, inside):
                places = self._memory.places(address[inside], dtype)
            before = []
            for (data, at), *one in zip(places, *chosen, strict=True):
                now = numbers.from_memory(data[at : at + 1], kind)
                before.append(now[0])
                data[at : at + 1] = numbers.to_memory(np.asarray([combine(now[0], *one)], now.dtype), kind)
            old[inside] = np.array(before, old.dtype) if before else old[inside]
            frame[result] = old

        return run

    @staticmethod
    def _combined(name: str) -> Callable[..., Any]:
        def unsigned(compare: Callable[..., Any]) -> Callable[..., Any]:
            return lambda old, new: compare((old, new), key=lambda each: int(each) & (1 << 8 * each.dtype.itemsize) - 1)

        known: dict[str, Callable[..., Any]] = {
            "and": lambda old, new: old & new,
            "or": lambda old, new: old | new,
            "xor": lambda old, new: old ^ new,
            "add": lambda old, new: old + new,
            "fadd": lambda old, new: old + new,
            "max": max,
            "min": min,
            "umax": unsigned(max),
            "umin": unsigned(min),
            "xchg": lambda old, new: new,
        }
        return known[name]

    def _outside(self, op: Operation, frame: Frame, inside: Array | None = None) -> _Outside:
        return _Outside(self, op, frame, inside)

    def outside(
        self, op: Operation, frame: Frame, error: OutsideError, inside: Array | None, shape: tuple[int, ...]
    ) -> Exception:
        """The error of an access out of bounds."""
        if self._makes_pointers and self._memory.is_real(error.address):
            return UnsupportedError(f"a pointer that kernel {self._name} reads from memory points into no argument")
        each = prod(shape[1:]) if shape else 1
        at = error.at if inside is None else int(np.flatnonzero(inside.ravel())[error.at])
        program = at // max(1, each)
        ids = tuple(int(axis[min(program, len(axis) - 1)]) for axis in frame.programs)
        name, byte, size = self._memory.named(error.address)
        kind = _DOES.get(name_of(op).rpartition("_")[2].removeprefix("tt."), "atomic update")
        line = self._place(op)
        where = f" ({line})" if line else ""
        made = op.operands[0].owner
        narrow = (
            isinstance(made, Operation) and name_of(made) == "tt.addptr" and kind_of(made.operands[1].type) in ("i8", "i16")
        )
        return OutOfBoundsError(
            f"kernel {self._name}, program {ids}: {kind} at byte {byte} of argument {name},"
            f" outside its storage of {size} bytes{where}{NARROW_INDEX if narrow else ''}"
        )


class _Outside:
    """Around an access: an error that names program, argument and line."""

    def __init__(self, accesses: Accesses, op: Operation, frame: Frame, inside: Array | None) -> None:
        self._accesses, self._op, self._frame, self._inside = accesses, op, frame, inside

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, RacingError):
            raise RaceError("programs race as Triton defines it, too")
        if isinstance(error, OutsideError):
            value = self._op.operands[0]
            kind = self._op.results[0].type if self._op.results else self._op.operands[1].type
            shape = shape_of(kind)
            shape = shape if isinstance(self._frame[value], (np.ndarray, BlockPointer)) else ()
            raise self._accesses.outside(self._op, self._frame, error, self._inside, (self._frame.count, *shape)) from None


def _pointee(kind: Attribute) -> str:
    """The element that pointers of a type point to."""
    text = str(kind)
    inner = text[text.rindex("!tt.ptr<") + len("!tt.ptr<") :].split(">")[0].split(",")[0]
    return "ptr" if inner.startswith("!tt.ptr") else inner.strip()


def _segments(op: Operation) -> tuple[SSAValue, SSAValue | None, SSAValue | None]:
    """The pointer, the mask and the rest of a load."""
    return (*op.operands, None, None)[:3]
