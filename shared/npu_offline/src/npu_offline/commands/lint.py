"""`npu-offline lint`: the rules, over every launch of a package's calls."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ..toolchain import compilers as toolchains
from .options import add_call, add_target, calls_of, soc_name
from .output import new_console, print_finding, progress, write_json

if TYPE_CHECKING:
    from ..check.linting import Examined
    from . import Subparsers

SOCS = ("Ascend910B4", "Ascend950PR_957b")
"""Examined unless others are asked for: one chip of each architecture."""


def add_parser(commands: Subparsers) -> None:
    """Add `lint` to the command line."""
    parser = commands.add_parser("lint", help="look for what costs time or safety in every kernel that a package launches")
    add_target(parser)
    socs = f"a chip ({', '.join(SOCS)})"
    parser.add_argument("--soc", action="append", type=soc_name, metavar="NAME", help=socs)
    parser.add_argument("--toolchain", action="append", choices=toolchains.VERSIONS, help="a version (all)")
    add_call(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (all cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..check.linting import as_json, examine_all, load, unused
    from ..lint import RULES

    console = new_console()
    calls = calls_of(options)
    with console.status("recording launches"):
        package = load(calls, options.soc or SOCS, options.toolchain or toolchains.VERSIONS)
    running = examine_all(package, options.jobs)
    examined = list(progress(running, "examining", len(package.subjects), console))
    order = {subject: position for position, subject in enumerate(package.subjects)}
    examined.sort(key=lambda each: order[each.subject])
    everything = not (options.soc or options.toolchain or options.call or package.refused)
    useless = unused(package, examined) if everything else []  # a part of the launches may need fewer
    console.print(table(examined))
    kernels = {each.subject.kernel: each.subject.ttir for each in reversed(examined)}
    for text in dict.fromkeys(f"{each.kernel}: {each.rule}: {each.message}" for one in examined for each in one.findings):
        print_finding(console, text, kernels)
    for problem in sorted({f"{each.subject.kernel}: {each.problem}" for each in examined if each.problem}):
        console.print(problem, markup=False)
    for label, problem in package.refused.items():
        console.print(f"{label}: refused: {problem}", markup=False)
    for line in useless:
        console.print(line, markup=False)
    if options.json:
        refused = [{"call": label, "problem": problem} for label, problem in package.refused.items()]
        launches = [as_json(each) for each in examined]
        write_json("--json", options.json, {"launches": launches, "unused": useless, "refused": refused})
    found = sum(len(each.findings) for each in examined)
    console.print(f"{len(examined)} launches, {len(RULES)} rules, {found} findings", markup=False)
    return 1 if found or useless or any(each.problem for each in examined) else 2 if package.refused else 0


def table(examined: Sequence[Examined]) -> Table:
    """A row for each kernel, rule and suppression, with the first message and how many launches have one."""
    rows: dict[tuple[str, str, str], list[tuple[Examined, str]]] = {}
    for each in examined:
        for finding in each.findings:
            rows.setdefault((finding.kernel, finding.rule, ""), []).append((each, finding.message))
        for finding, reason in each.suppressed:
            rows.setdefault((finding.kernel, finding.rule, reason), []).append((each, finding.message))
    shown = Table("kernel", "rule", "launches", "for example", "in", "suppressed because")
    for (kernel, rule, reason), found in sorted(rows.items()):
        first, message = found[0]
        launches = len({id(each) for each, _ in found})
        where = f"{first.subject.soc}, {first.subject.toolchain}: {first.subject.tile}"
        shown.add_row(kernel, rule, str(launches), message, where, reason or "[red]no[/red]")
    return shown
