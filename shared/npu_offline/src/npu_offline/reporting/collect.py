"""Collects the report's content as plain values, for its JSON file and its page."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import npu_tiling

from .. import check
from ..check.linting import as_json, examine_all, load, unused
from ..errors import OfflineError
from ..execute.emulation import emulate
from ..launches import LaunchRecord, describe_tile
from ..lint import RULES
from ..reports import Report
from ..timing import time_launch
from ..toolchain.compilers import is_a5
from ..toolchain.processes import run

Progress = Callable[[str], None]
_LARGEST = 2**27  # bytes: calls with larger arguments are not emulated
_EVENTS = 400


@dataclasses.dataclass(frozen=True)
class Scope:
    """What to analyse.

    Attributes:
        socs, toolchains: chips and compiler versions.
        labels: of calls, by package; all calls of a package that has no entry.
        jobs: processes; None for one per core.
    """

    socs: Sequence[str]
    toolchains: Sequence[str]
    labels: dict[str, Sequence[str]]
    jobs: int | None


def collect(packages: Sequence[Path], scope: Scope, progress: Progress) -> dict[str, Any]:
    """Compile, lint, emulate and time the calls of packages.

    Args:
        packages: folders with tests/ascend_calls.py.
        scope: which of their calls, for which chips and toolchains.
        progress: called with a line of text before each step.

    Returns:
        Values that can be written as JSON.
    """
    return {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.platform(terse=True),
        "commit": _commit(packages[0]),
        "toolchains": list(scope.toolchains),
        "chips": [_chip(soc) for soc in scope.socs],
        "rules": {name: rule.reason for name, rule in RULES.items()},
        "packages": [_package(folder, scope, progress) for folder in packages],
    }


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    done = run(command, seconds=60)
    return done.stdout.strip()


def _chip(soc: str) -> dict[str, Any]:
    chip = npu_tiling.soc(soc)
    return {"name": soc, "cores": chip.vector_cores, "ub": chip.ub_bytes, "arch": chip.arch}


def _package(folder: Path, scope: Scope, progress: Progress) -> dict[str, Any]:
    calls = check.load_calls(folder)
    wanted = scope.labels.get(folder.name)
    chosen = [call for call in calls if wanted is None or call[0] in wanted]
    progress(f"{folder.name}: compiling")
    jobs = check.jobs_for(chosen, scope.socs, scope.toolchains)
    compiled = [_compiled(result) for result in check.run_all(jobs, scope.jobs)]
    progress(f"{folder.name}: applying {len(RULES)} rules")
    examined_socs = _one_of_each_kind(scope.socs)
    package = load(chosen, examined_socs, scope.toolchains)
    examined = list(examine_all(package, scope.jobs))
    progress(f"{folder.name}: emulating and timing")
    soc, toolchain = scope.socs[0], scope.toolchains[-1]
    ledgers: list[dict[str, Any]] = []
    timelines: dict[str, dict[str, Any]] = {}
    for call in chosen:
        records = check.launches_of([call], soc)
        ledgers += _ledgers(call, records, soc, toolchain)
        for record in records:
            if record.name not in timelines:
                timelines[record.name] = _timeline(call[0], record, soc, toolchain)
    return {
        "name": folder.name,
        "calls": {"shown": len(chosen), "all": len(calls)},
        "compiled": sorted(compiled, key=lambda row: (row["kernel"], row["tile"], row["soc"], row["toolchain"])),
        "linted": {
            "chips": examined_socs,
            "launches": [as_json(each) for each in examined],
            "unused": unused(package, examined) if len(chosen) == len(calls) else [],
        },
        "ledgers": ledgers,
        "timelines": list(timelines.values()),
    }


def _one_of_each_kind(socs: Sequence[str]) -> list[str]:
    """The first chip of each architecture: findings of other chips are almost the same."""
    kinds: dict[bool, str] = {}
    for soc in socs:
        kinds.setdefault(is_a5(soc), soc)
    return list(kinds.values())


def _compiled(result: check.Result) -> dict[str, Any]:
    job, report = result.job, result.report
    memory = (
        {space: [getattr(report, space).used, getattr(report, space).available] for space in ("ub", "l1", "l0c")}
        if report
        else {}
    )
    return {
        "kernel": job.kernel,
        "tile": job.tile,
        "soc": job.soc,
        "toolchain": job.toolchain,
        "supported": not result.unsupported,
        "fits": bool(report and report.fits),
        "double_buffered": _doubled(report),
        "problem": report.message if report and not report.fits else result.problem,
        **memory,
    }


def _doubled(report: Report | None) -> bool | None:
    return report.double_buffered if report else None


def _nbytes(record: LaunchRecord) -> int:
    return sum(getattr(value, "nbytes", 0) for value in record.arguments.values())


def _ledgers(call: check.Call, records: Sequence[LaunchRecord], soc: str, toolchain: str) -> list[dict[str, Any]]:
    """A row for each argument of a call's launches; none where the arguments are too large to emulate."""
    if any(_nbytes(record) > _LARGEST for record in records):
        return []
    label, run = call
    with emulate(soc, toolchain=toolchain, races=True, ledgers=True) as emulation:
        run()
    return [
        {
            "call": label,
            "kernel": launch.kernel,
            "programs": prod(launch.grid),
            "argument": name,
            **dataclasses.asdict(traffic),
            **dataclasses.asdict(launch.ledgers[name]),
        }
        for launch in emulation.launches
        for name, traffic in launch.arguments.items()
        if traffic.read or traffic.written
    ]


def _timeline(label: str, record: LaunchRecord, soc: str, toolchain: str) -> dict[str, Any]:
    """The first events of one core's pipes, or why they cannot be predicted."""
    found = {"call": label, "kernel": record.name, "tile": describe_tile(record), "soc": soc, "problem": ""}
    try:
        timing = time_launch(record, soc=soc, toolchain=toolchain, events=_EVENTS)
    except OfflineError as error:
        return {**found, "problem": str(error)}
    return {
        **found,
        "bound": timing.bound,
        "estimate": timing.estimate,
        "range": timing.range,
        "l2": timing.l2,
        "limited_by": timing.limited_by,
        "busy": dict(timing.busy),
        "events": [[event.pipe, event.start, event.end, event.name, event.amount, event.core] for event in timing.events],
    }
