"""Control flow between basic blocks: jumps with arguments, loops, and single numbers on the scalar unit's stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import Block, Operation, SSAValue

from .mlir import name_of

JUMPS = {"cf.br", "cf.cond_br"}


def jumps_of(block: Block) -> list[tuple[Block, Sequence[SSAValue]]]:
    """Where a block may jump to, with the arguments that it passes: to the first one if its condition holds."""
    last = block.last_op
    if last is None or name_of(last) not in JUMPS:
        return []
    operands = list(last.operands[1 if name_of(last) == "cf.cond_br" else 0 :])
    found: list[tuple[Block, Sequence[SSAValue]]] = []
    for target in last.successors:
        found.append((target, operands[: len(target.args)]))
        operands = operands[len(target.args) :]
    return found


def jumps_back(block: Block) -> list[tuple[Block, Sequence[SSAValue]]]:
    """The jumps of a block that start another iteration of a loop."""
    order = _blocks_around(block)
    return [(target, values) for target, values in jumps_of(block) if order.index(target) <= order.index(block)]


def ends_loop(branch: Operation) -> bool:
    """Whether a branch decides how often a loop runs: one side stays in a loop around the branch, the other leaves it."""
    block = branch.parent
    loops = _loops(block) if block is not None and name_of(branch) == "cf.cond_br" else []
    return any(block in loop and len({target in loop for target in branch.successors}) > 1 for loop in loops)


def _loops(block: Block) -> list[set[Block]]:
    """The blocks of each loop of the region."""
    blocks = _blocks_around(block)
    loops: dict[Block, set[Block]] = {}
    for last in blocks:
        for first, _ in jumps_back(last):
            loop, pending = loops.setdefault(first, {first}), [last]
            while pending:
                reached = pending.pop()
                if reached not in loop:
                    loop.add(reached)
                    pending += [other for other in blocks if any(target is reached for target, _ in jumps_of(other))]
    return list(loops.values())


def _blocks_around(block: Block) -> list[Block]:
    return list(block.parent.blocks) if block.parent is not None else []


def passed_to(block: Block, position: int) -> list[SSAValue]:
    """The values that jumps pass for one argument of a block."""
    return [values[position] for other in _blocks_around(block) for target, values in jumps_of(other) if target is block]


def is_cell(memory: SSAValue) -> bool:
    """Whether a value is a single number on the scalar unit's stack."""
    if not isinstance(memory.owner, Operation) or name_of(memory.owner) != "memref.alloca":
        return False
    assert isinstance(memory.type, MemRefType)
    return all(size == 1 for size in memory.type.get_shape())


def stored_in(cell: SSAValue) -> Iterator[SSAValue]:
    """Everything that is ever stored in a cell."""
    for use in cell.uses:
        if name_of(use.operation) == "memref.store":
            yield use.operation.operands[0]
