"""Instructions as rows of the machine's table: action, pipe, operands and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import MemRefType
from xdsl.ir import SSAValue

from ...errors import UnsupportedError
from ...module.operations import ATOMICS, BINARY, COMPARISONS, REDUCTIONS, ROUNDINGS, UNARY, Operation, is_memory

_KINDS = {name: number for number, name in enumerate(REDUCTIONS)}
_PLAIN = {
    *BINARY,
    *UNARY,
    "select",
    "broadcast",
    "copy",
    "fill",
    "arange",
    "lock",
    "unlock",
    "free_lock",
    "nothing",
    "interleave",
}
_PLAIN |= {"gather", "nd2nz", "fixpipe"}
_OPERANDS_OF_PRODUCT = 6  # a, b, whether results are overwritten, m, k, n; flags follow


@dataclass(frozen=True)
class Instruction:
    """A row of the table, and the operands in the order in which they are passed."""

    name: str
    pipe: str
    action: str
    operands: Sequence[SSAValue]
    counts: tuple[int, int, int]
    attributes: tuple[int, ...] = ()
    flags: Sequence[SSAValue] = ()

    def row(self, number: int) -> str:
        """The row in C."""
        reads, writes, temporaries = self.counts
        attributes = ", ".join(map(str, self.attributes)) or "0"
        return (
            f'{{"{self.name}", {number}, {self.pipe}, {reads}, {writes}, {temporaries}, do_{self.action}, {{{attributes}}}}}'
        )


def instruction_of(operation: Operation) -> Instruction:
    """The machine's instruction for an operation.

    Raises:
        UnsupportedError: the machine has none.
    """
    action, reads, flags = operation.action, list(operation.reads), []
    if action == "product":
        reads, flags = reads[:_OPERANDS_OF_PRODUCT], reads[_OPERANDS_OF_PRODUCT:][:7]
    temporaries = [operand for operand in operation.temporaries if is_memory(operand.type)]
    attributes = _attributes(operation)
    if action == "product":
        action = "multiply"
    return Instruction(
        operation.name,
        operation.pipe,
        action,
        [*reads, *operation.writes, *temporaries],
        (len(reads), len(operation.writes), len(temporaries)),
        attributes,
        flags,
    )


def _attributes(operation: Operation) -> tuple[int, ...]:
    action, detail = operation.action, operation.detail
    if action in _PLAIN:
        return ()
    if action == "compare":
        return (COMPARISONS.index(detail),)
    if action == "cast":
        mode = detail.partition(" ")[0]
        return (0, ROUNDINGS.index(mode) if mode in ROUNDINGS else -1)
    axes = sum(1 << axis for axis in operation.axes)
    if action == "reduce" and detail in _KINDS and axes:
        return (_KINDS[detail], 0, axes)
    if action == "arg" and axes and "_" not in detail:
        kind, side = detail.split()
        return (_KINDS[kind], 0, axes, int(side == "right"))
    if action == "accumulate" and axes:
        return (_KINDS[detail.split()[0]], 0, axes, int("reverse" in detail))
    if action == "flip":
        return (0, 0, 1 << int(detail or _rank(operation.reads[0]) - 1))
    if action == "sort":
        return (0, 0, 0, -1 if len(operation.reads) > 1 else int(detail == "descending"))
    if action == "transpose" and operation.axes:
        return (0, 0, 0, *operation.axes)
    if action == "deinterleave":
        return (0, 0, 0, 0, int(detail))
    if action == "load":
        if not detail:
            return (-1, 2, 3)
        padding, number, before = (int(word) for word in detail.split())
        return (padding, number, (number + 1) * before)
    if action == "store":
        return (ATOMICS.index(detail) if detail else -1,)
    if action == "product":
        return (0, int("_ta" in detail), int("_tb" in detail), 0, 0, 0, 3)
    raise UnsupportedError(f"execution does not know {operation.name} ({action} {detail})".replace(" )", ")"))


def _rank(value: SSAValue) -> int:
    assert isinstance(value.type, MemRefType)
    return len(value.type.get_shape())
