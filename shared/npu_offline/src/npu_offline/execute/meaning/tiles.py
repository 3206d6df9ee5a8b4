"""Values of several programs at once: arrays whose first dimension is the programs, or is 1 where all agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, Operation, SSAValue

from .numbers import Array

Mask = NDArray[np.bool_] | None  # which programs take part; None for all


@dataclass(frozen=True, eq=False)
class BlockPointer:
    """What `tl.make_block_ptr` or `tl.make_tensor_descriptor` makes: an address, and each axis' size, stride and offset."""

    base: Array
    sizes: Sequence[Array]
    strides: Sequence[Array]
    offsets: Sequence[Array]


Value = Any  # an array, or a block pointer
Step = Callable[["Frame", Mask], None]


class Frame(dict[SSAValue, Value]):
    """The values of the programs that are executed at once.

    Attributes:
        programs: x, y and z of each.
        count: how many there are.
    """

    programs: tuple[Array, Array, Array]
    count: int


def pure(op: Operation, compute: Callable[..., Any]) -> Step:
    """The step of an operation whose results depend on its operands alone, in all programs alike."""
    results, operands = list(op.results), list(op.operands)
    if len(results) > 1:

        def several(frame: Frame, _: Mask) -> None:
            frame.update(zip(results, compute(*(frame[each] for each in operands)), strict=True))

        return several
    (result,) = results
    if len(operands) == 2:  # noqa: PLR2004 - most have two
        left, right = operands

        def binary(frame: Frame, _: Mask) -> None:
            frame[result] = compute(frame[left], frame[right])

        return binary

    def one(frame: Frame, _: Mask) -> None:
        frame[result] = compute(*(frame[each] for each in operands))

    return one


def shape_of(kind: Attribute) -> tuple[int, ...]:
    """Of a tile; () of a number."""
    return tuple(kind.get_shape()) if isinstance(kind, TensorType) else ()


def column(x: Array, axes: int) -> Array:
    """A number of each program, as it stands beside tiles."""
    return x.reshape(len(x), *(1,) * axes)


def alike(*values: Array) -> list[Array]:
    """The same, each for as many programs as the others."""
    count = max(map(len, values))
    return [np.broadcast_to(each, (count, *each.shape[1:])) for each in values]


def all_programs(x: Array, count: int) -> Array:
    """A number for each program."""
    return np.broadcast_to(x, (count,))


def both(active: Mask, condition: Array) -> Mask:
    """Programs that take part and fulfil a condition; None where all do."""
    if condition.all():
        return active
    if len(condition) == 1:
        return np.zeros(1, bool) if active is None else np.zeros_like(active)
    return condition if active is None else active & condition


def taking_part(address: Array, inside: Array | None, active: Mask, count: int = 1) -> Array | None:
    """The mask of an access: programs that do not take part count where addresses or values differ between programs."""
    programs = max(len(address), len(inside) if inside is not None else 1, count)
    if active is None or programs == 1:
        return inside
    part = column(active, address.ndim - 1)
    return part if inside is None else inside & part


def chosen(condition: Array, yes: Value, no: Value) -> Value:
    """One of two values; a condition of each program chooses whole tiles."""
    if isinstance(yes, BlockPointer):
        return BlockPointer(
            chosen(condition, yes.base, no.base),
            *(
                [chosen(condition, *pair) for pair in zip(one, other, strict=True)]
                for one, other in ((yes.sizes, no.sizes), (yes.strides, no.strides), (yes.offsets, no.offsets))
            ),
        )
    return np.where(column(condition, yes.ndim - 1) if condition.ndim == 1 else condition, yes, no)


def merged(mask: Mask, new: Value, old: Value) -> Value:
    """New values of the programs that take part, old ones of the others."""
    return new if mask is None or new is old else chosen(mask, new, old)
