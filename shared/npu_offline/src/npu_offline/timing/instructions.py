"""What a core's scalar unit issues: instructions on pipes, flags between them, barriers.

Each object is one instruction of a program, compared by identity, as it may be issued many times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..module.operations import Pipe


def unit_of(pipe: str) -> str:
    """The unit of the amounts of a pipe's events."""
    return {"V": "elements", "M": "multiplications"}.get(pipe, "bytes")


WORKSPACE = "(workspace)"
"""The argument that the compiler adds: global memory through which cube and vector cores exchange data."""


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """An instruction, or library call, of the vector unit.

    Attributes:
        name: as in the module.
        elements: of its largest operand.
        busy: cycles until the next instruction may start.
        latency: further cycles until its result can be used.
        peak: the fewest cycles that the unit can take for it.
    """

    name: str
    elements: int
    busy: float
    latency: float
    peak: float

    @property
    def pipe(self) -> Pipe:
        """The vector unit."""
        return "V"

    @property
    def amount(self) -> int:
        """Its elements."""
        return self.elements


@dataclass(frozen=True)
class VectorFunction:
    """A vector function, translated.

    Attributes:
        needed: positions of the arguments that its control flow depends on.
        call: the cost of a call, from those arguments.
    """

    needed: tuple[int, ...]
    call: Callable[..., Vector]


@dataclass(frozen=True, slots=True, eq=False)
class CubeStep:
    """An instruction of a cube core that stays on chip: a matrix product, a copy between its buffers, a fill of L1.

    Attributes:
        name: what it does.
        pipe: which pipe performs it.
        amount: multiplications of the matrix unit, else bytes.
        busy: cycles until the next instruction may start and the result can be used.
        peak: the fewest cycles in which the pipe can do it.
    """

    name: str
    pipe: Pipe
    amount: int
    busy: float
    peak: float

    @property
    def latency(self) -> float:
        """Zero: no source gives a latency beyond `busy`."""
        return 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A DMA transfer between global memory and the core.

    Attributes:
        name: as in the module.
        pipe: MTE2 reads global memory; MTE3 writes it, and FIX, from the matrix unit's results.
        argument: the kernel's argument whose memory it is.
        moved: bytes, every piece of contiguous memory rounded up to the engine's unit.
        useful: bytes that the kernel asked for.
        gathered: its address depends on a value that was read from memory.
        cycles: the fewest in which the core's port can move the bytes, after the start-up.
    """

    name: str
    pipe: Pipe
    argument: str
    moved: int
    useful: int
    gathered: bool
    cycles: float = 0


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
class SetCrossFlag:
    """`pipe` signals the other kind of cores of its group when all that was issued to it before is done."""

    pipe: Pipe
    flag: int


@dataclass(frozen=True, slots=True, eq=False)
class WaitCrossFlag:
    """The scalar unit does nothing more until all cores of the other kind in its group have set the flag."""

    flag: int


@dataclass(frozen=True, slots=True, eq=False)
class Barrier:
    """`pipe` does nothing more until all that was issued to it is done; None: every pipe, and the scalar unit, waits."""

    pipe: Pipe | None


Item = Vector | CubeStep | Transfer | ScalarAccess | SetFlag | WaitFlag | SetCrossFlag | WaitCrossFlag | Barrier
