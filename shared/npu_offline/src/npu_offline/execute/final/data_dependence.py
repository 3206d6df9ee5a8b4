"""Whether computed values decide what a kernel does: branches, trip counts, sizes and addresses."""

from __future__ import annotations

from collections.abc import Iterator

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import Operation as Op
from xdsl.ir import SSAValue

from ...module.jumps import jumps_of
from ...module.mlir import name_of
from ...module.operations import operation_of
from ...module.shapes import root_of, space_of

_BRANCHES = {"scf.for": 3, "scf.if": 1, "scf.condition": 1, "cf.cond_br": 1}  # how many leading operands decide
_PLACES = (
    "hivm.hir.pointer_cast",
    "hivm.hir.set_flag",
    "hivm.hir.wait_flag",
)  # their operands: addresses, flags
_VALUE = 1  # position of the memory among the operands of memref.store


def is_data_dependent(function: Op) -> bool:
    """True if a branch, a size or an address may depend on memory of the core, or on an argument that the function writes.

    Arguments that it only reads do not change during a launch: scalar code that depends on them alone can be run without
    performing any instruction.
    """
    ops = list(function.walk())
    written = set(_written(ops))
    computed: set[SSAValue] = set()
    before = -1
    while before != len(computed):  # loops carry values around
        before = len(computed)
        for op in ops:
            if name_of(op) == "memref.load" and _is_computed(op.operands[0], written):
                computed.update(op.results)
            for source, target in _passed(op):
                if source in computed:
                    computed.add(target)
    return any(value in computed for op in ops for value in _deciding(op))


def _written(ops: list[Op]) -> Iterator[SSAValue]:
    """Arguments that are written."""
    for op in ops:
        operation = operation_of(op)
        if operation is not None:
            yield from (root_of(value) for value in operation.writes if space_of(value.type) == "gm")
        elif name_of(op) == "memref.store":
            yield root_of(op.operands[_VALUE])


def _is_computed(memory: SSAValue, written: set[SSAValue]) -> bool:
    root = root_of(memory)
    return space_of(memory.type) != "gm" or root in written or isinstance(root.owner, Op)


def _passed(op: Op) -> Iterator[tuple[SSAValue, SSAValue]]:
    """Pairs of values: the second is computed from the first."""
    name = name_of(op)
    if name == "scf.for":
        _, *carried = op.regions[0].blocks[0].args
        yield from zip(op.operands[3:], carried, strict=True)
        yield from zip(op.operands[3:], op.results, strict=True)
    elif name == "scf.while":
        yield from zip(op.operands, op.regions[0].blocks[0].args, strict=True)
    elif name == "scf.condition":
        loop = op.parent_op()
        assert loop is not None
        yield from zip(op.operands[1:], loop.results, strict=True)
        yield from zip(op.operands[1:], loop.regions[1].blocks[0].args, strict=True)
    elif name == "scf.yield":
        around = op.parent_op()
        assert around is not None
        if name_of(around) != "scf.while":
            yield from zip(op.operands, around.results, strict=True)
        if name_of(around) != "scf.if":
            first = 1 if name_of(around) == "scf.for" else 0
            yield from zip(op.operands, around.regions[0].blocks[0].args[first:], strict=True)
    elif op.parent is not None and op is op.parent.last_op and op.successors:
        for target, values in jumps_of(op.parent):
            yield from zip(values, target.args, strict=True)
    elif name != "memref.load" and not isinstance(op.results[0].type if op.results else None, MemRefType):
        yield from ((operand, result) for operand in op.operands for result in op.results)


def _deciding(op: Op) -> Iterator[SSAValue]:
    """Operands that decide what is done, not which numbers result."""
    name = name_of(op)
    if name in _BRANCHES:
        yield from op.operands[: _BRANCHES[name]]
    elif name == "memref.load":
        yield from op.operands[1:]
    elif name == "memref.store":
        yield from op.operands[2:]
    elif name.startswith(("memref.", "hivm.hir.sync_block")) or name in _PLACES:
        yield from op.operands
