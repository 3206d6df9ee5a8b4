"""How times grow along a sweep: in step with the work, or with a cliff."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from .runner import Row, Run

#: A step is a cliff where time grows by more than this many times what the work grows by. The room is for costs that set
#: in at some size without being wrong: a cache that no longer holds the data, a last round of programs that is nearly empty.
TOLERANCE = 1.25


@dataclass(frozen=True)
class Growth:
    """From one size of a sweep to the next.

    Attributes:
        ratio: device time after over before, over the same ratio of the floors (bytes or operations at the ceiling). 1
            is a straight line; below 1 are sizes whose fixed costs weigh less and less.
        cliff: the ratio is above `TOLERANCE`, and not within the spread of the two times.
    """

    ratio: float
    cliff: bool

    def __str__(self) -> str:
        return f"{self.ratio:.2f}" + (" CLIFF" if self.cliff else "")


def growths(run: Run) -> dict[tuple[str, str, str], Growth]:
    """By case, mode and provider: the step that leads to that case. Empty where the x axis has no numbers."""
    if any(isinstance(case.position, str) for case in run.sweep.cases):
        return {}
    found = {}
    for mode, provider in dict.fromkeys((row.mode, row.provider) for row in run.rows):
        line = [row for row in run.rows if (row.mode, row.provider) == (mode, provider) and row.right]
        line.sort(key=lambda row: float(row.case.position))
        for before, after in pairwise(line):
            found[after.case.name, mode, provider] = _growth(before, after)
    return found


def _growth(before: Row, after: Row) -> Growth:
    assert before.device_ms is not None
    assert after.device_ms is not None
    assert before.floor_ms is not None
    assert after.floor_ms is not None
    work = after.floor_ms / before.floor_ms
    surely = after.device_ms.p20 / before.device_ms.p80 / work
    return Growth(after.device_ms.p50 / before.device_ms.p50 / work, surely > TOLERANCE)
