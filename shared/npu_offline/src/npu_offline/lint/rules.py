"""What a rule is: its subject, a compiled launch, and its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import npu_tiling
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from ..launches import LaunchRecord, Memory, describe_tile
from ..module.mlir import name_of, parse
from ..module.places import lines_by_operation
from ..reports import Report
from ..toolchain.compilation import compile_linalg, front_end_of
from ..toolchain.opt import parse_stage


@dataclass(frozen=True)
class Subject:
    """A launch for one chip and toolchain, in plain values that can be pickled and used as a cache key.

    Attributes:
        kernel, tile: its name and constants, as tables show them.
        ttir, linalg, options: what is compiled.
        soc, toolchain: for what, by which version.
        grid: programs in x, y and z.
        pointers: names of the pointer arguments.
        rows: by pointer, the bytes of its tensor's rows; 0 where that is not known.
    """

    kernel: str
    tile: str
    ttir: str
    linalg: str
    options: tuple[tuple[str, object], ...]
    soc: str
    toolchain: str
    grid: tuple[int, int, int]
    pointers: tuple[str, ...]
    rows: tuple[int, ...]


def subject_of(launch: LaunchRecord, soc: str, toolchain: str) -> Subject:
    """The subject of a recorded launch."""
    name, ttir, linalg = front_end_of(launch)
    kept = {name: kind for name, kind in launch.signature.items() if name not in launch.constants}
    pointers = tuple(name for name, kind in kept.items() if kind.startswith("*"))
    memories = [launch.arguments.get(name) for name in pointers]
    rows = tuple(memory.row_bytes if isinstance(memory, Memory) else 0 for memory in memories)
    options = tuple(sorted(launch.options.items()))
    return Subject(name, describe_tile(launch), ttir, linalg, options, soc, toolchain, launch.grid, pointers, rows)


class Compiled:
    """A subject and what rules read: TTIR, the Linalg IR, the compiler's report, and the final module."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.chip = npu_tiling.soc(subject.soc)

    @cached_property
    def linalg(self) -> ModuleOp:
        """The Linalg IR, as the compiler is given it."""
        return self._parse(self.subject.linalg)

    @cached_property
    def triton(self) -> list[tuple[Operation, str]]:
        """The operations of the kernel's TTIR, each with where its source stands: " (kernels.py:7:5)", or nothing."""
        lines = {name: iter(found) for name, found in lines_by_operation(self.subject.ttir).items()}
        places = ((op, next(lines.get(name_of(op), iter(())), "")) for op in self._triton.walk())
        return [(op, f" ({place})" if place else "") for op, place in places]

    @cached_property
    def triton_arguments(self) -> Sequence[SSAValue]:
        """The parameters of the kernel in its TTIR."""
        return next(op for op in self._triton.walk() if name_of(op) == "tt.func").regions[0].blocks[0].args

    @cached_property
    def _triton(self) -> ModuleOp:
        from ..toolchain.ttir import generic_form  # imports Triton, which only those who lint must have

        return parse(generic_form(self.subject.ttir))

    @cached_property
    def report(self) -> Report:
        """The compiler's report."""
        subject = self.subject
        return compile_linalg(
            subject.kernel, subject.ttir, subject.linalg, dict(subject.options), subject.soc, subject.toolchain
        )

    @cached_property
    def final(self) -> ModuleOp | None:
        """The final module; None where the kernel does not fit."""
        text = self.report.stages.get("final")
        return self._parse(text) if text else None

    def _parse(self, text: str) -> ModuleOp:
        return parse_stage(text, self.subject.soc, self.subject.toolchain)


@dataclass(frozen=True, order=True)
class Violation:
    """A message of a rule about a kernel."""

    rule: str
    kernel: str
    message: str


Check = Callable[[Compiled], Iterator[str]]


@dataclass(frozen=True)
class Rule:
    """A name, and a function that yields one message for each thing it finds; its docstring is the reason."""

    name: str
    check: Check

    @property
    def reason(self) -> str:
        """Why the rule exists: its function's docstring as one paragraph."""
        return " ".join((self.check.__doc__ or "").split())
