"""What operations without regions compute: numbers as values, pointers as offsets into arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import z3
from xdsl.dialects.builtin import DenseArrayBase, DenseIntOrFPElementsAttr, IntegerAttr
from xdsl.ir import Attribute, Operation

from ..module.mlir import name_of, property_of
from . import movement
from .arithmetic import term_of
from .origins import Origins
from .pointers import Block, Nowhere, Pointer, advanced, chosen, moved_by, through_block
from .question import Index, Question, Term, Value
from .types import bits_of, block_shape, is_pointer, shape_of

Known: TypeAlias = "Value | Pointer | Block | Nowhere | None"
"""What is known of a value of TTIR; None of floating-point numbers."""


class Results:
    """Computes results from operands."""

    def __init__(
        self, grid: Sequence[tuple[Value, Value]], contents: Mapping[str, tuple[Value, Value]], origins: Origins
    ) -> None:
        """
        Args:
            grid: number and count of programs in x, y and z.
            contents: first and stop of the integers that a tensor has, where they are declared.
            origins: of values that are not known.
        """
        self._grid, self._contents, self._origins = grid, contents, origins

    def of(self, op: Operation, known: Sequence[Known]) -> list[Known]:
        """What is known of an operation's results, given what is known of its operands."""
        first = self._pointer(op, known) if is_pointer(op.results[0].type) else self._integer(op, known)
        rest = [self.unknown(op, result.type) for result in op.results[1:]]
        return [self.unknown(op, op.results[0].type) if first is None else first, *rest]

    def unknown(self, op: Operation, kind: Attribute) -> Known:
        """A result that nothing is known about."""
        if is_pointer(kind):
            return Nowhere(f"its pointer is {self._origins.name(op)}")
        bits = bits_of(kind)
        return Value(shape_of(kind), lambda question, _: question.unknown(self._origins.name(op), bits)) if bits else None

    def _pointer(self, op: Operation, known: Sequence[Any]) -> Known:
        pointer, *rest = known
        if isinstance(pointer, Nowhere):
            return pointer
        name, kind = name_of(op), op.results[0].type
        if name == "arith.select":
            return chosen(pointer, rest[0], rest[1], self._origins.place(op))
        if isinstance(pointer, Pointer) and _is_movement(op):
            return Pointer(pointer.argument, movement.moved(op, pointer.offset, shape_of(kind)))
        if not all(isinstance(each, Value) for each in rest):
            return None
        if name == "tt.addptr" and isinstance(pointer, Pointer):
            return moved_by(pointer, rest[0])
        if name == "tt.advance" and isinstance(pointer, Block):
            return advanced(pointer, rest)
        if name == "tt.make_tensor_ptr" and isinstance(pointer, Pointer):
            axes = len(rest) // 3
            sizes, strides, offsets = rest[:axes], rest[axes : 2 * axes], rest[2 * axes :]
            return Block(pointer.argument, pointer.offset, sizes, strides, offsets, block_shape(kind, axes))
        return None

    def _integer(self, op: Operation, known: Sequence[Any]) -> Known:
        dialect, _, name = name_of(op).partition(".")
        kind = op.results[0].type
        shape, bits = shape_of(kind), bits_of(kind)
        if not bits:
            return None
        if name == "load":
            return self._loaded(op, known)
        if name == "constant":
            return _constant(op)
        if name == "make_range":
            start = _number(op, "start")
            return Value(shape, lambda _, index: index[0] + start)
        if name in ("get_program_id", "get_num_programs"):
            return self._grid[_number(op, "axis")][name == "get_num_programs"]
        if not all(isinstance(each, Value) for each in known):
            return None
        if _is_movement(op):
            return movement.moved(op, known[0], shape)
        if dialect != "arith":
            return None
        given = bits_of(op.operands[-1].type)

        def element(question: Question, index: Index) -> Term:
            values = [question.at(each, index if each.shape else ()) for each in known]
            found = term_of(question, op, name, bits, given, values)
            return question.unknown(self._origins.name(op), bits) if found is None else found

        return Value(shape, element)

    def _loaded(self, op: Operation, known: Sequence[Any]) -> Value | None:
        """What a load brings: data, or the number that stands in place of elements that a mask leaves out."""
        pointer, mask, other = (*known, None, None)[:3]
        if not isinstance(pointer, (Pointer, Block)):
            return None
        kind, declared = op.results[0].type, self._contents.get(pointer.argument)
        bits, name = bits_of(kind), self._origins.name(op)
        active = through_block(pointer, checked_axes(op))[1] if isinstance(pointer, Block) else mask

        def element(question: Question, index: Index) -> Term:
            between = None if declared is None else (question.at(declared[0]), question.at(declared[1]))
            data = question.unknown(name, bits, between)
            if active is None:
                return data
            rest = question.at(other, index) if isinstance(other, Value) else question.unknown(name, bits)
            return z3.If(question.at(active, index), data, rest)

        return Value(shape_of(kind), element)


def checked_axes(op: Operation) -> list[int]:
    """The axes of a block pointer along which an access leaves out what is outside."""
    found = property_of(op, "boundaryCheck")
    return [int(axis) for axis in found.get_values()] if isinstance(found, DenseArrayBase) else []


def _is_movement(op: Operation) -> bool:
    return name_of(op) in movement.OPERATIONS and property_of(op, "allow_reorder") is None


def _number(op: Operation, name: str) -> int:
    found = property_of(op, name)
    assert isinstance(found, IntegerAttr)
    return found.value.data


def _constant(op: Operation) -> Value | None:
    found, kind = property_of(op, "value"), op.results[0].type
    if isinstance(found, DenseIntOrFPElementsAttr):
        numbers = set(found.get_values())
        if len(numbers) != 1:
            return None
        number = int(numbers.pop())
    else:
        number = _number(op, "value")
    term = z3.BoolVal(number != 0) if bits_of(kind) == 1 else z3.IntVal(number)
    return Value(shape_of(kind), lambda *_: term)
