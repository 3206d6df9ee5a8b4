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
Matrix = np.ndarray[Any, Any]
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
    """One program: its instructions with where they run, what is complete before each, and their operands in the trace."""

    places: list[tuple[int, int, int]] = field(default_factory=list)  # core, pipe, number in the module
    before: list[int] = field(default_factory=list)  # a bit for each instruction
    operands: list[Sequence[Sequence[int]]] = field(default_factory=list)

    @functools.cached_property
    def accesses(self) -> list[Access]:
        """Of all instructions, in order."""
        cores = (core for core, _, _ in self.places)
        found = (_accesses(i, *of) for i, of in enumerate(zip(cores, self.operands, strict=True)))
        return [access for accesses in found for access in accesses]

    @functools.cached_property
    def sources(self) -> list[tuple[int, ...]]:
        return sources(self)

    @functools.cached_property
    def meeting(self) -> Matrix:
        return meeting(self)

    @functools.cached_property
    def order(self) -> Matrix:
        """For a later and an earlier instruction: 0 if the earlier is complete first, 1 if the later is, else 2."""
        count = len(self.before)
        bits = b"".join(mask.to_bytes((count + 7) // 8, "little") for mask in self.before)
        rows = np.frombuffer(bits, np.uint8).reshape(count, (count + 7) // 8)
        before = np.unpackbits(rows, axis=1, count=count, bitorder="little")
        return np.where(before, 0, 2 - before.T)


def reordered(one: Program, other: Program) -> list[tuple[int, int]]:
    """Pairs of a later and an earlier instruction on the same bytes, one a write, whose order in the other program differs.

    Pairs that no longer meet, or are in order now, are none: the compilers leave some unordered inside one pipe.

    Args:
        one: a program.
        other: another, of the same instructions, some with other operands.
    """
    changed = [i for i, operands in enumerate(one.operands) if operands != other.operands[i]]
    meets = one.meeting
    if changed:
        meets = meets.copy()
        meets[changed] = meets[:, changed] = False
        meets |= meeting(other, frozenset(changed))
    now = meets * other.order
    return np.argwhere((now != 0) & (now != one.meeting * one.order)).tolist()


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
            programs[-1].append((kind, core, a, b, count, tuple(operands)))
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
def _accesses(instruction: int, core: int, operands: Sequence[Sequence[int]]) -> list[Access]:
    return [_access(instruction, core, *operand) for operand in operands if _is_accessed(*operand)]


def _is_accessed(role: int, space: int, place: int, bit: int, bits: int, rank: int, *axes: int) -> bool:
    return role != SIZE and space != NUMBER and 0 not in axes[: 2 * rank : 2]


def _access(
    instruction: int, core: int, role: int, space: int, place: int, bit: int, bits: int, rank: int, *rest: int
) -> Access:
    sizes, strides = rest[: 2 * rank : 2], rest[1 : 2 * rank : 2]
    starts, piece = np.array([place * 8 + bit]), bits
    axes = list(zip(sizes, strides, strict=True))
    while axes and (axes[-1][0] == 1 or axes[-1][1] * bits == piece):
        piece *= axes.pop()[0]
    for size, stride in axes:
        starts = (starts[:, None] + np.arange(size) * stride * bits).reshape(-1)
    starts = np.unique(starts)
    return Access(instruction, (GM, 0) if space == GM else (space, core), role, starts >> 3, (starts + piece + 7) >> 3)


def meeting(program: Program, only: frozenset[int] | None = None) -> Matrix:
    """Which instructions touch the same bytes, one of them to write: a truth for a later and an earlier; of `only` some."""
    found = np.zeros((len(program.before),) * 2, bool)
    for accesses in _by_memory(program).values():
        low, high = np.array([access.first for access in accesses]), np.array([access.last for access in accesses])
        writes = np.array([access.role != READ for access in accesses])
        scattered = np.array([len(access.low) > 1 for access in accesses])
        instructions = np.array([access.instruction for access in accesses])
        for position, access in enumerate(accesses):
            if only is not None and access.instruction not in only:
                continue
            meets = (low < access.last) & (access.first < high) & (writes | writes[position])
            for other in np.flatnonzero(meets & (scattered | scattered[position])):
                meets[other] = _meet(accesses[other], access)
            found[access.instruction, instructions[meets]] = True
    return np.tril(found | found.T, -1)


def _by_memory(program: Program) -> dict[tuple[int, int], list[Access]]:
    found = defaultdict(list)
    for access in program.accesses:
        found[access.memory].append(access)
    return found


def _meet(a: Access, b: Access) -> bool:
    if len(a.low) > len(b.low):
        a, b = b, a
    first = np.searchsorted(b.low, a.high)  # pieces of b that begin before each of a's ends
    reaches = np.maximum.accumulate(b.high)
    return bool(np.any((first > 0) & (reaches[np.maximum(first - 1, 0)] > a.low)))


def sources(program: Program) -> list[tuple[int, ...]]:
    """For each access that reads, the instructions whose bytes it sees, where all run one after another; -1 for nobody's."""
    found = []
    for accesses in _by_memory(program).values():
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
