"""Tensors whose elements are those of another tensor in other places."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import z3
from xdsl.dialects.builtin import DenseArrayBase, IntegerAttr
from xdsl.ir import Operation

from ..module.mlir import name_of, property_of
from .question import Index, Value

OPERATIONS = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"}


def moved(op: Operation, value: Value, shape: tuple[int, ...]) -> Value:
    """What one of `OPERATIONS` makes of a value.

    Args:
        op: the operation.
        value: its operand.
        shape: of its result.
    """
    match name_of(op):
        case "tt.splat":
            return Value(shape, lambda question, _: question.at(value))
        case "tt.broadcast":
            wide = [size > 1 for size in value.shape]
            return Value(shape, lambda question, index: question.at(value, _kept(index, wide)))
        case "tt.expand_dims":
            axis = property_of(op, "axis")
            assert isinstance(axis, IntegerAttr)
            place = axis.value.data
            return Value(shape, lambda question, index: question.at(value, (*index[:place], *index[place + 1 :])))
        case "tt.trans":
            order = property_of(op, "order")
            assert isinstance(order, DenseArrayBase)
            axes = [int(each) for each in order.get_values()]
            places = [axes.index(axis) for axis in range(len(axes))]
            return Value(shape, lambda question, index: question.at(value, tuple(index[place] for place in places)))
    return Value(shape, lambda question, index: question.at(value, _reshaped(index, shape, value.shape)))


def _kept(index: Index, wide: Sequence[bool]) -> Index:
    return tuple(each if keep else z3.IntVal(0) for each, keep in zip(index, wide, strict=True))


def _reshaped(index: Index, shape: Sequence[int], before: Sequence[int]) -> Index:
    """The index in a tensor of shape `before` of an element of the same tensor reshaped: row-major order."""
    place = sum((each * prod(shape[axis + 1 :]) for axis, each in enumerate(index)), z3.IntVal(0))
    found = (place / prod(before[axis + 1 :]) for axis in range(len(before)))
    return tuple(z3.simplify(each % before[axis] if axis else each) for axis, each in enumerate(found))
