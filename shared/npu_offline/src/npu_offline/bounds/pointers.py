"""Pointers into arguments, and accesses through them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import z3

from .question import Index, Question, Term, Value


@dataclass(frozen=True, eq=False)
class Pointer:
    """A pointer, or a tensor of pointers, into one argument.

    Attributes:
        argument: its name.
        offset: in elements.
    """

    argument: str
    offset: Value


@dataclass(frozen=True, eq=False)
class Block:
    """A block pointer: what `tl.make_block_ptr` makes.

    Attributes:
        argument: its name.
        base: the offset of the block's tensor, in elements.
        sizes, strides, offsets: of each axis; offsets move with `tl.advance`.
        shape: of the block.
    """

    argument: str
    base: Value
    sizes: Sequence[Value]
    strides: Sequence[Value]
    offsets: Sequence[Value]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Nowhere:
    """A pointer that is not followed, and why."""

    reason: str


@dataclass(frozen=True, eq=False)
class Access:
    """A load, a store or an atomic update.

    Attributes:
        kind: which of these.
        place: "kernels.py:7:5".
        argument: the tensor's name; nothing where that is not known.
        path: conditions of the branches and loops that it is in.
        mask: which elements are accessed; None for all.
        offset: of each element of the tile, in elements of the argument.
        refused: why it cannot be judged; nothing if it can.
    """

    kind: str
    place: str
    argument: str = ""
    path: Sequence[Value] = ()
    mask: Value | None = None
    offset: Value | None = None
    refused: str = ""


def through_block(block: Block, checked: Sequence[int]) -> tuple[Value, Value]:
    """Offset and mask of an access through a block pointer.

    Args:
        block: the pointer.
        checked: axes along which elements outside the sizes are left out.
    """

    def places(question: Question, index: Index) -> list[Term]:
        return [question.at(offset) + each for offset, each in zip(block.offsets, index, strict=True)]

    def offset(question: Question, index: Index) -> Term:
        found = zip(places(question, index), block.strides, strict=True)
        return sum((place * question.at(stride) for place, stride in found), question.at(block.base))

    def mask(question: Question, index: Index) -> Term:
        found = places(question, index)
        return z3.And(*(z3.And(found[axis] >= 0, found[axis] < question.at(block.sizes[axis])) for axis in checked))

    return Value(block.shape, offset), Value(block.shape, mask)


def moved_by(pointer: Pointer, offset: Value) -> Pointer:
    """The pointer so many elements further."""
    return Pointer(
        pointer.argument,
        Value(offset.shape, lambda question, index: question.at(pointer.offset, index) + question.at(offset, index)),
    )


def advanced(block: Block, steps: Sequence[Value]) -> Block:
    """The block pointer so many elements further along each axis."""
    offsets = [_sum(offset, step) for offset, step in zip(block.offsets, steps, strict=True)]
    return replace(block, offsets=offsets)


def _sum(left: Value, right: Value) -> Value:
    return Value((), lambda question, _: question.at(left) + question.at(right))


def chosen(condition: Value, yes: object, no: object, place: str) -> Value | Pointer | Nowhere:
    """A value or a pointer that a condition chooses of two."""
    if isinstance(yes, Value) and isinstance(no, Value):

        def element(question: Question, index: Index) -> Term:
            return z3.If(
                question.at(condition, index if condition.shape else ()), question.at(yes, index), question.at(no, index)
            )

        return Value(yes.shape, element)
    if isinstance(yes, Pointer) and isinstance(no, Pointer) and yes.argument == no.argument:
        offset = chosen(condition, yes.offset, no.offset, place)
        assert isinstance(offset, Value)
        return Pointer(yes.argument, offset)
    return Nowhere(f"its pointer is one of two ({place})")
