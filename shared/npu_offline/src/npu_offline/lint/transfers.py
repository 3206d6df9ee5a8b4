"""Rules on what moves between global memory and the core."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from xdsl.ir import Operation, SSAValue

from ..module.mlir import name_of, property_of
from .rules import Compiled, Rule
from .view import Transfer, is_atomic, kernel_of, pointers_of, transfers

_UNIT = 32  # bytes: of the DMA engine and the Unified Buffer
_LONG = 8192  # bytes: a transfer of this length reaches three quarters of the bandwidth


def masked_store(compiled: Compiled) -> Iterator[str]:
    """A store whose mask is no range, or depends on data, becomes a load of the destination, a select and a store of all
    of it: twice the traffic, and it writes what another program may be writing. Store what is meant to be stored."""
    found = list(transfers(compiled.linalg))
    loaded: dict[SSAValue, SSAValue] = {}  # on-chip tile: the place in global memory that it was copied from
    for transfer in found:
        if not transfer.store:
            loaded[transfer.op.operands[1]] = _place(transfer.memory)
    for transfer in found:
        if transfer.store and not is_atomic(transfer.op):
            place = _place(transfer.memory)
            if any(loaded.get(tile) is place for tile in _selected(transfer.op.operands[0])):
                yield f"{_name(compiled, transfer)}: loads the destination, selects, and stores all of it"


def _place(memory: SSAValue) -> SSAValue:
    while isinstance(memory.owner, Operation) and name_of(memory.owner) == "memref.subview":
        memory = memory.owner.operands[0]
    return memory


def _selected(value: SSAValue) -> Iterator[SSAValue]:
    """The tiles that a stored value is selected from."""
    op = value.owner
    if not isinstance(op, Operation):
        return
    if name_of(op) == "arith.select":
        for operand in op.operands[1:]:
            if isinstance(operand.owner, Operation) and name_of(operand.owner) == "bufferization.to_tensor":
                yield operand.owner.operands[0]
    elif name_of(op) in ("tensor.extract_slice", "tensor.cast"):
        yield from _selected(op.operands[0])


def strided_transfer(compiled: Compiled) -> Iterator[str]:
    """The DMA engine moves 32 bytes at a time: where neighbouring elements of a tile are apart in memory, each costs such a
    unit of its own, and of the Unified Buffer too. Load rows, and transpose on chip."""
    for transfer in transfers(compiled.linalg):
        if transfer.shape and transfer.shape[-1] > 1 and transfer.strides[-1] != 1:
            stride = transfer.strides[-1]
            step = "a stride known at run time only" if stride is None else f"stride {stride}"
            yield f"{_name(compiled, transfer)}: innermost dimension of {transfer.shape[-1]} elements has {step}"


def unaligned_rows(compiled: Compiled) -> Iterator[str]:
    """Rows whose length is no multiple of 32 bytes are padded on chip, start between units in memory, and have faulted
    vector cores on A3 chips: pad or align them where the caller's layout leaves the choice."""
    for transfer in transfers(compiled.linalg):
        row = transfer.shape[-1] * transfer.itemsize if len(transfer.shape) > 1 else 0
        if row % _UNIT and transfer.shape[-2] > 1:
            yield f"{_name(compiled, transfer)}: rows of {row} bytes"


def short_transfer(compiled: Compiled) -> Iterator[str]:
    """Every transfer has a start-up of its own: one of 1 KiB reaches a quarter of the bandwidth, one of 8 KiB three
    quarters. A tile should be 8 KiB at least, or whole rows where those are shorter. What holds one number for each row of
    another tile, a statistic or an index, cannot be longer and is left alone, as is a single number."""
    found = list(transfers(compiled.linalg))
    heights = {prod(transfer.shape[:-1]) for transfer in found if len(transfer.shape) > 1} | {1}
    for transfer in found:
        row = compiled.subject.rows[transfer.position] if transfer.position < len(compiled.subject.rows) else 0
        whole = row and (transfer.piece % row == 0 or row < transfer.piece < 2 * row)  # masked, the next power of two
        beside = prod(transfer.shape) in heights
        if transfer.nbytes < _LONG and not whole and not beside:
            of = f" of rows of {row}" if row else ""
            yield f"{_name(compiled, transfer)}: {transfer.nbytes} bytes{of}"


def float_atomic(compiled: Compiled) -> Iterator[str]:
    """Floating-point sums by atomic updates come out differently with every order of programs, which nothing fixes: equal
    inputs no longer give equal bits. Write partial sums, one a core, and add them in a launch of their own."""
    pointers = pointers_of(kernel_of(compiled.linalg))
    for op in kernel_of(compiled.linalg).walk():
        kind = str(property_of(op, "GenericAtomicRMW") or "").strip('"')
        if kind == "fadd":
            where = [t for t in transfers(compiled.linalg) if t.op is op and t.store]
            yield f"{_name(compiled, where[0]) if where else f'one of {len(pointers)} arguments'}: {kind}"


def lost_exchange(compiled: Compiled) -> Iterator[str]:
    """An exchange of one number, or of a tile full of one, is in no final module: a lock that it takes is never taken
    (compiler fault 19). The compiler of CANN 8.5 leaves out such a compare-and-swap too. Take tl.atomic_or, tl.atomic_and or
    tl.atomic_max, which are written but make no lock (compiler fault 31); where the old value is not used, a store."""
    lost = {"exch"} | ({"cas"} if compiled.subject.toolchain == "1.0.0" else set())
    for transfer in transfers(compiled.linalg):
        kind = str(property_of(transfer.op, "GenericAtomicRMW") or "").strip('"')
        if transfer.store and kind in lost and _is_one_number(transfer.op.operands[-2]):
            yield f"{_name(compiled, transfer)}: the final module does not write what is exchanged"


def _is_one_number(tile: SSAValue) -> bool:
    """Whether all elements of a tile are one number."""
    op = tile.owner
    if isinstance(op, Operation) and name_of(op) == "bufferization.to_memref":
        op = op.operands[0].owner
    return isinstance(op, Operation) and name_of(op) in ("linalg.fill", "tensor.insert", "arith.constant")


def lost_wait(compiled: Compiled) -> Iterator[str]:
    """A loop that loads, volatile, until another program has written has neither a result nor a store, and triton-ascend
    leaves it out (compiler fault 20): what should come after the other program runs beside it. Launch twice, which orders
    the two."""
    lost = compiled.subject.ttir.count("scf.while") - compiled.subject.linalg.count("scf.while")
    if lost > 0:
        yield f"{lost} of the kernel's `while` loops only wait, and are left out"


def _name(compiled: Compiled, transfer: Transfer) -> str:
    names = compiled.subject.pointers
    name = names[transfer.position] if transfer.position < len(names) else f"argument {transfer.position}"
    return f"{'store to' if transfer.store else 'load of'} {name}"


RULES = (
    Rule("masked-store", masked_store),
    Rule("strided-transfer", strided_transfer),
    Rule("unaligned-rows", unaligned_rows),
    Rule("short-transfer", short_transfer),
    Rule("float-atomic", float_atomic),
    Rule("lost-exchange", lost_exchange),
    Rule("lost-wait", lost_wait),
)
