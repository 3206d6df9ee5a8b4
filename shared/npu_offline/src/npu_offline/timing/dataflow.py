"""Which scalar values decide what a kernel issues, and which values they depend on."""

from __future__ import annotations

from collections.abc import Iterator

from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from ..module.jumps import is_cell, passed_to, stored_in
from ..module.mlir import name_of, property_of
from ..module.shapes import Dimension, shape_of, space_of
from .cube import deciding_operands
from .scalars import is_number

_CONTROL = {"scf.for": 3, "scf.if": 1, "cf.cond_br": 1}
_FLAGS = {f"hivm.hir.{name}" for name in ("set_flag", "wait_flag", "sync_block_set", "sync_block_wait")}


def needed_values(function: Operation) -> set[SSAValue]:
    """Every value that a trip count, a branch, an event number or the size or place of a transfer depends on."""
    needed: set[SSAValue] = set()
    pending = [value for op in function.walk() for value in _deciding(op)]
    while pending:
        value = pending.pop()
        if value not in needed:
            needed.add(value)
            pending += sources_of(value)
    return needed


def depends_on_memory(value: SSAValue, seen: set[SSAValue] | None = None) -> bool:
    """Whether a value depends on one that was read from memory."""
    seen = set() if seen is None else seen
    if value in seen:
        return False
    seen.add(value)
    if isinstance(value.owner, Operation) and name_of(value.owner) == "memref.load" and not is_cell(value.owner.operands[0]):
        return True
    return any(depends_on_memory(source, seen) for source in sources_of(value))


def _deciding(op: Operation) -> Iterator[SSAValue]:
    name = name_of(op)
    yield from op.operands[: _CONTROL.get(name, 0)]
    if name in _FLAGS or name == "scf.while":
        yield from op.operands
    elif name == "scf.condition":
        yield op.operands[0]
    elif name == "func.call" or name.startswith("hivm.hir."):
        yield from deciding_operands(op)
        for operand in op.operands:
            if "hivm.vector_function" in op.attributes and is_number(operand.type):
                yield operand
            elif space_of(operand.type) is not None:
                yield from _unknown_sizes(shape_of(operand))
            if space_of(operand.type) == "gm":
                yield from offsets_of(operand)


def _unknown_sizes(shape: tuple[Dimension, ...]) -> Iterator[SSAValue]:
    for factors in shape:
        yield from (factor for factor in factors if isinstance(factor, SSAValue))


def sources_of(value: SSAValue) -> list[SSAValue]:
    """The values that a scalar is computed from, through loops and branches."""
    owner = value.owner
    if isinstance(owner, Block):
        assert isinstance(value, BlockArgument)
        return _sources_of_argument(value, owner)
    position = next(i for i, result in enumerate(owner.results) if result is value)
    name = name_of(owner)
    if name == "scf.for":
        return [owner.regions[0].blocks[0].args[1 + position]]
    if name == "scf.if":
        blocks = [region.blocks[0] for region in owner.regions if region.blocks]
        return [owner.operands[0], *(_passed(block, position) for block in blocks)]
    if name == "scf.while":
        return [_passed(owner.regions[0].blocks[0], position + 1)]
    if name == "memref.load" and is_cell(owner.operands[0]):
        return [owner.operands[0], *stored_in(owner.operands[0])]
    if name == "memref.load":
        return [*owner.operands[1:], *offsets_of(owner.operands[0])]
    return [operand for operand in owner.operands if space_of(operand.type) is None]


def _sources_of_argument(value: BlockArgument, block: Block) -> list[SSAValue]:
    parent = block.parent_op()
    name = name_of(parent) if parent is not None else ""
    position = value.index
    if name == "scf.for":
        assert parent is not None
        if position == 0:
            return list(parent.operands[:3])
        return [parent.operands[2 + position], _passed(block, position - 1)]
    if name == "scf.while":
        assert parent is not None
        before, after = (region.blocks[0] for region in parent.regions)
        return [parent.operands[position], _passed(after, position)] if block is before else [_passed(before, position + 1)]
    return passed_to(block, position)


def _passed(block: Block, position: int) -> SSAValue:
    assert block.last_op is not None
    return block.last_op.operands[position]


def offsets_of(memory: SSAValue) -> list[SSAValue]:
    """The run-time numbers of a view's offsets, sizes and strides, and of the views that it is made of."""
    return [value for part in place_of(memory) for value in part if isinstance(value, SSAValue)]


def place_of(memory: SSAValue) -> list[tuple[SSAValue | str, ...]]:
    """Where in an argument a view begins: for each view on the way its run-time numbers and constant offsets."""
    found: list[tuple[SSAValue | str, ...]] = []
    while isinstance(memory.owner, Operation) and space_of(memory.type) == "gm":
        first, *numbers = memory.owner.operands
        static = property_of(memory.owner, "static_offsets")
        constants = () if static is None else (str(static),)
        found.append((*(number for number in numbers if space_of(number.type) is None), *constants))
        memory = first
    return found


def address_depends_on_memory(memory: SSAValue) -> bool:
    """Whether the start of a view of global memory depends on a value that was read from memory."""
    return any(depends_on_memory(number) for number in offsets_of(memory))
