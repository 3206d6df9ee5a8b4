"""The cost of a call of a vector function, on chips whose vector unit computes on registers.

The function's control flow is run with the scalars of the call, and the costs of the executed blocks are added up. One
execution of a block takes the longest of: its arithmetic, one instruction after another; the issue of its instructions, two
a cycle; its stores; its accesses to the Unified Buffer; and, at the end of an iteration of a loop, the chain of latencies
from a register's value in one iteration to its value in the next, as of a running sum. What a block computes from constants
and the function's arguments alone is computed once.

The lower bound issues arithmetic in pairs, and leaves out instructions that a loop repeats on the same values, as the last
compiler may move them out of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from xdsl.dialects.builtin import MemRefType, ModuleOp, VectorType
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from ..module.jumps import jumps_back
from ..module.mlir import name_of, symbol_of
from .costs import ChipCosts
from .dataflow import needed_values
from .instructions import Vector, VectorFunction
from .operations import Emitter
from .program import Writer, check_turns
from .register_costs import ACCESSES, HEAD, ISSUED, Instruction, instruction
from .scalars import HELPERS


@dataclass(frozen=True)
class BlockCost:
    """Cycles of one execution of a block, and what it issues.

    Attributes:
        cycles: see the module.
        latency: the largest of its instructions.
        least: cycles that no compiler can avoid, by what limits them.
    """

    cycles: float
    latency: float
    least: tuple[float, ...]


def vector_functions(module: ModuleOp, costs: ChipCosts, *, rare: bool = False) -> dict[str, VectorFunction]:
    """The vector functions of a module, by name; `rare` as in `translate`.

    Raises:
        UnsupportedError: one has an instruction without a cost.
    """
    return {
        symbol_of(op, "sym_name"): _translate(op, costs, rare)
        for op in module.walk()
        if name_of(op) == "func.func" and "hivm.vector_function" in op.attributes and op.regions[0].blocks
    }


def _translate(function: Operation, costs: ChipCosts, rare: bool) -> VectorFunction:
    region = function.regions[0]
    entry = region.blocks[0]
    writer = _Counter(costs, {argument: f"a{position}" for position, argument in enumerate(entry.args)}, rare=rare)
    writer.needed = needed_values(function)
    needed = tuple(position for position, argument in enumerate(entry.args) if argument in writer.needed)
    writer.function(region)
    header = f"def visit({', '.join(['visits', *(f'a{position}' for position in needed)])}):"
    space: dict[str, Any] = {**HELPERS, "check_turns": check_turns}
    source = "\n".join([header, "    s = turns = 0", *writer.lines])
    exec(compile(source, "<vector function>", "exec"), space)  # made above, from operations that are checked one by one
    blocks = _costs_of_blocks(function, writer.blocks)
    name = symbol_of(function, "sym_name")
    elements = max((0, *map(_elements, entry.args)))

    @cache
    def call(*arguments: Any) -> Vector:
        visits = [0] * len(blocks)
        space["visit"](visits, *arguments)
        return _sum(name, elements, [(number, block) for number, block in zip(visits, blocks, strict=True) if number])

    return VectorFunction(needed, call)


def _elements(argument: SSAValue) -> int:
    return prod(argument.type.get_shape()) if isinstance(argument.type, MemRefType) else 0


def _sum(name: str, elements: int, visited: Sequence[tuple[int, BlockCost]]) -> Vector:
    busy = HEAD + sum(number * block.cycles for number, block in visited)
    latency = max((block.latency for _, block in visited), default=0.0)
    totals = [sum(counts) for counts in zip(*([number * n for n in block.least] for number, block in visited), strict=True)]
    return Vector(name, elements, busy, latency, max(totals))


class _Nothing(Emitter):
    """Vector functions issue no transfers, flags or barriers."""

    def item(self, op: Operation) -> str | None:
        return None

    def is_view(self, op: Operation) -> bool:
        return True


class _Counter(Writer):
    """Writes a function that counts how often each block is executed."""

    def __init__(self, costs: ChipCosts, names: dict[SSAValue, str], *, rare: bool) -> None:
        super().__init__(costs, names, rare=rare)
        self.emitter = _Nothing(costs, names, self.name)
        self.blocks: list[Block] = []

    def body(self, block: Block, depth: int) -> None:
        self.lines.append(f"{'    ' * depth}visits[{len(self.blocks)}] += 1")
        self.blocks.append(block)
        super().body(block, depth)


def _costs_of_blocks(function: Operation, blocks: Sequence[Block]) -> list[BlockCost]:
    known = ((op, instruction(op)) for block in blocks for op in block.ops)
    found = {op: issued for op, issued in known if issued is not None}
    once = _invariant(function.regions[0].blocks[0], found)
    costs: list[BlockCost] = []
    for block in blocks:
        ops = [op for op in block.ops if op in found and op not in once]
        issued = [found[op] for op in (ops if costs else [*ops, *once])]
        varying = _varying(block)
        costs.append(_cost_of(issued, [found[op] for op in ops if varying(op)], _carried(block, found)))
    return costs


def _invariant(entry: Block, found: Mapping[Operation, Instruction]) -> set[Operation]:
    """Arithmetic in loops whose operands are known before the first loop."""
    once: set[Operation] = set()

    def known(value: SSAValue) -> bool:
        if isinstance(value, BlockArgument):
            return value.owner is entry
        op = value.owner
        assert isinstance(op, Operation)
        return op.parent is entry or op in once or (op not in found and not op.regions and all(map(known, op.operands)))

    for op, issued in found.items():
        if op.parent is not entry and not issued.loads and not issued.stores and all(known(v) for v in op.operands):
            once.add(op)
    return once


def _varying(block: Block) -> Callable[[Operation], bool]:
    """Whether an operation depends on values that differ between iterations of its loop; true outside of loops."""
    heads = {start.owner for start, _ in _rounds(block)}
    if not heads:
        return lambda op: True
    heads.add(block)

    @cache
    def varies(value: SSAValue) -> bool:
        if isinstance(value, BlockArgument):
            return value.owner in heads
        assert isinstance(value.owner, Operation)
        return value.owner.parent in heads and varying(value.owner)

    def varying(op: Operation) -> bool:
        return bool(op.regions) or any(map(varies, op.operands))

    return varying


def _cost_of(issued: Sequence[Instruction], varying: Sequence[Instruction], carried: float) -> BlockCost:
    units, *others = _limits(issued)
    return BlockCost(
        cycles=max(units * ISSUED, *others, sum(i.storing for i in issued), carried),
        latency=max((i.cost.latency for i in issued), default=0),
        least=_limits(varying),
    )


def _limits(issued: Sequence[Instruction]) -> tuple[float, ...]:
    """Cycles of the two units for arithmetic together, of issuing, of accesses, of stores, and of what is never paired."""
    return (
        sum(i.cost.throughput * i.number for i in issued) / ISSUED,
        sum(i.number for i in issued) / ISSUED,
        sum(i.loads + i.stores for i in issued) / ACCESSES,
        sum(i.stores for i in issued),
        sum(i.cost.throughput * i.number for i in issued if not i.cost.paired),
    )


def _carried(block: Block, found: Mapping[Operation, Instruction]) -> float:
    """The longest chain of latencies within a block from a loop's register to its value in the next iteration."""

    def latency(op: Operation, operand: SSAValue) -> float:
        if op not in found:
            return 0
        merging = found[op].merging
        return found[op].cost.latency if merging is None or operand is not op.operands[-1] else merging

    @cache
    def chain(value: SSAValue, start: SSAValue) -> float:
        if value is start:
            return 0
        op = value.owner
        if not isinstance(op, Operation) or op.parent is not block:
            return float("-inf")
        return max((latency(op, operand) + chain(operand, start) for operand in op.operands), default=float("-inf"))

    return max((chain(value, start) for start, value in _rounds(block) if isinstance(start.type, VectorType)), default=0)


def _rounds(block: Block) -> list[tuple[BlockArgument, SSAValue]]:
    """Arguments of a loop, with its counter, and their values in the next iteration."""
    parent, last = block.parent_op(), block.last_op
    if parent is not None and name_of(parent) == "scf.for" and last is not None:
        return list(zip(block.args, (block.args[0], *last.operands), strict=True))
    return [pair for target, values in jumps_back(block) for pair in zip(target.args, values, strict=True)]
