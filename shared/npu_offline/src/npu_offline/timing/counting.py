"""Counts what one program of a grid issues, without a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..module.operations import Pipe
from .costs import ChipCosts
from .instructions import WORKSPACE, CubeStep, ScalarAccess, Transfer, Vector, WaitFlag
from .program import Issue

Stream = tuple[str, bool, bool]
"""An argument, whether it is written, and whether at addresses that were read from memory."""


@dataclass
class Count:
    """Numbers of one program.

    Attributes:
        moved: bytes that the kernel asked for.
        once: the same, where transfers of the same bytes count once, and transfers between cores do not count.
        busy: cycles of the pipes that work on chip, by pipe.
        peak: the fewest cycles that they can take.
        scalar: cycles of the scalar unit.
        scalars: elements that the scalar unit reads or writes.
        waits: flags that a pipe waits for.
        issues: whatever the scalar unit issues.
    """

    moved: Counter[Stream] = field(default_factory=Counter)
    once: Counter[Stream] = field(default_factory=Counter)
    busy: Counter[Pipe] = field(default_factory=Counter)
    peak: Counter[Pipe] = field(default_factory=Counter)
    scalar: float = 0
    scalars: int = 0
    waits: int = 0
    issues: int = 0

    def seconds(self, costs: ChipCosts) -> float:
        """The busiest pipe's time, every transfer at its port's rate: programs are ordered by it."""
        return max(self.port_seconds(costs), max(self.scalar, *self.busy.values(), 0) * costs.cycle)

    def peak_seconds(self, costs: ChipCosts) -> float:
        """A lower bound of the time of the program's busiest pipe."""
        return max(self.port_seconds(costs), max(self.peak.values(), default=0) * costs.cycle)

    def port_seconds(self, costs: ChipCosts) -> float:
        """The busier of the two transfer pipes at the ports' peaks."""
        written = sum(nbytes for (_, is_written, _), nbytes in self.moved.items() if is_written)
        return max((sum(self.moved.values()) - written) / costs.load_port, written / costs.store_port)


def count(issues: Iterable[Issue], seen: set[Any]) -> Count:
    """Add up what a program issues.

    Args:
        issues: of one core.
        seen: what other cores of the same program have moved; what this one moves is added.
    """
    found = Count()
    times: Counter[Any] = Counter()
    for cycles, item, place in issues:
        found.scalar += cycles
        times[item] += 1
        if isinstance(item, Transfer):
            stream = _stream(item)
            where = (stream, item.useful, place)
            if item.argument != WORKSPACE and (item.gathered or where not in seen):
                seen.add(where)
                found.once[stream] += item.useful
    found.issues = times.total()
    for item, number in times.items():
        match item:
            case Vector() | CubeStep():
                found.busy[item.pipe] += number * item.busy  # type: ignore[assignment]  # a Counter of numbers of any kind
                found.peak[item.pipe] += number * item.peak  # type: ignore[assignment]
            case Transfer():
                found.moved[_stream(item)] += number * item.useful
            case ScalarAccess():
                found.scalars += number
                found.scalar += number * item.cycles
            case WaitFlag():
                found.waits += number
    return found


def total(counters: Iterable[Counter[Stream]]) -> Counter[Stream]:
    """The sum of all counts."""
    summed: Counter[Stream] = Counter()
    for counter in counters:
        summed.update(counter)
    return summed


def _stream(item: Transfer) -> Stream:
    return item.argument, item.pipe != "MTE2", item.gathered
