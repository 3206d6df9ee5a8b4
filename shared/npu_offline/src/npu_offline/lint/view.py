"""Queries of Linalg IR for rules: transfers to and from global memory, loops, tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from xdsl.dialects.builtin import (
    BFloat16Type,
    IntegerType,
    MemRefType,
    ModuleOp,
    NoneAttr,
    StridedLayoutAttr,
    TensorType,
)
from xdsl.ir import Attribute, Operation, SSAValue

from ..launches import RESERVED
from ..module.mlir import name_of, property_of
from ..module.shapes import itemsize_of, root_of

LOOPS = {"scf.for", "scf.while"}
_WHOLE = "memref.reinterpret_cast"
_VIEWS = {_WHOLE, "memref.subview", "memref.cast", "memref.collapse_shape", "memref.expand_shape"}


@dataclass(frozen=True)
class Transfer:
    """A copy between global memory and the core.

    Attributes:
        op: the operation.
        memory: its side in global memory.
        position: which pointer argument that is of.
        store: whether it goes to global memory.
        shape: of the whole tile; a mask may leave out elements at run time.
        strides: in elements; None where they are known at run time only.
        itemsize: bytes of an element.
    """

    op: Operation
    memory: SSAValue
    position: int
    store: bool
    shape: tuple[int, ...]
    strides: tuple[int | None, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tile."""
        return prod(self.shape) * self.itemsize

    @property
    def piece(self) -> int:
        """Bytes of each contiguous piece of the tile."""
        length = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != length:
                break
            length *= size
        return length * self.itemsize


def kernel_of(module: ModuleOp) -> Operation:
    """The function that has a body."""
    functions = [op for op in module.body.block.ops if name_of(op) == "func.func" and op.regions[0].blocks]
    return max(functions, key=lambda function: sum(1 for _ in function.walk()))


def pointers_of(function: Operation) -> Sequence[SSAValue]:
    """Its pointer arguments, without those that the compiler adds."""
    return [value for value in function.regions[0].blocks[0].args if isinstance(value.type, MemRefType)][RESERVED:]


def transfers(module: ModuleOp) -> Iterator[Transfer]:
    """Every copy between global memory and the core, atomic updates included."""
    function = kernel_of(module)
    positions = {pointer: position for position, pointer in enumerate(pointers_of(function))}
    for op in function.walk():
        name = name_of(op)
        if name in ("memref.copy", "bufferization.materialize_in_destination") or is_atomic(op):
            for index, operand in enumerate(op.operands):
                if name == "memref.copy" or index == len(op.operands) - 1:
                    root = root_of(operand)
                    if root in positions:
                        yield _transfer(op, operand, positions[root], store=index == len(op.operands) - 1)


def _transfer(op: Operation, memory: SSAValue, position: int, *, store: bool) -> Transfer:
    kind = memory.type
    assert isinstance(kind, MemRefType)
    shape = list(kind.get_shape())
    source: SSAValue = memory
    while isinstance(source.owner, Operation) and name_of(source.owner) in _VIEWS:
        wider = source.owner.operands[0].type
        if isinstance(wider, MemRefType) and len(wider.get_shape()) == len(shape):
            shape = [outer if size < 0 else size for size, outer in zip(shape, wider.get_shape(), strict=True)]
        source = source.owner.operands[0]
    shape = [max(size, 1) for size in shape]
    return Transfer(op, memory, position, store, tuple(shape), _strides(kind, shape), max(1, int(itemsize_of(kind))))


def _strides(kind: MemRefType, shape: list[int]) -> tuple[int | None, ...]:
    layout = kind.layout
    if isinstance(layout, StridedLayoutAttr):
        return tuple(None if isinstance(stride, NoneAttr) else stride.data for stride in layout.strides.data)
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def is_atomic(op: Operation) -> bool:
    """Whether an operation is an atomic update of global memory."""
    return property_of(op, "GenericAtomicRMW") is not None


def copied_whole_from(tile: SSAValue) -> SSAValue | None:
    """The pointer argument that a tile on chip is copied from as a whole, without a mask; None where it is not."""
    parts = [use.operation.results[0] for use in tile.uses if name_of(use.operation) == "memref.subview"]
    for local in (tile, *parts):
        for copy in (use.operation for use in local.uses if name_of(use.operation) == "memref.copy"):
            source = copy.operands[0]
            if copy.operands[1] is local and isinstance(source.owner, Operation) and name_of(source.owner) == _WHOLE:
                return root_of(source)
    return None


def loops_around(op: Operation) -> list[Operation]:
    """The loops that an operation is in, innermost first."""
    found = []
    parent = op.parent_op()
    while parent is not None:
        if name_of(parent) in LOOPS:
            found.append(parent)
        parent = parent.parent_op()
    return found


def tensor(value: SSAValue, at_least: int = 2) -> tuple[int, Attribute] | None:
    """Elements and element type of a tensor that has at least so many elements; None for anything else."""
    if not isinstance(value.type, TensorType):
        return None
    elements = prod(max(size, 1) for size in value.type.get_shape())
    return (elements, value.type.get_element_type()) if elements >= at_least else None


def is_bf16(kind: Attribute) -> bool:
    """Whether an element type is bf16."""
    return isinstance(kind, BFloat16Type)


def integer_bits(kind: Attribute) -> int:
    """The width of an integer type; 0 for other types, and for truth values."""
    return kind.width.data if isinstance(kind, IntegerType) and kind.width.data > 1 else 0
