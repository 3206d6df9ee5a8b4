"""Types of TTIR: which are pointers, what shape tensors have, how many bits integers have."""

from __future__ import annotations

from xdsl.dialects.builtin import IndexType, IntegerType, TensorType
from xdsl.ir import Attribute

_INDEX_BITS = 64


def is_pointer(kind: Attribute) -> bool:
    """Whether a type is a pointer, a block pointer or a tensor of pointers."""
    return "!tt.ptr" in str(kind)


def shape_of(kind: Attribute) -> tuple[int, ...]:
    """The shape of a tensor; empty for other types."""
    return tuple(kind.get_shape()) if isinstance(kind, TensorType) else ()


def bits_of(kind: Attribute) -> int:
    """Of an integer, or of the integers of a tensor; 0 for other types."""
    element = kind.get_element_type() if isinstance(kind, TensorType) else kind
    if isinstance(element, IndexType):
        return _INDEX_BITS
    return element.width.data if isinstance(element, IntegerType) else 0


def block_shape(kind: Attribute, axes: int) -> tuple[int, ...]:
    """The shape of the block that a block pointer points to."""
    text = str(kind)
    return tuple(int(size) for size in text[text.index("tensor<") + len("tensor<") :].split("x")[:axes])
