"""The exceptions of this package, and findings of executed modules."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class OfflineError(RuntimeError):
    """The base of every error of this package."""


class ToolchainMissingError(OfflineError):
    """A compiler version is not in the cache folder, or the host has no C compiler or no triton-ascend."""


class UnsupportedError(OfflineError):
    """The toolchain has no such target, or the emulator no such operation."""


class CompilationError(OfflineError):
    """The compiler refused a kernel for another reason than a buffer that is too small."""


class DoesNotFitError(OfflineError):
    """A kernel needs more of a buffer than the chip has."""


class MistakeError(UnsupportedError):
    """This package failed itself: nothing is said about a kernel's results."""


class RefusedError(CompilationError, UnsupportedError):
    """triton-ascend cannot convert a kernel: nothing is said about its results."""


class OutOfBoundsError(OfflineError):
    """An emulated kernel accessed global memory outside the storage of its arguments."""


class RaceError(OfflineError):
    """Two programs of one emulated launch accessed one address, and not both by reading or both atomically."""


class EndlessLoopError(OfflineError):
    """A program of an emulated launch took longer than a program may: a loop does not end, or waits for another program."""


class FindingsError(OfflineError):
    """The execution of a final module found something wrong.

    Attributes:
        kernel: its name.
        findings: what was found.
    """

    def __init__(self, kernel: str, findings: Sequence[Finding]) -> None:
        self.kernel, self.findings = kernel, tuple(findings)
        lines = "\n".join(f"  {finding}" for finding in self.findings)
        super().__init__(f"kernel {kernel}: {len(self.findings)} findings in its final module\n{lines}")


@dataclass(frozen=True)
class Finding:
    """Something wrong about a final module.

    Attributes:
        kind: "race", "hazard", "plan", "alias", "alignment", "flag", "state", "stop", "unwritten" or "results", as
            README.md has them under "Execute final modules"; "weak hazard", one of `Launch.notes`; "bounds", an access
            outside of the arguments; "programs", a race between programs of the grid; "endless", a loop that does not end.
        program: the first program that it was seen in; None for what is of the whole launch.
        text: which instructions, buffers and bytes.
    """

    kind: str
    program: tuple[int, int, int] | None
    text: str

    def __str__(self) -> str:
        where = "" if self.program is None else f", program {self.program}"
        return f"{self.kind}{where}: {self.text}"


def reported(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function whose exceptions, other than those of this file, are mistakes of this package."""

    @functools.wraps(function)
    def call(*arguments: _P.args, **options: _P.kwargs) -> _R:
        try:
            return function(*arguments, **options)
        except Exception as error:
            if ours(error) is not None:
                raise
            at = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
            raise MistakeError(f"npu-offline itself fails, please report it: {said}") from error

    return call


def ours(error: BaseException | None) -> OfflineError | None:
    """The error of ours that Triton may have put another one around; None if there is none."""
    while error is not None and not isinstance(error, OfflineError):
        error = error.__cause__ or error.__context__
    return error


def reason_of(error: BaseException | None) -> str:
    """What an error of ours says, which Triton may have put another one around; nothing if it is none of ours."""
    found = ours(error)
    return "" if found is None else str(found)
