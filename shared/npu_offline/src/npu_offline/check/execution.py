"""Executes calls of a package from their final modules with all checks, of every launch only the programs that differ."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import Finding, FindingsError, ours
from ..execute.emulation import emulate
from ..execute.final.findings import WEAK
from ..launches import Launch, describe_tile
from .stopped import said_of

_DISTINCT = 1_000_003  # random numbers that are repeated: a prime, so that rows of a tensor differ
MADE_EMPTY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Functions of PyTorch whose result nobody has written."""
_NO_INDEX = {  # what integers that are allocated empty hold
    torch.int64: 0x5A5A5A5A5A5A5A5A,
    torch.int32: 0x5A5A5A5A,
    torch.int16: 0x5A5A,
    torch.int8: 0x5A,
    torch.uint8: 0x5A,
}


LINALG = ""
"""Stands for the Linalg IR where a compiler's version would stand."""
MEANING, MOVED, RACING = "only", "other", "races"
"""Stand for what the TTIR means to Triton, for that with other roundings, and for that with an error at races."""
SEED = 0
"""The seed of the random numbers."""


@dataclass(frozen=True)
class Ran:
    """A launch that was executed.

    Attributes:
        kernel, tile: its name, and the constants that it was compiled with.
        programs: how many of its programs were executed with checks.
        of: how many programs it has.
        compared: whether its results were compared with those of its Linalg IR.
        instructions: how many the final module has.
        unissued: those that no program has issued.
        findings: what is wrong.
    """

    kernel: str
    tile: str
    programs: int
    of: int
    compared: bool
    instructions: int
    unissued: Sequence[str]
    findings: Sequence[Finding] = ()


@dataclass(frozen=True)
class Executed:
    """The result of a call.

    Attributes:
        label: of the call.
        toolchain: the compiler version.
        launches: those that were executed.
        problem: why the call was not executed as a whole; empty if it was.
        unfit: whether it was not because a final module cannot be right.
        kept: whether the result is from the cache.
    """

    label: str
    toolchain: str
    launches: Sequence[Ran]
    problem: str = ""
    unfit: bool = False
    kept: bool = False

    @property
    def findings(self) -> list[tuple[str, Finding]]:
        """The kernel's name and the finding, for all launches."""
        return [(launch.kernel, finding) for launch in self.launches for finding in launch.findings]


def execute_calls(
    calls: Iterable[tuple[str, Callable[[], None]]], soc: str, toolchain: str, compilation: int = 0
) -> Iterator[Executed]:
    """Execute calls, one after another.

    Args:
        calls: label and function, as `check.load_calls` returns them. Tensors that they allocate empty get random numbers.
        soc: the chip.
        toolchain: the compiler's version, or `LINALG`: every program, from Linalg IR, and races between programs.
        compilation: as in `emulate`.
    """
    final: dict[str, Any] = {"toolchain": toolchain, "threads": 1, "checks": True, "distinct": True}
    final["compilation"] = compilation
    for label, call in calls:
        problem, unfit = "", False
        with emulate(soc, **final if toolchain else {"races": True}, keep_going=True) as emulation:
            try:
                with torch.random.fork_rng(devices=[], device_type="cpu"), random_values():
                    torch.manual_seed(SEED)
                    call()
            except Exception as error:
                problem, unfit = said_of(error), isinstance(ours(error), FindingsError)
        yield Executed(label, toolchain, [_ran(launch) for launch in emulation.launches], problem, unfit)


def _ran(launch: Launch) -> Ran:
    programs = prod(launch.grid)
    findings = tuple(finding for finding in launch.notes if finding.kind != WEAK)
    checked = (launch.compared, launch.instructions, tuple(launch.unissued), findings)
    return Ran(launch.kernel, describe_tile(launch), len(launch.programs) or programs, programs, *checked)


@contextlib.contextmanager
def random_values(seed: int = SEED, *, sign: int = 0) -> Iterator[None]:
    """Until the block ends, tensors that are allocated empty get numbers: integers one that is no index, floats random ones,
    others for each tensor.

    Args:
        seed: of the random numbers.
        sign: -1 and 1: numbers below zero down to -20, and numbers above it of up to 200, whose exponential no fp32 holds,
            in place of normally distributed ones.
    """
    numbers = torch.randn(_DISTINCT, generator=torch.Generator().manual_seed(seed))
    if sign:
        numbers = (40 if sign > 0 else -4) * numbers.abs() + sign * 0.25
    starts = itertools.count(0, _DISTINCT // 7)  # the first tensor has the first numbers

    class Filled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") in MADE_EMPTY and made.device.type == "cpu":
                with torch.no_grad():
                    if made.is_floating_point():
                        _fill(made, numbers, next(starts) % _DISTINCT)
                    elif made.dtype in _NO_INDEX:
                        made.fill_(_NO_INDEX[made.dtype])
            return made

    with Filled():
        yield


def _fill(tensor: torch.Tensor, numbers: torch.Tensor, start: int) -> None:
    """Repeat numbers over a tensor from one of them on, ten times faster than drawing a number for each element."""
    flat = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)
    done = 0
    while done < flat.numel():
        length = min(flat.numel() - done, len(numbers) - start)
        flat[done : done + length].copy_(numbers[start : start + length])
        done, start = done + length, 0
    if not tensor.is_contiguous():
        tensor.copy_(flat.view(tensor.shape))
