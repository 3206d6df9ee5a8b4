"""Where the host's time of one call goes."""

from __future__ import annotations

from collections.abc import Sequence

from .declaration import Stage
from .devices import Device
from .errors import BenchError
from .tables import Table, number
from .timing import host_times

_HEADERS = ("stage", "us per call (20-80 %)", "own us")


def stage_table(title: str, stages: Sequence[Stage], device: Device, budget_s: float) -> Table:
    """Time every stage by itself; a stage's own time is its median less the medians of the stages inside it.

    Own times are differences of separate measurements: those below the spread beside them are noise, negative ones too.

    Args:
        title: of the table.
        stages: in the order of the table.
        device: where they run.
        budget_s: seconds for each.

    Raises:
        BenchError: a stage names an inner one that is not there.
    """
    names = [stage.name for stage in stages]
    for stage in stages:
        for inner in stage.inner:
            if inner not in names:
                raise BenchError(f"stage {stage.name!r} has inner stage {inner!r}, which is not among {names}.")
    times = host_times({stage.name: stage.call for stage in stages}, device, budget_s)
    rows = []
    for stage in stages:
        time = times[stage.name]
        own = time.p50 - sum(times[inner].p50 for inner in stage.inner)
        rows.append([stage.name, f"{number(time.p50)} ({number(time.p20)}-{number(time.p80)})", f"{own:.1f}"])
    return Table(title, _HEADERS, rows)
