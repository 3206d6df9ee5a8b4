"""Launches: what was launched, and what it moved between global memory and the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from triton.runtime.jit import JITFunction

    from .errors import Finding


MAX_PROGRAMS = 65535
"""The most programs that a grid may have on a chip."""

RESERVED = 2
"""Arguments that the compiler puts before a kernel's own: a lock and a workspace."""


@dataclass(frozen=True)
class Traffic:
    """Global memory traffic of one pointer argument.

    Attributes:
        read, written: bytes that crossed between global memory and the core. An atomic update counts as written.
        transfers: DMA transfers.
        scalars: accesses of single elements that went through the scalar unit, not the DMA engine.
        atomics: those transfers and accesses that were atomic updates.
    """

    read: int = 0
    written: int = 0
    transfers: int = 0
    scalars: int = 0
    atomics: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.read + other.read,
            self.written + other.written,
            self.transfers + other.transfers,
            self.scalars + other.scalars,
            self.atomics + other.atomics,
        )


@dataclass(frozen=True)
class Ledger:
    """How one pointer argument was used, beyond its traffic.

    Attributes:
        useful_read, useful_written: distinct bytes that were read and written; what `Traffic` has beyond that was moved
            more than once. An atomic update counts as written.
        pieces: contiguous pieces of global memory that the DMA transfers consist of.
        whole_rows: DMA transfers whose pieces are whole rows of the tensor, one or several.
        lengths: DMA transfers by length in bytes, rounded down to a power of two.
    """

    useful_read: int
    useful_written: int
    pieces: int
    whole_rows: int
    lengths: Mapping[int, int]


@dataclass(frozen=True)
class Access:
    """An access of the Unified Buffer by an instruction of a final module.

    Attributes:
        step: how many instructions the program has performed before.
        instruction: as findings name it, `name#number`.
        pipe: that performs it.
        core: 0, or which of the cores that share the program.
        buffer: as findings name it, with its type and address.
        low, high: the buffer's first byte in the Unified Buffer, and the one behind its last.
        writes: whether it writes the buffer.
    """

    step: int
    instruction: str
    pipe: str
    core: int
    buffer: str
    low: int
    high: int
    writes: bool


@dataclass(frozen=True)
class Launch:
    """One emulated launch.

    Attributes:
        kernel, grid, constants: what was launched, with how many programs in x, y and z.
        arguments: the traffic of each pointer argument.
        ledgers: how each was used; empty unless `emulate` was asked for ledgers.
        notes: hazards inside one pipe of the final module: an operand is overwritten that an instruction just before still
            reads, or temporaries of library functions meet, with no barrier between. Empty unless it was asked for checks.
            With `emulate(keep_going=True)` also what would have been an error.
        programs: numbers of the only programs that ran; empty where all did.
        signature: argument name to Triton type, constants aside.
        compared: with checks, whether the results were compared with those of the Linalg IR, which cannot run everything.
        instructions: with checks, how many the final module has.
        unissued: with checks, those that no program has issued, as `name#number`.
        accesses: of the Unified Buffer by the first program, where `emulate` was asked for them.
        ttir: of the kernel, where there are notes: it knows the files that they name.
    """

    kernel: str
    grid: tuple[int, int, int]
    constants: Mapping[str, object]
    arguments: Mapping[str, Traffic]
    ledgers: Mapping[str, Ledger] = field(default_factory=dict)
    notes: Sequence[Finding] = ()
    programs: Sequence[int] = ()
    signature: Mapping[str, str] = field(default_factory=dict)
    compared: bool = False
    instructions: int = 0
    unissued: Sequence[str] = ()
    accesses: Sequence[Access] = ()
    ttir: str = ""


@dataclass(eq=False)
class Emulation:
    """What `emulate` yields: the chip, the toolchain, and every launch so far."""

    soc: str
    toolchain: str
    launches: list[Launch] = field(default_factory=list)

    def traffic(self) -> dict[str, dict[str, Traffic]]:
        """The traffic of all launches, by kernel and argument."""
        total: dict[str, dict[str, Traffic]] = {}
        for launch in self.launches:
            kernel = total.setdefault(launch.kernel, {})
            for name, traffic in launch.arguments.items():
                kernel[name] = kernel.get(name, Traffic()) + traffic
        return total


@dataclass(frozen=True, eq=False)
class Memory:
    """A tensor that was an argument of a recorded launch.

    Attributes:
        nbytes: of its elements.
        values: what it held before the launch where these are integers, up to 4 MiB of them: a kernel may branch on them;
            else None.
        row_bytes: of its last dimension; 0 where those elements are not next to each other.
    """

    nbytes: int
    values: torch.Tensor | None = None
    row_bytes: int = 0


@dataclass(frozen=True)
class LaunchRecord:
    """A launch that was recorded instead of run; `compile_kernel` takes it as it is.

    Attributes:
        kernel: the `triton.JITFunction`.
        name: its name.
        signature: argument name to Triton type, constexprs aside.
        constants: argument name to value, of constexprs and of what the JIT made constant (None, the integer 1).
        grid: programs in x, y and z.
        options: compiler options given at the launch, such as multibuffer.
        divisible: arguments that the JIT found to be multiples of 16.
        arguments: value by name, constants left out, in order: numbers, and `Memory` for tensors.
    """

    kernel: JITFunction
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    grid: tuple[int, int, int]
    options: Mapping[str, object] = field(default_factory=dict)
    divisible: Sequence[str] = ()
    arguments: dict[str, Memory | int | float] = field(default_factory=dict)


def describe_tile(launch: Launch | LaunchRecord) -> str:
    """The constants of a launch, and the dtypes of its pointers, as tables show them."""
    constants = [f"{key}={value}" for key, value in launch.constants.items() if value is not None]
    pointers = [kind for kind in launch.signature.values() if kind.startswith("*")]
    return ", ".join([*constants, " ".join(dict.fromkeys(pointers))])
