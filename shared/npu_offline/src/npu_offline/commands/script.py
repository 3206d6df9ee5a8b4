"""`npu-offline run -- python train_step.py`: a whole program, whose launches are checked and listed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from math import prod

from rich.markup import escape
from rich.table import Table

from ..errors import OfflineError
from ..launches import Launch, describe_tile
from .output import new_console


def run_script(options: argparse.Namespace) -> int:
    """Run the program after `--`; returns the exit status."""
    from ..check.script import npu_on_cpu, program_of, refusals
    from ..check.stopped import is_refusal, said_of

    if options.given or options.grid or options.expect or options.target or options.linalg_only:
        raise OfflineError("before -- may stand --soc and --toolchain alone: the program launches its kernels itself")
    if options.toolchain and len(options.toolchain) > 1:
        raise OfflineError("--toolchain may be one for a program")
    console, run = new_console(), program_of(options.script)
    problem, is_refused, status = "", False, 0
    with npu_on_cpu(options.soc, toolchain=(options.toolchain or [None])[0]) as emulation, refusals() as refused:
        try:
            run()
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception as error:
            problem, is_refused = said_of(error), is_refusal(error)
    console.print(_table(emulation.launches, refused))
    found = sum(1 for launch in emulation.launches if launch.notes)
    if problem:
        console.print(f"stopped: {problem}", markup=False)
    if status:
        console.print(f"the program's exit status is {status}", markup=False)
    where = f"final modules of {options.toolchain[0]}" if options.toolchain else "Linalg IR"
    no_launch = f"; kernels that did not launch: {len(refused)}" if refused else ""
    console.print(f"{len(emulation.launches)} launches, {found} with findings, from {where}{no_launch}", markup=False)
    if found or status or (problem and not is_refused):
        return 1
    return 2 if problem or refused or not emulation.launches else 0


def _table(launches: Sequence[Launch], refused: Mapping[str, str]) -> Table:
    rows: dict[tuple[str, str], list[Launch]] = {}
    for launch in launches:
        rows.setdefault((launch.kernel, describe_tile(launch)), []).append(launch)
    table = Table("kernel", "tile", "launches", "programs", "verdict")
    for (kernel, tile), same in rows.items():
        notes = dict.fromkeys(note.text for launch in same for note in launch.notes)
        verdict = f"[red]{escape(chr(10).join(notes))}[/red]" if notes else "no finding"
        table.add_row(kernel, tile, str(len(same)), str(sum(prod(launch.grid) for launch in same)), verdict)
    for kernel, reason in refused.items():
        table.add_row(kernel, "", "0", "0", f"[red]{escape(reason)}[/red]")
    return table
