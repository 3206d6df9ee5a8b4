"""Reads the memory plan of a final module: where each buffer lies, and which transfers are double-buffered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from xdsl.dialects.builtin import FixedBitwidthType, IntegerAttr, MemRefType, ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from ..errors import UnsupportedError
from .mlir import name_of, property_of
from .shapes import SPACES, space_of

_LOOPS = {"scf.for", "scf.while", "scf.forall"}
_SELECTS = {"arith.select", "llvm.select"}


@dataclass(frozen=True)
class Plan:
    """The highest byte used of each on-chip memory, and whether DMA inside loops is double-buffered."""

    used: dict[str, int]
    double_buffered: bool | None


def read_plan(module: ModuleOp) -> Plan:
    """The plan of a parsed final module.

    Raises:
        UnsupportedError: a buffer's size or address is not known at compile time.
    """
    used = dict.fromkeys(SPACES.values(), 0)
    doubled: list[bool] = []
    for op in module.walk():
        if name_of(op) == "hivm.hir.pointer_cast" and space_of(op.results[0].type) != "gm":  # a pointer that it has read
            space, end = _buffer_end(op)
            used[space] = max(used[space], end)
        doubled += [
            len(addresses_of(value)) > 1
            for value in local_sides(op)
            if in_innermost_loop(op) and not _is_constant_in_loop(op, value)
        ]
    return Plan(used, all(doubled) if doubled else None)


def read_spec(module: ModuleOp) -> dict[str, int]:
    """The chip as the module's `dlti.target_system_spec` describes it: sizes in bits, cores by kind."""
    # The entries have a dialect's own syntax, which a parser of generic MLIR keeps as text.
    text = str(module.attributes["dlti.target_system_spec"])
    return {name: int(value) for name, value in re.findall(r'dl_entry<"(\w+)", (-?\d+) : i32>', text)}


def _buffer_end(op: Operation) -> tuple[str, int]:
    kind = op.results[0].type
    space = space_of(kind)
    assert isinstance(kind, MemRefType)
    assert space is not None
    if any(size < 0 for size in kind.get_shape()):
        raise UnsupportedError(f"the final module has a buffer of unknown size: {kind}")
    element = kind.get_element_type()
    bits = element.bitwidth if isinstance(element, FixedBitwidthType) else 64
    size = (prod(kind.get_shape()) * bits + 7) // 8
    return space, max(_constant(operand) for operand in op.operands) + size


def _constant(value: SSAValue) -> int:
    owner = value.owner
    constant = property_of(owner, "value") if isinstance(owner, Operation) else None
    if not isinstance(constant, IntegerAttr):
        raise UnsupportedError(f"the final module has a buffer whose address is no constant: {value.owner}")
    return constant.value.data


def local_sides(op: Operation) -> Iterator[SSAValue]:
    """The on-chip operands of a DMA: a library call or operation with one side in global memory.

    The accumulator L0C is left out: a matmul's result leaves it once, not once per iteration.
    """
    spaces = [space_of(operand.type) for operand in op.operands]
    if "gm" in spaces and not op.results:
        yield from (value for value, space in zip(op.operands, spaces, strict=True) if space in ("ub", "l1"))


def addresses_of(value: SSAValue) -> set[int]:
    """Every address a buffer may have, followed back through views and selections."""
    op = value.owner
    if not isinstance(op, Operation):
        return set()
    if name_of(op) == "hivm.hir.pointer_cast":
        return {_constant(operand) for operand in op.operands}
    sources = op.operands[1:] if name_of(op) in _SELECTS else op.operands[:1]
    return set().union(*(addresses_of(source) for source in sources)) if sources else set()


def in_innermost_loop(op: Operation) -> bool:
    """Whether a transfer is in a loop that has no inner loop with transfers."""
    loop = _enclosing_loop(op)
    inner = (nested for nested in loop if name_of(nested) in _LOOPS)
    return bool(loop) and not any(True for nested in inner for one in nested.walk() for _ in local_sides(one))


def _enclosing_loop(op: Operation) -> list[Operation]:
    """The operations of the innermost structured loop around `op`, or of the blocks that it shares a cycle with."""
    block = op.parent
    while block is not None:
        if _reaches(block, block):
            region = block.parent
            assert region is not None
            cycle = [other for other in region.blocks if _reaches(block, other) and _reaches(other, block)]
            return [each for other in cycle for top in other.ops for each in top.walk()]
        parent = block.parent_op()
        if parent is None:
            return []
        if name_of(parent) in _LOOPS:
            return [each for each in parent.walk() if each is not parent]
        block = parent.parent
    return []


def _is_constant_in_loop(op: Operation, value: SSAValue) -> bool:
    """Whether a transfer stores a buffer that its loop only stores, such as zeros: a second buffer would not help."""
    if not _is_store(op):
        return False
    addresses = addresses_of(value)
    return not any(
        addresses & addresses_of(operand)
        for other in _enclosing_loop(op)
        if not other.results and not _is_store(other)
        for operand in other.operands
        if space_of(operand.type) in ("ub", "l1")
    )


def _is_store(op: Operation) -> bool:
    """Whether a transfer goes to global memory: its on-chip side comes first."""
    spaces = [space_of(operand.type) for operand in op.operands]
    return "gm" in spaces and not op.results and spaces.index("gm") > 0


def _reaches(start: Block, target: Block) -> bool:
    seen: set[int] = set()
    pending = [start]
    while pending:
        last = pending.pop().last_op
        for successor in last.successors if last is not None else ():
            if successor is target:
                return True
            if id(successor) not in seen:
                seen.add(id(successor))
                pending.append(successor)
    return False
