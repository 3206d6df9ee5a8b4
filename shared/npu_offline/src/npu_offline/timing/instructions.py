"""What a core's scalar unit issues: instructions on pipes, flags between them, barriers.

Each object stands for one instruction of a program, and is compared by identity: it is issued again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pipe = Literal["S", "V", "MTE2", "MTE3"]
PIPES: tuple[Pipe, ...] = ("S", "V", "MTE2", "MTE3")


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """An instruction, or library call, of the vector unit.

    Attributes:
        name: as in the module.
        elements: of its largest operand.
        busy: cycles until the next one may follow.
        latency: cycles more until its result is there.
        peak: the fewest cycles in which the unit can pass over its operand.
    """

    name: str
    elements: int
    busy: float
    latency: float
    peak: float


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A DMA transfer between global memory and the core.

    Attributes:
        name: as in the module.
        pipe: MTE2 reads global memory, MTE3 writes it.
        argument: the kernel's argument whose memory it is.
        moved: bytes, every piece of contiguous memory rounded up to the engine's unit.
        useful: bytes that the kernel asked for.
        gathered: its address depends on a value that was read from memory.
    """

    name: str
    pipe: Pipe
    argument: str
    moved: int
    useful: int
    gathered: bool


@dataclass(frozen=True, slots=True, eq=False)
class ScalarAccess:
    """One element that the scalar unit reads or writes, in global memory or on chip; `cycles` is its cost."""

    name: str
    argument: str | None
    cycles: float
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class SetFlag:
    """`source` signals `target` when all that was issued to it before is done."""

    source: Pipe
    target: Pipe
    event: int


@dataclass(frozen=True, slots=True, eq=False)
class WaitFlag:
    """`target` does nothing more until `source` has set the flag, and clears it."""

    source: Pipe
    target: Pipe
    event: int


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """`pipe` does nothing more until all that was issued to it is done; None: every pipe, and the scalar unit, waits."""

    pipe: Pipe | None


Item = Vector | Transfer | ScalarAccess | SetFlag | WaitFlag | Barrier
