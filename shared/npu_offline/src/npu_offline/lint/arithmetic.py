"""Rules on what is computed: by which unit of the core, and in which type."""

from __future__ import annotations

from collections.abc import Iterator

from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Operation

from ..module.mlir import name_of, property_of
from ..module.operations import operation_of
from ..module.shapes import space_of
from .rules import Compiled, Rule
from .view import LOOPS, integer_bits, is_bf16, kernel_of, tensor

_MEMORY = {"memref.load": 0, "memref.store": 1}  # and which operand is the memory
_INTEGER = {"addi", "subi", "muli", "divsi", "divui", "remsi", "remui", "minsi", "maxsi", "minui", "maxui", "shli", "shrsi"}
_SLOW_AT_ANY_WIDTH = {"cmpi", "remsi", "remui"}
_FREE = {"arith.extf", "arith.truncf", "arith.constant", "arith.select", "arith.bitcast"}
_WIDE = 64  # bits
LANES = 64  # fp32 elements of one repeat of a vector instruction


def scalar_loop(compiled: Compiled) -> Iterator[str]:
    """A loop that does nothing but move or compute single elements runs on the scalar unit: about a hundred cycles for
    each element that it takes from global memory, against one cycle for 64 elements in the vector unit. Gathers of
    elements become such loops, and so does whatever arithmetic the vector unit of a compiler version does not have."""
    if compiled.final is None:
        return
    for loop in compiled.final.walk():
        if name_of(loop) in LOOPS and (touched := _scalar_accesses(loop)):
            yield f"a loop{_trips(loop)} moves single elements: {', '.join(touched)}"


def _scalar_accesses(loop: Operation) -> list[str]:
    """What an innermost loop without a transfer or a vector instruction loads and stores."""
    found: dict[str, None] = {}
    for op in loop.walk():
        name = name_of(op)
        if op is not loop and (name in LOOPS or _is_instruction(op)):
            return []
        if name in _MEMORY:
            kind = op.operands[_MEMORY[name]].type
            space = space_of(kind)
            if space == "gm" or (space and kind.get_shape() != (1,)):  # type: ignore[attr-defined]
                found[f"{name.removeprefix('memref.')} in {'global memory' if space == 'gm' else space.upper()}"] = None
    return list(found)


def _is_instruction(op: Operation) -> bool:
    """Whether something else than the scalar unit works: an instruction, or a function of vector instructions."""
    operation = operation_of(op)
    return name_of(op) == "func.call" if operation is None else operation.pipe != "S"


def _trips(loop: Operation) -> str:
    bounds = [property_of(bound.owner, "value") for bound in loop.operands[:3] if isinstance(bound.owner, Operation)]
    numbers = [bound.value.data for bound in bounds if isinstance(bound, IntegerAttr)]
    if len(numbers) != 3 or name_of(loop) != "scf.for":  # noqa: PLR2004
        return ""
    low, high, step = numbers
    return f" of {-(-(high - low) // step)} iterations"


def integer_arithmetic(compiled: Compiled) -> Iterator[str]:
    """The vector unit has no 64-bit integers: arithmetic on tensors of them becomes a loop over elements. Integer
    comparisons and remainders do so at any width on some versions. Index arithmetic belongs on scalars, and a mask that
    only loads and stores use costs nothing; one that is data is better computed in fp32. Tensors of one number a row, too
    short for a vector instruction to be worth its start, are left to the rule on scalar loops."""
    for op in kernel_of(compiled.linalg).walk():
        short = name_of(op).removeprefix("arith.")
        found = tensor(op.operands[0], LANES + 1) if op.operands and name_of(op).startswith("arith.") else None
        bits = integer_bits(found[1]) if found else 0
        if found and bits and (short in _SLOW_AT_ANY_WIDTH or (short in _INTEGER and bits == _WIDE)):
            yield f"{short} on a tensor of {found[0]} i{bits}"


def bf16_arithmetic(compiled: Compiled) -> Iterator[str]:
    """The vector unit has no bf16 arithmetic: every operation is converted to fp32 and back by itself, and rounds. Convert
    once after the load and once before the store."""
    for op in kernel_of(compiled.linalg).walk():
        name = name_of(op)
        if name.startswith(("arith.", "math.")) and name not in _FREE:
            for operand in op.operands:
                found = tensor(operand)
                if found and is_bf16(found[1]):
                    yield f"{name.partition('.')[2]} on a tensor of {found[0]} bf16"
                    break
        elif name == "linalg.reduce":
            found = tensor(op.operands[0])
            if found and is_bf16(found[1]):
                yield f"a reduction of {found[0]} bf16"


RULES = (
    Rule("scalar-loop", scalar_loop),
    Rule("integer-arithmetic", integer_arithmetic),
    Rule("bf16-arithmetic", bf16_arithmetic),
)
