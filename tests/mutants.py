"""Defects to plant in a final module: each takes one decision of the compiler back."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from npu_offline.module.mlir import name_of, property_of
from npu_offline.module.shapes import space_of
from xdsl.dialects.builtin import FixedBitwidthType, IntegerAttr, MemRefType, ModuleOp, i64
from xdsl.ir import Operation, SSAValue

UNIT = 32  # bytes that addresses are multiples of


@dataclass(frozen=True)
class Mutant:
    """A defect: its kind, the operations that it concerns by their position in the module, and what it does to them."""

    kind: str
    positions: tuple[int, ...]
    edit: Callable[[Sequence[Operation]], None]

    def plant(self, module: ModuleOp) -> None:
        """Change a clone of the module that this was made for."""
        operations = list(module.walk())
        self.edit([operations[position] for position in self.positions])


def mutants(module: ModuleOp) -> Iterator[Mutant]:
    """Every defect of every kind."""
    operations = list(module.walk())
    positions = {operation: position for position, operation in enumerate(operations)}

    def removal(kind: str, removed: Sequence[Operation]) -> Mutant:
        return Mutant(kind, tuple(positions[operation] for operation in removed), _remove)

    flags = [op for op in operations if _short(op) in ("set_flag", "wait_flag")]
    across = [op for op in operations if _short(op) in ("sync_block_set", "sync_block_wait")]
    for op in flags:
        yield removal("set removed" if _short(op) == "set_flag" else "wait removed", [op])
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
        if _short(op) == "pipe_barrier":
            yield removal("barrier removed", [op])
    for op in across:
        yield removal("flag between cores removed", [op])
    for op in operations:
        if _short(op) in ("set_mask_norm", "set_ffts_base_addr"):
            yield removal("chip state removed", [op])
    by_number = defaultdict(list)
    for op in across:
        by_number[_number(op)].append(op)
    for group in by_number.values():
        yield removal("flag between cores removed", group)
    for op in operations:
        if name_of(op) == "arith.select" and isinstance(op.results[0].type, MemRefType):
            yield Mutant("one of two buffers", (positions[op],), _first)
            casts = [_cast_of(operand) for operand in op.operands[1:3]]
            if casts[0] is not None and casts[1] is not None and casts[0] is not casts[1]:
                yield Mutant("two buffers at one address", tuple(positions[cast] for cast in casts if cast), _join)
    yield from _moves(operations, positions)


def _moves(operations: Sequence[Operation], positions: dict[Operation, int]) -> Iterator[Mutant]:
    buffers = []
    for op in operations:
        if name_of(op) == "hivm.hir.pointer_cast" and len(op.operands) == 1:
            size, address = _bytes(op), _constant(op.operands[0])
            if size and address is not None:
                buffers.append((space_of(op.results[0].type), address, size, op))
    for space, address, size, op in buffers:
        places = sorted({(a, n) for s, a, n, _ in buffers if s == space and (a + n <= address or address + size <= a)})
        end = max(a + n for s, a, n, _ in buffers if s == space)
        below = next((a for a, _ in reversed(places) if a < address), None)
        above = next(((a, n) for a, n in places if a > address), None)
        if below is not None:
            yield Mutant("address of the buffer below", (positions[op],), _move(below))
        if above is not None:
            target = min(above[0], (end - size) // UNIT * UNIT)
            if target > address:
                yield Mutant("address of the buffer above", (positions[op],), _move(target))
        if address + size + UNIT <= end:
            yield Mutant("address 32 bytes on", (positions[op],), _move(address + UNIT))


def _short(op: Operation) -> str:
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
    if _short(op) == "set_flag":
        for other in itertools.takewhile(lambda o: o is not None, _after(op)):
            if _short(other) == "wait_flag" and _pipes(other) == _pipes(op) and _event(other) == _event(op):
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


def _remove(operations: Sequence[Operation]) -> None:
    for op in operations:
        op.detach()


def _first(operations: Sequence[Operation]) -> None:
    (select,) = operations
    select.operands[2] = select.operands[1]


def _join(operations: Sequence[Operation]) -> None:
    one, other = operations
    address = _constant(one.operands[0])
    assert address is not None
    _move(address)([other])


def _move(address: int) -> Callable[[Sequence[Operation]], None]:
    def edit(operations: Sequence[Operation]) -> None:
        (cast,) = operations
        old = cast.operands[0].owner
        block = cast.parent
        assert isinstance(old, Operation)
        assert block is not None
        new = old.clone()
        new.properties["value"] = IntegerAttr(address, i64)
        block.insert_op_before(new, cast)
        cast.operands[0] = new.results[0]

    return edit
