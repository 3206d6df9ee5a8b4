"""`npu-offline run -- python train_step.py`: a whole program, whose launches are checked, linted, timed and listed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ..errors import Finding, OfflineError
from ..execute.faults import FRONT_END_IS_WRONG
from ..execute.final.findings import WEAK
from ..launches import Launch, LaunchRecord, describe_tile
from ..module.places import located
from ..toolchain.compilers import DEFAULT
from .output import new_console, print_line, write_json, writing_to

if TYPE_CHECKING:
    from ..check.kernel_file import KernelCall
    from ..timing.model import Timing


@dataclass
class _Row:
    """A kernel with one tile: its launches, the first one recorded, and what lint and the time model say of that.

    Attributes:
        launches: all of them.
        call: the first, to be launched again; None where it cannot be.
        ttir: of the kernel; nothing where there is no record.
        lint: rules and messages.
        timing: the prediction; None where there is none.
        problem: why there is none.
        hint: known faults of the front end whose signs the kernel has, where that is wrong.
    """

    launches: list[Launch] = field(default_factory=list)
    call: KernelCall | None = None
    ttir: str = ""
    lint: list[tuple[str, str]] = field(default_factory=list)
    timing: Timing | None = None
    problem: str = ""
    hint: str = ""

    @property
    def kernel(self) -> str:
        return self.launches[0].kernel

    @property
    def tile(self) -> str:
        return describe_tile(self.launches[0])

    def findings(self) -> list[str]:
        """What is wrong, as editors read it."""
        notes = dict.fromkeys(note.text for launch in self.launches for note in _wrong(launch))
        named = (note if self.kernel in note else f"{self.kernel}: {note}" for note in notes)
        found = (located(note, self.ttir or self.launches[0].ttir) for note in named)
        return [f"{note}{self.hint}" if note.endswith(FRONT_END_IS_WRONG) else note for note in found]


def _wrong(launch: Launch) -> list[Finding]:
    """What is wrong with a launch: its notes without those that are no errors."""
    return [note for note in launch.notes if note.kind != WEAK]


def run_script(options: argparse.Namespace) -> int:
    """Run the program after `--`; returns the exit status."""
    from ..check import kernel_file
    from ..check.recorded import watched
    from ..check.script import npu_on_cpu, program_of
    from ..check.stopped import is_refusal, said_of

    if options.given or options.grid or options.expect or options.target or options.picture:
        raise OfflineError(
            "before -- may stand --soc, --toolchain, --linalg-only, --record, --json and --limit: the program launches its"
            " kernels itself"
        )
    if options.toolchain and len(options.toolchain) > 1:
        raise OfflineError("--toolchain may be one for a program")
    console, run = new_console(), program_of(options.script)
    problem, is_refused, status = "", False, 0
    final = (options.toolchain or [None])[0]
    with npu_on_cpu(options.soc, toolchain=final) as emulation, watched(emulation) as program:
        try:
            run()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception as error:
            problem, is_refused = said_of(error), is_refusal(error)
    rows: dict[tuple[str, str], _Row] = {key: _Row(call=call) for key, call in program.calls.items()}
    for launch in emulation.launches:
        rows.setdefault((launch.kernel, describe_tile(launch)), _Row()).launches.append(launch)
    with console.status("lint and time"):
        _examine(list(rows.values()), options.soc, final or DEFAULT, compiled=not options.linalg_only)
    console.print(_table(list(rows.values()), program.refused))
    for row in rows.values():
        for text in row.findings():
            print_line(console, text)
    found = sum(1 for launch in emulation.launches if _wrong(launch))
    if problem:
        console.print(f"stopped: {problem}", markup=False)
    if status:
        console.print(f"the program's exit status is {status}", markup=False)
    where = f"final modules of {final}" if final else "Linalg IR"
    no_launch = f"; kernels that did not launch: {len(program.refused)}" if program.refused else ""
    console.print(f"{len(emulation.launches)} launches, {found} with findings, from {where}{no_launch}", markup=False)
    if options.record:
        with writing_to("--record", options.record):
            kernel_file.save(options.record, [row.call for row in rows.values() if row.call is not None])
    if options.json:
        launched = list(map(_as_json, rows.values()))
        write_json(
            "--json", options.json, {"kernels": launched, "refused": program.refused, "stopped": problem, "status": status}
        )
    if found or status or (problem and not is_refused):
        return 1
    return 2 if problem or program.refused or not emulation.launches else 0


def _examine(rows: Sequence[_Row], soc: str, toolchain: str, *, compiled: bool) -> None:
    """Fill in what lint and the time model say of the first launch of each kernel, and where the kernel stands."""
    from ..check.calls import launches_of
    from ..check.compilation import Job, describe
    from ..check.compilation import run as compile_job
    from ..check.culprit import front_end_hint
    from ..toolchain.compilation import front_end_of

    records: list[tuple[_Row, LaunchRecord]] = []
    for row in rows:
        found = launches_of([("", row.call.launch)], soc, {}) if row.call is not None else []
        records += [(row, record) for record in found]
    for row, record in records:
        row.ttir = front_end_of(record)[1]
        wrong = [note.text for launch in row.launches for note in _wrong(launch) if note.text.endswith(FRONT_END_IS_WRONG)]
        if wrong:
            row.hint = front_end_hint(record, soc, values=" differ: " in wrong[0])
    if compiled:
        jobs = [Job(*describe(record), soc, toolchain) for _, record in records]
        with ThreadPoolExecutor() as pool:  # each waits for a compiler's process
            list(pool.map(compile_job, jobs))
        for row, record in records:
            _judge(row, record, soc, toolchain)


def _judge(row: _Row, record: LaunchRecord, soc: str, toolchain: str) -> None:
    from ..lint.engine import lint_kernel
    from ..timing.model import time_launch

    try:
        row.lint = [(each.rule, each.message) for each in lint_kernel(record, soc=soc, toolchain=toolchain)]
        row.timing = time_launch(record, soc=soc, toolchain=toolchain)
    except OfflineError as error:
        row.problem = str(error)


def _table(rows: Sequence[_Row], refused: Mapping[str, str]) -> Table:
    timed = any(row.timing or row.problem for row in rows)
    more = ("lint", "µs, predicted") if timed else ()
    table = Table("", "kernel", "tile", "launches", "programs", *more, "verdict")
    numbers = iter(range(len(rows)))
    for row in rows:
        notes = dict.fromkeys(note.text for launch in row.launches for note in _wrong(launch))
        verdict = f"[red]{escape(chr(10).join(notes))}[/red]" if notes else "no finding"
        number = "" if row.call is None else str(next(numbers))
        programs = sum(prod(launch.grid) for launch in row.launches)
        time = f"{row.timing.estimate * 1e6:.1f}" if row.timing else escape(row.problem.partition("\n")[0])
        rules = "\n".join(dict.fromkeys(rule for rule, _ in row.lint))
        cells = (rules, time) if timed else ()
        table.add_row(number, row.kernel, row.tile, str(len(row.launches)), str(programs), *cells, verdict)
    for kernel, reason in refused.items():
        table.add_row("", kernel, "", "0", "0", *[""] * len(more), f"[red]{escape(reason)}[/red]")
    return table


def _as_json(row: _Row) -> dict[str, object]:
    return {
        "kernel": row.kernel,
        "tile": row.tile,
        "launches": len(row.launches),
        "findings": row.findings(),
        "lint": [located(f"{rule}: {message}", row.ttir) for rule, message in row.lint],
        "seconds": row.timing and row.timing.estimate,
        "range": row.timing and row.timing.range,
        "problem": row.problem,
    }
