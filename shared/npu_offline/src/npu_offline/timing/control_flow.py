"""Control flow between basic blocks, as Python that a program of a grid is simulated by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.ir import Block, Operation, Region, SSAValue

from ..errors import UnsupportedError
from ..module.jumps import JUMPS, jumps_of
from ..module.mlir import name_of


def write_jumps(
    region: Region,
    write: Callable[[str], None],
    condition: Callable[[Operation], str],
    body: Callable[[Block, int], None],
    assign: Callable[[Sequence[SSAValue], Sequence[SSAValue], int], None],
) -> None:
    """Write a region as a loop over the number of the block that comes next.

    Args:
        region: the blocks, of which the first one is entered.
        write: takes a line.
        condition: the expression of a branch's condition.
        body: writes a block's operations at an indentation.
        assign: writes assignments of values to targets at an indentation.

    Raises:
        UnsupportedError: a block ends with something else than a jump or a return.
    """
    numbers = {block: number for number, block in enumerate(region.blocks)}
    write("    block = 0")
    write("    while True:")
    write("        turns += 1")
    write("        check_turns(turns)")
    for block, number in numbers.items():
        last = block.last_op
        if last is None or name_of(last) not in (*JUMPS, "func.return"):
            raise UnsupportedError(f"the time model does not know where {last and name_of(last)} leads to")
        write(f"        {'elif' if number else 'if'} block == {number}:")
        body(block, 3)
        targets = jumps_of(block)
        if not targets:
            write("            return")
        elif len(targets) == 1:
            assign(targets[0][0].args, targets[0][1], 3)
            write(f"            block = {numbers[targets[0][0]]}")
        else:
            for keyword, (target, values) in zip((f"if {condition(last)}", "else"), targets, strict=True):
                write(f"            {keyword}:")
                assign(target.args, values, 4)
                write(f"                block = {numbers[target]}")
