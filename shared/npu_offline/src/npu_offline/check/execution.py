"""Executes calls of a package from their final modules with all checks, of every launch only the programs that differ."""

from __future__ import annotations

import contextlib
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
_MADE = {"empty", "empty_like", "new_empty"}
_NO_INDEX = {  # what integers that are allocated empty hold
    torch.int64: 0x5A5A5A5A5A5A5A5A,
    torch.int32: 0x5A5A5A5A,
    torch.int16: 0x5A5A,
    torch.int8: 0x5A,
    torch.uint8: 0x5A,
}


LINALG = ""
"""Stands for the Linalg IR where a compiler's version would stand."""
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
                with torch.random.fork_rng(devices=[]), random_values():
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
def random_values(seed: int = SEED) -> Iterator[None]:
    """Until the block ends, floats allocated empty are normally distributed; integers get a number that is no index."""
    numbers = torch.randn(_DISTINCT, generator=torch.Generator().manual_seed(seed))

    class Filled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") in _MADE and made.device.type == "cpu":
                with torch.no_grad():
                    if made.is_floating_point():
                        _fill(made, numbers)
                    elif made.dtype in _NO_INDEX:
                        made.fill_(_NO_INDEX[made.dtype])
            return made

    with Filled():
        yield


def _fill(tensor: torch.Tensor, numbers: torch.Tensor) -> None:
    """Repeat numbers over a tensor, ten times faster than drawing a number for each element."""
    if not tensor.is_contiguous():
        tensor.normal_()
        return
    flat = tensor.view(-1)
    narrow = numbers.to(tensor.dtype)
    whole = flat.numel() // narrow.numel() * narrow.numel()
    flat[:whole].view(-1, narrow.numel()).copy_(narrow)
    flat[whole:].copy_(narrow[: flat.numel() - whole])
