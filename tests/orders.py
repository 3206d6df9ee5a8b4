"""What orders the instructions of a run, worked out from a trace of what it issued: apart from the checks of the machine.

The machine follows vector clocks and keeps each byte's last accesses. Here every instruction has the set of all that are
complete before it begins, and all pairs of accesses are held against each other.
"""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

INSTRUCTION, SET, WAIT, BARRIER, CROSS_SET, CROSS_WAIT, PROGRAM = range(1, 8)
S, ALL = 0, 7  # pipes
READ, WRITE, TEMPORARY, SIZE = range(4)  # what an operand is to an instruction
GM, NUMBER = 0, 6  # spaces


@dataclass
class Access:
    """Bytes of a memory that an instruction reads or writes: first and last of each contiguous piece, in order."""

    instruction: int
    memory: tuple[int, int]
    role: int
    low: np.ndarray[Any, Any]
    high: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        self.first, self.last = int(self.low[0]), int(self.high.max())


@dataclass
class Program:
    """One program: its instructions with where they run, what is complete before each, and their accesses."""

    places: list[tuple[int, int, int]] = field(default_factory=list)  # core, pipe, number in the module
    before: list[int] = field(default_factory=list)  # a bit for each instruction
    accesses: list[Access] = field(default_factory=list)
    operands: list[Sequence[Sequence[int]]] = field(default_factory=list)  # as the trace says them

    @functools.cached_property
    def sources(self) -> list[tuple[int, ...]]:
        return sources(self)

    @functools.cached_property
    def unordered(self) -> dict[tuple[int, int], str]:
        return unordered(self)


def trace_of(library: ctypes.CDLL) -> bytes:
    """What a module that was translated with trace.c before it issued since its trace was empty."""
    length = ctypes.c_int64.in_dll(library, "npu_trace_length").value
    first = ctypes.c_void_p.in_dll(library, "npu_trace").value
    return ctypes.string_at(first, 8 * length) if first else b""


def ordered(words: bytes) -> list[Program]:
    """The programs of a trace."""
    trace = tuple(np.frombuffer(words, np.int64).tolist())
    programs: list[list[Sequence[int]]] = []
    position = 0
    while position < len(trace):
        kind, core, a, b, count = trace[position : position + 5]
        position += 5
        operands = []
        if kind == INSTRUCTION:
            for _ in range(count):
                rank = trace[position + 5]
                operands.append(trace[position : position + 6 + 2 * rank])
                position += 6 + 2 * rank
        if kind == PROGRAM:
            programs.append([])
        else:
            programs[-1].append((kind, core, a, b, count, operands))
    return [_order(events) for events in programs]


def _order(events: Sequence[Any]) -> Program:
    program = Program()
    known: dict[tuple[int, int], int] = defaultdict(int)  # what a pipe waited for, as a bit for each instruction
    done: dict[tuple[int, int], int] = defaultdict(int)  # what it began itself
    flags: dict[Any, deque[int]] = defaultdict(deque)
    sent: dict[Any, deque[int]] = defaultdict(deque)
    waiting: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
    cores = {event[1] for event in events}

    def cross(core: int, pipe: int, number: int) -> None:
        now = known[core, pipe] | done[core, pipe]
        if core == 0:
            for other in cores - {0}:
                flags["cross", other, number].append(now)
        else:
            sent[core, number].append(now)
            if all(sent[other, number] for other in cores - {0}):
                flags["cross", 0, number].append(_union(sent[other, number].popleft() for other in cores - {0}))

    def begin(core: int, pipe: int, item: tuple[int, Any, int]) -> bool:
        kind, detail, issued = item
        here = core, pipe
        if kind == WAIT:
            if not flags[core, *detail]:
                return False
            known[here] |= flags[core, *detail].popleft()
        known[here] |= issued
        if kind == INSTRUCTION:
            program.before[detail] = known[here] | (done[here] if pipe == S else 0)
            done[here] |= 1 << detail
        elif kind == SET:
            flags[core, *detail].append(known[here] | done[here])
        elif kind == BARRIER:
            known[here] |= done[here]
        elif kind == CROSS_SET:
            cross(core, pipe, detail)
        return True

    def drain(core: int) -> None:
        moved = True
        while moved:
            moved = False
            for pipe in range(ALL):
                while waiting[core, pipe] and begin(core, pipe, waiting[core, pipe][0]):
                    waiting[core, pipe].popleft()
                    moved = True

    for kind, core, a, b, count, operands in events:
        issued = known[core, S]
        if kind == CROSS_WAIT:
            known[core, S] |= flags["cross", core, a].popleft()
            continue
        if kind == BARRIER and a == ALL:
            everything = _union(known[core, pipe] | done[core, pipe] for pipe in range(ALL))
            for pipe in range(ALL):
                known[core, pipe] = everything
            continue
        if kind == INSTRUCTION:
            number = len(program.places)
            program.places.append((core, a, b))
            program.before.append(0)
            program.operands.append(operands)
            program.accesses += filter(None, (_access(number, core, operand) for operand in operands))
            pipe, item = a, (kind, number, issued)
        elif kind == WAIT:
            pipe, item = b, (kind, (a, b, count), issued)
        elif kind == SET:
            pipe, item = a, (kind, (a, b, count), issued)
        elif kind == BARRIER:
            pipe, item = a, (kind, None, issued)
        else:
            pipe, item = a, (kind, b, issued)
        if waiting[core, pipe] or not begin(core, pipe, item):
            waiting[core, pipe].append(item)
        drain(core)
    return program


def _union(sets: Iterator[int]) -> int:
    total = 0
    for one in sets:
        total |= one
    return total


@functools.lru_cache(maxsize=1 << 14)
def _access(instruction: int, core: int, operand: Sequence[int]) -> Access | None:
    role, space, place, bit, bits, rank, *rest = operand
    sizes, strides = rest[::2][:rank], rest[1::2][:rank]
    if role == SIZE or space == NUMBER or 0 in sizes:
        return None
    starts, piece = np.array([place * 8 + bit]), bits
    axes = list(zip(sizes, strides, strict=True))
    while axes and (axes[-1][0] == 1 or axes[-1][1] * bits == piece):
        piece *= axes.pop()[0]
    for size, stride in axes:
        starts = (starts[:, None] + np.arange(size) * stride * bits).reshape(-1)
    starts = np.unique(starts)
    return Access(instruction, (GM, 0) if space == GM else (space, core), role, starts >> 3, (starts + piece + 7) >> 3)


def unordered(program: Program) -> dict[tuple[int, int], str]:
    """Pairs of instructions on the same bytes, one a write, where the earlier is not complete before the later begins.

    Returns:
        For each such pair "after", where the earlier begins when the later is complete, else "none".
    """
    by_memory = defaultdict(list)
    for access in program.accesses:
        by_memory[access.memory].append(access)
    count = len(program.before)
    bits = b"".join(mask.to_bytes((count + 7) // 8, "little") for mask in program.before)
    before = np.unpackbits(np.frombuffer(bits, np.uint8).reshape(count, -1), axis=1, bitorder="little")  # [later, earlier]
    found = {}
    for accesses in by_memory.values():
        low = np.array([access.first for access in accesses])
        high = np.array([access.last for access in accesses])
        writes = np.array([access.role != READ for access in accesses])
        instructions = np.array([access.instruction for access in accesses])
        for position, access in enumerate(accesses):
            meets = (low[:position] < high[position]) & (low[position] < high[:position])
            meets &= writes[:position] | writes[position]
            meets &= before[access.instruction, instructions[:position]] == 0
            for other in np.flatnonzero(meets):
                pair = accesses[other].instruction, access.instruction
                if pair[0] != pair[1] and pair not in found and _meet(accesses[other], access):
                    found[pair] = "after" if program.before[pair[0]] >> pair[1] & 1 else "none"
    return found


def _meet(a: Access, b: Access) -> bool:
    if len(a.low) == len(b.low) == 1:
        return True
    if len(a.low) > len(b.low):
        a, b = b, a
    first = np.searchsorted(b.low, a.high)  # pieces of b that begin before each of a's ends
    reaches = np.maximum.accumulate(b.high)
    return bool(np.any((first > 0) & (reaches[np.maximum(first - 1, 0)] > a.low)))


def sources(program: Program) -> list[tuple[int, ...]]:
    """For each access that reads, the instructions whose bytes it sees, where all run one after another; -1 for nobody's."""
    found = []
    by_memory = defaultdict(list)
    for access in program.accesses:
        by_memory[access.memory].append(access)
    for accesses in by_memory.values():
        edges = np.unique(np.concatenate([edge for access in accesses for edge in (access.low, access.high)]))
        last = np.full(len(edges), -1)  # who wrote the bytes between an edge and the next
        for access in accesses:
            pieces = zip(np.searchsorted(edges, access.low), np.searchsorted(edges, access.high), strict=True)
            if access.role == READ:
                writers = {writer for low, high in pieces for writer in last[low:high].tolist()}
                found.append((access.instruction, *sorted(writers)))
            else:
                for low, high in pieces:
                    last[low:high] = access.instruction
    return found
