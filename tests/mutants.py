"""Defects to plant in a final module: each takes one decision of the compiler back."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from npu_offline.module.mlir import name_of, property_of
from npu_offline.module.operations import operation_of
from npu_offline.module.shapes import space_of
from xdsl.dialects.builtin import FixedBitwidthType, IntegerAttr, MemRefType, ModuleOp
from xdsl.ir import Operation, SSAValue

UNIT = 32  # bytes that addresses are multiples of
REMOVED, MOVED, RENUMBERED = 1, 2, 3  # settings of a switch of flags, barriers and state
FIRST = 1  # of a selection: it takes its first buffer
FLAGS = ("set_flag", "wait_flag")
ACROSS = ("sync_block_set", "sync_block_wait")
BARRIER = "pipe_barrier"
STATE = ("set_ffts_base_addr",)


@dataclass(frozen=True)
class Mutant:
    """A defect: its kind, the operations that it concerns by their position in the module, and the switches that plant it.

    A switch is an operation's position with its setting: for a buffer, the new address plus one. Zero changes nothing.
    """

    kind: str
    positions: tuple[int, ...]
    switches: tuple[tuple[int, int], ...]


def mutants(module: ModuleOp) -> Iterator[Mutant]:
    """Every defect of every kind."""
    operations = list(module.walk())
    positions = {operation: position for position, operation in enumerate(operations)}

    def removal(kind: str, removed: Sequence[Operation]) -> Mutant:
        concerned = tuple(positions[operation] for operation in removed)
        return Mutant(kind, concerned, tuple((position, REMOVED) for position in concerned))

    flags = [op for op in operations if short(op) in FLAGS]
    across = [op for op in operations if short(op) in ACROSS]
    for op in flags:
        yield removal("set removed" if short(op) == "set_flag" else "wait removed", [op])
    for op in flags:
        pair = _pair(op)
        if pair:
            yield removal("pair removed", pair)
    by_pipes = defaultdict(list)
    for op in flags:
        by_pipes[_pipes(op)].append(op)
    for group in by_pipes.values():
        yield removal("flags of two pipes removed", group)
    for op in operations:
        if short(op) == BARRIER:
            yield removal("barrier removed", [op])
    for op in across:
        yield removal("flag between cores removed", [op])
    for op in operations:
        if short(op) in STATE:
            yield removal("chip state removed", [op])
    by_number = defaultdict(list)
    for op in across:
        by_number[_number(op)].append(op)
    for group in by_number.values():
        yield removal("flag between cores removed", group)
    for op in operations:
        if short(op) in (*FLAGS, *ACROSS):
            yield Mutant("flag of another number", (positions[op],), ((positions[op], RENUMBERED),))
        if passed(op) is not None:
            kind = "set before its instruction" if is_set(op) else "wait or barrier after its instruction"
            yield Mutant(kind, (positions[op],), ((positions[op], MOVED),))
    for op in operations:
        if name_of(op) == "arith.select" and isinstance(op.results[0].type, MemRefType):
            yield Mutant("one of two buffers", (positions[op],), ((positions[op], FIRST),))
            one, other = (_cast_of(operand) for operand in op.operands[1:3])
            if one is not None and other is not None and one is not other:
                address = _constant(one.operands[0])
                assert address is not None
                switch = positions[other], address + 1
                yield Mutant("two buffers at one address", (positions[one], positions[other]), (switch,))
    yield from _moves(operations, positions)


def _moves(operations: Sequence[Operation], positions: dict[Operation, int]) -> Iterator[Mutant]:
    buffers = []
    for op in operations:
        if name_of(op) == "hivm.hir.pointer_cast" and len(op.operands) == 1:
            size, address = _bytes(op), _constant(op.operands[0])
            if size and address is not None:
                buffers.append((space_of(op.results[0].type), address, size, op))

    def move(kind: str, op: Operation, address: int) -> Mutant:
        return Mutant(kind, (positions[op],), ((positions[op], address + 1),))

    for space, address, size, op in buffers:
        places = sorted({(a, n) for s, a, n, _ in buffers if s == space and (a + n <= address or address + size <= a)})
        end = max(a + n for s, a, n, _ in buffers if s == space)
        below = next((a for a, _ in reversed(places) if a < address), None)
        above = next(((a, n) for a, n in places if a > address), None)
        if below is not None:
            yield move("address of the buffer below", op, below)
        if above is not None:
            target = min(above[0], (end - size) // UNIT * UNIT)
            if target > address:
                yield move("address of the buffer above", op, target)
        if address + size + UNIT <= end:
            yield move("address 32 bytes on", op, address + UNIT)
            yield move("address 16 bytes on", op, address + UNIT // 2)


def passed(op: Operation) -> Operation | None:
    """The instruction that a defect moves a flag or a barrier over: a set's, before it, and all others', behind them."""
    if short(op) not in (*FLAGS, *ACROSS, BARRIER):
        return None
    names = {"set_flag": "set_pipe", "wait_flag": "wait_pipe", "sync_block_set": "tpipe", BARRIER: "pipe"}
    pipe = str(property_of(op, names[short(op)])).partition("PIPE_")[2].strip("<> ") if short(op) in names else "ALL"
    other = op.prev_op if is_set(op) else op.next_op
    while other is not None and not other.regions and not set(op.operands) & set(other.results):
        operation = operation_of(other)
        if operation is not None and pipe in ("ALL", operation.pipe):
            return other
        other = other.prev_op if is_set(op) else other.next_op
    return None


def is_set(op: Operation) -> bool:
    """Whether an operation sets a flag."""
    return short(op) in ("set_flag", "sync_block_set")


def short(op: Operation) -> str:
    """An operation's name without its dialect's."""
    return name_of(op).removeprefix("hivm.hir.")


def _pipes(op: Operation) -> tuple[str, str]:
    return str(property_of(op, "set_pipe")), str(property_of(op, "wait_pipe"))


def _event(op: Operation) -> object:
    event = property_of(op, "static_event_id")
    return op.operands[0] if event is None else str(event)


def _number(op: Operation) -> object:
    number = property_of(op, "static_flag_id")
    return op.operands[0] if number is None else str(number).partition(" ")[0]


def _pair(op: Operation) -> list[Operation]:
    """A set and the wait for it that follows in the same block."""
    if short(op) == "set_flag":
        for other in itertools.takewhile(lambda o: o is not None, _after(op)):
            if short(other) == "wait_flag" and _pipes(other) == _pipes(op) and _event(other) == _event(op):
                return [op, other]
    return []


def _after(op: Operation) -> Iterator[Operation]:
    while op.next_op is not None:
        op = op.next_op
        yield op


def _cast_of(value: SSAValue) -> Operation | None:
    owner = value.owner
    while isinstance(owner, Operation) and name_of(owner).startswith("memref.") and owner.operands:
        owner = owner.operands[0].owner
    return owner if isinstance(owner, Operation) and name_of(owner) == "hivm.hir.pointer_cast" else None


def _bytes(op: Operation) -> int:
    kind = op.results[0].type
    assert isinstance(kind, MemRefType)
    element = kind.get_element_type()
    bits = element.bitwidth if isinstance(element, FixedBitwidthType) else 64
    for size in kind.get_shape():
        bits *= size
    return (bits + 7) // 8


def _constant(value: SSAValue) -> int | None:
    number = property_of(value.owner, "value") if isinstance(value.owner, Operation) else None
    return number.value.data if isinstance(number, IntegerAttr) else None
