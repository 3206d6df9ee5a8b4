"""Where the values that a loop of a compiled kernel carries lie on chip."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import prod

from npu_offline.module.mlir import name_of, parse
from npu_offline.reports import Report
from npu_offline.toolchain.compilers import printer
from npu_offline.toolchain.opt import opt
from xdsl.dialects.builtin import MemRefType
from xdsl.ir import Block, Operation, SSAValue

Bytes = tuple[int, int]


def carried_in_the_same_bytes(report: Report) -> Iterator[tuple[Bytes, Bytes]]:
    """Pairs of buffers that one loop hands to its next iteration and that share bytes: one is lost."""
    module = parse(opt(printer(report.soc, report.toolchain), report.stages["final"], "--mlir-print-op-generic"))
    for loop in module.walk():
        if name_of(loop) != "scf.for":
            continue
        values = [value for value in loop.regions[0].blocks[0].args[1:] if isinstance(value.type, MemRefType)]
        for one, other in combinations([sorted(_buffers(value, set())) for value in values], 2):
            yield from ((a, b) for a in one for b in other if a[0] < b[1] and b[0] < a[1])


def _buffers(value: SSAValue, seen: set[SSAValue]) -> set[Bytes]:
    """First and end address of every buffer that a value may stand for."""
    if value in seen:
        return set()
    seen.add(value)
    owner = value.owner
    if isinstance(owner, Block):
        loop = owner.parent_op()
        assert loop is not None
        given, passed = (loop.operands[2 + value.index], owner.last_op.operands[value.index - 1])
        return _buffers(given, seen) | _buffers(passed, seen)
    assert isinstance(owner, Operation)
    name, position = name_of(owner), owner.results.index(value)
    if name == "hivm.hir.pointer_cast":
        size = prod(value.type.get_shape()) * value.type.element_type.bitwidth // 8
        return {(start, start + size) for start in map(_constant, owner.operands) if start is not None}
    if name == "scf.for":
        return _buffers(owner.regions[0].blocks[0].args[1 + position], seen)
    if name == "scf.if":
        return set().union(*(_buffers(r.blocks[0].last_op.operands[position], seen) for r in owner.regions))
    sources = owner.operands[1:] if name == "arith.select" else owner.operands[:1]
    return set().union(*(_buffers(source, seen) for source in sources))


def _constant(value: SSAValue) -> int | None:
    return value.owner.properties["value"].value.data if name_of(value.owner) == "arith.constant" else None
