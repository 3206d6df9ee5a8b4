"""A launch of a final module with all checks: run twice with different unwritten memory, and compared with its Linalg IR.

What a launch writes and does not read is poisoned before the second run and before the Linalg IR's. So a number that one of
them leaves out is found, and what lay there before excuses no difference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import Finding, FindingsError, OfflineError
from ..storage import bounds_of
from .compare import bytes_at, changes, differences, moved
from .findings import WEAK

if TYPE_CHECKING:
    import torch

    from ...launches import Traffic
    from ..loading import Loaded

PLAIN, CHECKED, SURVEYED = range(3)  # how a launch runs, as in machine.h
_INTEGERS = ("*i", "*u")  # later launches may use integers as addresses: all programs are run to write them
_NEARBY = 4  # runs of the Linalg IR from inputs a rounding away, where results differ
_SECOND_POISON = 0x3F  # fills unwritten memory in the second run: 0.75 as fp32, 1.9 as fp16, 0.75 as bf16
_RESULT_POISON = 0x5A  # fills results: 1.5e16 as fp32 and bf16, 203 as fp16, and integers that are no addresses


class Run(Protocol):
    """Runs a kernel's grid."""

    def __call__(self, address: int, *, mode: int = ..., poison: int = ...) -> None: ...


def check(
    kernel: str,
    types: Mapping[str, str],
    values: Sequence[Any],
    binary: Loaded,
    run: Run,
    findings: Callable[[], list[Finding]],
    traffic: Callable[[], Mapping[str, Traffic]],
    few: tuple[Callable[[], None], Callable[[], None]] | None = None,
) -> list[Finding]:
    """Run a launch with all checks; its results are those of the final module.

    Args:
        kernel: its name.
        types: Triton type by name of its arguments.
        values: of these arguments.
        binary: the kernel.
        run: what runs it.
        findings: returns what the runs have found so far.
        traffic: returns what the last run read and wrote through each pointer argument.
        few: two functions: one surveys the grid and chooses the programs of all further runs, the other runs all programs.
            None to run all programs anyway.

    Returns:
        Weak hazards: of one pipe, and not known to do harm.

    Raises:
        FindingsError: something is wrong.
    """
    memory = _Memory([value for value, kind in zip(values, types.values(), strict=True) if kind.startswith("*")])
    before = memory.copy()
    if few is not None:
        few[0]()
        memory.restore(before)
    run(binary.address, mode=CHECKED)
    after = memory.copy()
    found = findings()
    places = [(name, kind, value) for (name, kind), value in zip(types.items(), values, strict=True) if kind.startswith("*")]
    start = memory.poisoned(before, _results(places, traffic()))
    memory.restore(start)
    run(binary.address, poison=_SECOND_POISON)
    second = memory.copy()
    written = {bounds: (second[bounds] != start[bounds]) | (after[bounds] != before[bounds]) for bounds in memory.ranges}
    for name, text in changes(places, after, written):
        found.append(Finding("unwritten", None, f"argument {name} depends on bytes that nobody has written: {text}"))
    if binary.beside:
        memory.restore(start)
        run(binary.beside)
        counts = {name: used.written for name, used in traffic().items()}
        different = list(differences(places, start, second, counts))
        if different:
            different = list(differences(places, start, second, counts, _nearby(memory, places, start, binary.beside, run)))
        for name, text in different:
            found.append(Finding("results", None, f"argument {name} is not what its Linalg IR computes: {text}"))
    memory.restore(after)
    if few is not None and any(kind[:2] in _INTEGERS and traffic()[name].written for name, kind, _ in places):
        memory.restore(before)
        few[1]()
    wrong = [finding for finding in found if finding.kind != WEAK]
    if wrong:
        raise FindingsError(kernel, wrong)
    return [finding for finding in found if finding.kind == WEAK]


def _nearby(
    memory: _Memory, places: Sequence[tuple[str, str, Any]], start: Mapping[Any, torch.Tensor], address: int, run: Run
) -> list[dict[tuple[int, int], torch.Tensor]]:
    """The memory after runs from inputs that `moved` has moved; memory is left as it was."""
    kept, found = memory.copy(), []
    for seed in range(_NEARBY):
        memory.restore(start)
        moved(places, seed)
        with contextlib.suppress(OfflineError):  # a number that is an index may lead outside
            run(address)
            found.append(memory.copy())
    memory.restore(kept)
    return found


def _results(places: Sequence[tuple[str, str, Any]], traffic: Mapping[str, Traffic]) -> set[tuple[int, int]]:
    """The storages that a launch writes and does not read."""
    found, read = set(), set()
    for name, _, value in places:
        bounds = bounds_of(value)
        storages = set(zip(bounds[::2], bounds[1::2], strict=True))
        if traffic[name].written:
            found |= storages
        if traffic[name].read or traffic[name].atomics:
            read |= storages
    return found - read


class _Memory:
    """The storages of a launch's arguments."""

    def __init__(self, values: Sequence[Any]) -> None:
        found: set[tuple[int, int]] = set()
        for value in values:
            bounds = bounds_of(value)
            found |= {(low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if high > low}
        self.ranges = sorted(found)

    def copy(self) -> dict[tuple[int, int], torch.Tensor]:
        return {bounds: bytes_at(*bounds).clone() for bounds in self.ranges}

    @staticmethod
    def poisoned(copies: Mapping[tuple[int, int], torch.Tensor], results: set[tuple[int, int]]) -> dict[Any, torch.Tensor]:
        """Copies with poison in these storages."""
        return {at: data.clone().fill_(_RESULT_POISON) if at in results else data for at, data in copies.items()}

    def restore(self, copies: Mapping[tuple[int, int], torch.Tensor]) -> None:
        for bounds, data in copies.items():
            bytes_at(*bounds).copy_(data)
