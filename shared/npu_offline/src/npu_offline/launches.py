"""What was launched, and what it moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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
class Launch:
    """One emulated launch: the kernel's name, the grid, its constants, and the traffic of each pointer argument."""

    kernel: str
    grid: tuple[int, int, int]
    constants: Mapping[str, Any]
    arguments: Mapping[str, Traffic]


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
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    grid: tuple[int, int, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    divisible: Sequence[str] = ()
