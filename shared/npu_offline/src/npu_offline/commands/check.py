"""`npu-offline check`: every kernel that a package launches, compiled for every chip, and executed with checks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import npu_tiling
from rich.console import Console
from rich.table import Table

from .. import check
from ..check.calls import launches_of
from ..check.compilation import largest_that_fit
from ..errors import OfflineError
from ..toolchain import compilers as toolchains
from . import execution_report
from .options import add_call, add_limit, add_target, calls_of, soc_name
from .output import new_console, print_finding, progress, write_json

if TYPE_CHECKING:
    from ..check.execution import Executed
    from . import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add `check` to the command line."""
    parser = commands.add_parser("check", help="compile every kernel that a package launches, and execute it with checks")
    add_target(parser)
    add_call(parser)
    parser.add_argument("--soc", action="append", type=soc_name, metavar="NAME", help="a chip (all)")
    parser.add_argument("--toolchain", action="append", choices=toolchains.VERSIONS, help="a version (all)")
    parser.add_argument("--every-chip", action="store_true", help="compile even where chips differ in name alone")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilations at a time (all cores)")
    parser.add_argument("--compiler", type=Path, metavar="PATH", help="an installed CANN's bishengir-compile")
    parser.add_argument("--compile-only", action="store_true", help="do not execute what was compiled")
    parser.add_argument("--fresh", action="store_true", help="execute calls again whose verdict is kept from before")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    add_limit(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    console = new_console()
    socs = options.soc or list(npu_tiling.SOCS)
    versions = options.toolchain or list(toolchains.VERSIONS)
    if options.compiler is not None:
        if options.toolchain:
            raise OfflineError("--compiler stands instead of --toolchain")
        versions = [toolchains.adopt(options.compiler)]
        console.print(toolchains.describe(versions[0]), markup=False)
    calls = calls_of(options)
    for version in versions:
        toolchains.tool(version, "bishengir-compile")
    with console.status("recording launches"):
        refused: dict[str, str] = {}
        jobs = check.jobs_for(calls, socs, versions, refused)
    calls = [call for call in calls if call[0] not in refused]
    running = check.run_all(jobs, options.jobs, every_chip=options.every_chip)
    results = list(progress(running, "compiling", len(jobs), console))
    order = {job: position for position, job in enumerate(jobs)}
    results.sort(key=lambda result: order[result.job])
    executed = [] if options.compile_only else _execute(options, calls, socs, versions, console)
    console.print(_table(results, executed))
    failures = [result for result in results if not result.ok]
    wrong = [(call, kernel, finding) for call in executed for kernel, finding in call.findings]
    kernels = {result.job.kernel: result.job.ttir for result in reversed(results)}
    for call, kernel, finding in wrong:
        print_finding(console, f"{kernel} {_level(call)}, {call.label}: {finding}", kernels)
    partial = [call for call in executed if call.problem]
    for call in partial:
        console.print(f"{_level(call)}, {call.label}: not executed: {call.problem}", markup=False)
    for label, problem in refused.items():
        console.print(f"{label}: refused: {problem}", markup=False)
    for line in _refusals(failures):
        print_finding(console, line, kernels)
    for line in _too_large(failures, calls):
        print_finding(console, line, kernels)
    vector_functions = sorted({result.job.soc for result in results if toolchains.is_a5(result.job.soc)})
    if vector_functions and not options.compile_only:
        what = f"the emulation has no vector functions of {', '.join(vector_functions)}"
        console.print(f"final modules, not executed: {what}", markup=False)
    if options.json:
        found = {
            "compilations": [_as_json(result) for result in results],
            "findings": [_said(call, kernel=kernel, finding=str(finding)) for call, kernel, finding in wrong],
            "not_executed": [_said(call, problem=call.problem) for call in partial],
            "refused": [{"call": label, "problem": problem} for label, problem in refused.items()],
        }
        write_json("--json", options.json, found)
    console.print(f"{len(results)} compilations, {len(failures)} failed", markup=False)
    if executed:
        for line in execution_report.lines(executed):
            console.print(line, markup=False)
    wrong_modules = any(call.unfit for call in partial)
    return 1 if failures or wrong or wrong_modules else 2 if refused or any(call.toolchain for call in partial) else 0


def _refusals(failures: Sequence[check.Result]) -> Iterator[str]:
    """Why compilers refused kernels: once for all chips of which they say the same."""
    alike: dict[tuple[str, str, str], list[check.Result]] = {}
    for result in failures:
        if result.report is None:
            said = result.problem.replace(result.job.soc, "")
            alike.setdefault((result.job.kernel, result.job.toolchain, said), []).append(result)
    for (kernel, toolchain, _), (first, *others) in alike.items():
        more = f" and {len(others)} more" if others else ""
        yield f"{kernel} {first.job.soc}{more} {toolchain}: {first.problem}"


def _too_large(failures: Sequence[check.Result], calls: Sequence[check.Call]) -> Iterator[str]:
    """Kernels that do not fit, and what would: once for all chips and toolchains of which the same is said."""
    alike: dict[tuple[object, ...], list[check.Result]] = {}
    for result in failures:
        if result.report is not None:
            alike.setdefault((result.job.kernel, result.job.tile, result.report.message), []).append(result)
    for (kernel, tile, message), (first, *_) in alike.items():
        job = first.job
        records = (
            record for record in launches_of(calls, job.soc) if check.describe(record)[:3] == (kernel, tile, job.ttir)
        )
        fitting = largest_that_fit(next(records), job.soc, job.toolchain)
        yield f"{kernel} {tile} does not fit {job.soc} ({job.toolchain}): {message}{fitting and f'; {fitting}'}"


def _level(call: Executed) -> str:
    return call.toolchain or "Linalg IR"


def _execute(
    options: argparse.Namespace, calls: Sequence[check.Call], socs: Sequence[str], versions: Sequence[str], console: Console
) -> list[Executed]:
    """Execute every call with every toolchain, on the first chip that the toolchain supports, and from Linalg IR."""
    from ..check.execution import LINALG
    from ..check.verdicts import execute_package

    found: list[Executed] = []
    for version in (LINALG, *versions):
        soc = next(
            (soc for soc in socs if not version or toolchains.supported(soc, version) and not toolchains.is_a5(soc)), None
        )
        if soc is not None:
            running = execute_package(options.target, calls, soc, version, fresh=options.fresh)
            found += list(progress(running, f"executing {version or 'Linalg IR'}", len(calls), console))
    return found


def _table(results: Sequence[check.Result], executed: Sequence[Executed] = ()) -> Table:
    """One row per kernel, tile and outcome, with the toolchains and chips that share it."""
    ran = execution_report.cells(executed)
    chips: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        verdict = (
            ""
            if result.unsupported or toolchains.is_a5(result.job.soc)
            else ran.get((result.job.kernel, result.job.tile, result.job.toolchain), "")
        )
        key = (result.job.kernel, result.job.tile, result.job.toolchain, *_outcome(result), verdict)
        chips.setdefault(key, []).append(result.job.soc)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (kernel, tile, toolchain, *outcome), socs in chips.items():
        rows.setdefault((kernel, tile, *outcome, _span(socs)), []).append(toolchain)
    table = Table(
        "kernel",
        "tile",
        "fits",
        "UB used",
        "double-buffered",
        "executed",
        "chips",
        "toolchains",
        title="UB is per vector core",
    )
    for (*cells, span), versions in sorted(rows.items(), key=lambda row: row[0][:2]):
        table.add_row(*cells, span, " ".join(versions))
    return table


def _outcome(result: check.Result) -> tuple[str, str, str]:
    """The table's cells of a result: fits, UB used, double-buffered."""
    report = result.report
    if report is None:
        return ("unsupported" if result.unsupported else "[red]error[/red]", "", "")
    if not report.fits:
        return ("[red]no[/red]", _share(report.required_ub_bytes, report.ub.available) or report.message, "")
    doubled = {True: "yes", False: "[yellow]no[/yellow]", None: "n/a (no loop)"}[report.double_buffered]
    return ("yes", _share(report.ub.used, report.ub.available), doubled)


def _share(used: int | None, available: int) -> str:
    return "" if used is None else f"{used:,} of {available:,} ({100 * used / available:.0f} %)"


def _span(socs: Sequence[str]) -> str:
    return socs[0] if len(socs) == 1 else f"{socs[0]} … {socs[-1]} ({len(socs)})"


def _said(call: Executed, **what: str) -> dict[str, str]:
    return {"call": call.label, "level": _level(call), **what}


def _as_json(result: check.Result) -> dict[str, object]:
    job, report = result.job, result.report
    return {
        "kernel": job.kernel,
        "tile": job.tile,
        "soc": job.soc,
        "toolchain": job.toolchain,
        "supported": not result.unsupported,
        "fits": report.fits if report else None,
        "ub_used": report.ub.used if report else None,
        "ub_available": report.ub.available if report else None,
        "required_ub_bytes": report.required_ub_bytes if report else None,
        "double_buffered": report.double_buffered if report else None,
        "message": report.message if report else result.problem,
    }
