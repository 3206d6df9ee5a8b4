"""Memory as a module describes it: which memory a type is of, and the shape, start and strides of views."""

from __future__ import annotations

import re
from typing import Literal

from xdsl.dialects.builtin import ArrayAttr, DenseArrayBase, FixedBitwidthType, MemRefType
from xdsl.ir import Attribute, Operation, SSAValue

from ..errors import UnsupportedError
from .mlir import name_of, property_of

Dimension = tuple["int | SSAValue", ...]
"""The factors of a dimension's size: numbers known at compile time, and values known at run time."""

_DYNAMIC = -(2**63)
_VIEWS = {
    "memref.cast",
    "memref.subview",
    "memref.reinterpret_cast",
    "memref.collapse_shape",
    "memref.expand_shape",
    "memref.memory_space_cast",
    "memref.view",
}
_NAMES = {"hivm.hir.pointer_cast", "memref.extract_strided_metadata", "builtin.unrealized_conversion_cast"}


def is_view(op: Operation) -> bool:
    """Whether an operation only makes a view of memory: it costs address arithmetic and nothing else."""
    return name_of(op) in _VIEWS or name_of(op) in _NAMES


SPACES = {"ub": "ub", "cbuf": "l1", "ca": "l0a", "cb": "l0b", "cc": "l0c"}
"""The dialect's name of each on-chip memory, and the one that `Report` has."""


def space_of(kind: Attribute) -> str | None:
    """Which memory a type is of: "gm" or a value of `SPACES`; "" for the scalar unit's stack, None for a number."""
    if not isinstance(kind, MemRefType):
        return None
    match = re.search(r"address_space<(\w+)>", str(kind.memory_space))
    return SPACES.get(match[1], match[1]) if match else ""


def itemsize_of(kind: Attribute) -> float:
    """Bytes of an element; an eighth for a bit."""
    assert isinstance(kind, MemRefType)
    element = kind.get_element_type()
    return (element.bitwidth if isinstance(element, FixedBitwidthType) else 64) / 8


def shape_of(memory: SSAValue) -> tuple[Dimension, ...]:
    """The shape of a buffer or view."""
    kind, op = memory.type, memory.owner
    assert isinstance(kind, MemRefType)
    sizes = kind.get_shape()
    if all(size >= 0 for size in sizes):
        return tuple((size,) for size in sizes)
    name = name_of(op) if isinstance(op, Operation) else ""
    if not isinstance(op, Operation):
        raise UnsupportedError(f"the time model does not know the size of {kind}")
    if name in ("memref.cast", "memref.memory_space_cast"):
        return shape_of(op.operands[0])
    if name in ("memref.subview", "memref.reinterpret_cast"):
        return tuple((size,) for size in mixed(op, "sizes"))
    if name == "memref.collapse_shape":
        inner, groups = shape_of(op.operands[0]), property_of(op, "reassociation")
        assert isinstance(groups, ArrayAttr)
        return tuple(tuple(factor for axis in group for factor in inner[axis.value.data]) for group in groups)
    if name == "memref.expand_shape":
        return _sizes(op, "static_output_shape", list(op.operands[1:]))
    if name == "arith.select":
        return shape_of(op.operands[1])
    raise UnsupportedError(f"the time model does not know the size of what {name} makes")


def _sizes(op: Operation, name: str, values: list[SSAValue]) -> tuple[Dimension, ...]:
    static = property_of(op, name)
    assert isinstance(static, DenseArrayBase)
    given = iter(values)
    return tuple((next(given),) if int(size) == _DYNAMIC else (int(size),) for size in static.get_values())


def start_of(memory: SSAValue) -> tuple[list[Dimension], tuple[int | SSAValue, ...]] | None:
    """Where in its argument a view begins, in elements, as terms of a sum, and the view's strides.

    None where the views between the argument and this one do not tell.
    """
    inside: list[tuple[int | SSAValue, ...]] = []
    while isinstance(memory.owner, Operation):
        op = memory.owner
        match name_of(op):
            case "memref.reinterpret_cast":
                strides = mixed(op, "strides")
                terms: list[Dimension] = [mixed(op, "offsets")]
                if any(len(offsets) != len(strides) for offsets in inside):
                    return None
                terms += [pair for offsets in inside for pair in zip(offsets, strides, strict=True) if pair[0] != 0]
                return terms, strides
            case "memref.subview":
                inside.append(mixed(op, "offsets"))
            case "memref.cast" | "memref.memory_space_cast":
                pass
            case "memref.collapse_shape" | "memref.expand_shape" if not any(any(offsets) for offsets in inside):
                inside.clear()
            case _:
                return None
        memory = op.operands[0]
    return None


def mixed(op: Operation, name: Literal["offsets", "sizes", "strides"]) -> tuple[int | SSAValue, ...]:
    """Offsets, sizes or strides of a view: numbers where they are known at compile time, values where they are not."""
    segments = property_of(op, "operandSegmentSizes")
    static = property_of(op, f"static_{name}")
    assert isinstance(segments, DenseArrayBase)
    assert isinstance(static, DenseArrayBase)
    memory, offsets, sizes, strides = (int(count) for count in segments.get_values())
    first = memory + {"offsets": 0, "sizes": offsets, "strides": offsets + sizes}[name]
    given = iter(op.operands[first:])
    return tuple(next(given) if int(number) == _DYNAMIC else int(number) for number in static.get_values())


def root_of(memory: SSAValue) -> SSAValue:
    """The argument, or buffer, that a view is of."""
    while isinstance(memory.owner, Operation) and name_of(memory.owner) in (*_VIEWS, "memref.extract_strided_metadata"):
        memory = memory.owner.operands[0]
    return memory


def is_contiguous_inside(memory: SSAValue) -> bool:
    """Whether neighbours along the last dimension are neighbours in memory, as far as the types say."""
    while True:
        kind, op = memory.type, memory.owner
        assert isinstance(kind, MemRefType)
        strides = kind.get_strides()
        if strides is None or not strides or strides[-1] is not None:
            return strides is None or not strides or strides[-1] == 1
        if not isinstance(op, Operation) or name_of(op) not in _VIEWS:
            return True
        memory = op.operands[0]
