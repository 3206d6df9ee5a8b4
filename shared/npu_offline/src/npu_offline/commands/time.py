"""`npu-offline time`: a prediction for every launch of a package's calls."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from .. import check
from ..errors import OfflineError, ToolchainMissingError, UnsupportedError
from ..launches import LaunchRecord, describe_tile
from ..module.operations import PIPES, Pipe
from .options import add_what_to_time, assumptions, calls_of, where_of
from .output import new_console, progress, write_json

if TYPE_CHECKING:
    from ..timing.model import Timing
    from ..timing.simulation import Event
    from . import Subparsers

_EVENTS = 20_000
_COLUMNS: dict[Pipe, str] = {
    "S": "scalar",
    "V": "vector",
    "M": "matrix",
    "MTE2": "load",
    "MTE1": "L1 to L0",
    "MTE3": "store",
    "FIX": "fixpipe",
}


def add_parser(commands: Subparsers) -> None:
    """Add `time` to the command line."""
    parser = commands.add_parser("time", help="predict how long a package's launches take")
    add_what_to_time(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the predictions there too")
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write what each kernel's pipes do there, for Perfetto or chrome://tracing",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..timing.model import time_launch

    console = new_console()
    calls = calls_of(options)
    refused: dict[str, str] = {}
    launches = {_identity(launch): launch for launch in check.launches_of(calls, options.soc, refused)}.values()
    events = _EVENTS if options.timeline else 0
    timings: list[tuple[LaunchRecord, Timing]] = []
    problems = [f"{label}: refused: {problem}" for label, problem in refused.items()]
    is_wrong = False
    for launch in progress(launches, "simulating", len(launches), console):
        try:
            timings.append((launch, time_launch(launch, **where_of(options), events=events)))
        except OfflineError as error:
            problems.append(f"{launch.name} {describe_tile(launch)}: {error}")
            is_wrong |= not isinstance(error, (ToolchainMissingError, UnsupportedError))
    console.print(_table(timings, f"{assumptions(options)}; µs of a core"))
    for problem in problems:
        console.print(problem, markup=False)
    if options.json:
        write_json("--json", options.json, [_as_json(launch, timing) for launch, timing in timings])
    if options.timeline:
        write_json("--timeline", options.timeline, chrome_trace([timing for _, timing in timings]))
    return 1 if is_wrong else 2 if problems else 0


def _identity(launch: LaunchRecord) -> tuple[object, ...]:
    numbers = {name: value for name, value in launch.arguments.items() if isinstance(value, (int, float))}
    return launch.name, str(sorted(launch.constants.items(), key=str)), str(launch.signature), launch.grid, str(numbers)


def _table(timings: Sequence[tuple[LaunchRecord, Timing]], title: str) -> Table:
    pipes = [pipe for pipe in _COLUMNS if any(timing.busy[pipe] for _, timing in timings)]
    columns = ("kernel", "tile", "programs", "bound", "estimate", "range", *(_COLUMNS[pipe] for pipe in pipes), "MB moved")
    table = Table(*columns, title=title)
    for launch, timing in timings:
        busy = [f"{timing.busy[pipe] * 1e6:.1f}" if timing.busy[pipe] else "" for pipe in pipes]
        programs = str(timing.grid[0] * timing.grid[1] * timing.grid[2])
        times = (f"{timing.bound * 1e6:.1f}", f"{timing.estimate * 1e6:.1f}", describe_range(timing))
        table.add_row(timing.kernel, describe_tile(launch), programs, *times, *busy, f"{timing.moved / 1e6:.2f}")
    return table


def describe_range(timing: Timing) -> str:
    """The range of an estimate in microseconds."""
    return "unknown" if timing.range is None else " to ".join(f"{seconds * 1e6:.1f}" for seconds in timing.range)


def _as_json(launch: LaunchRecord, timing: Timing) -> dict[str, object]:
    values = {field.name: getattr(timing, field.name) for field in dataclasses.fields(timing) if field.name != "events"}
    return {**values, "tile": describe_tile(launch), "limited_by": timing.limited_by, "range": timing.range}


def chrome_trace(timings: Sequence[Timing]) -> dict[str, object]:
    """Timelines in the trace event format: a process for each kernel, a thread for each pipe with events."""
    events: list[dict[str, object]] = []
    for process, timing in enumerate(timings):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": timing.kernel}})
        cores = sorted({event.core for event in timing.events})
        used = {(event.core, event.pipe) for event in timing.events}
        lanes = [(core, pipe) for core in cores for pipe in PIPES if (core, pipe) in used]
        for thread, (core, pipe) in enumerate(lanes):
            args = {"name": f"{core} {pipe}" if len(cores) > 1 else pipe}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": args})
        events += [_trace_event(event, process, lanes.index((event.core, event.pipe))) for event in timing.events]
    return {"traceEvents": events}


def _trace_event(event: Event, process: int, thread: int) -> dict[str, object]:
    from ..timing.instructions import unit_of

    begin, length = event.start * 1e6, (event.end - event.start) * 1e6
    amount = {unit_of(event.pipe): event.amount}
    place = {"pid": process, "tid": thread}
    return {"ph": "X", "name": event.name, **place, "ts": begin, "dur": length, "args": amount}
