"""`npu-offline bounds`: which accesses of a kernel stay inside their tensors, for all sizes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from rich.table import Table

from ..check.bounded import FORMS, subject_of
from ..errors import OfflineError
from ..toolchain.compilation import front_end_of
from .output import new_console, print_finding, print_line, progress

if TYPE_CHECKING:
    from ..bounds.proof import Counterexample, Verdict
    from ..bounds.subject import Subject
    from . import Subparsers

_MOST_ELEMENTS, _MOST_PROGRAMS = 2**24, 4096  # of a launch that is proposed to be run


def add_parser(commands: Subparsers) -> None:
    """Add `bounds` to the command line."""
    what = "prove that a kernel stays inside its tensors for all sizes, or show where it does not"
    parser = commands.add_parser("bounds", help=what)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    example = "npu-offline bounds kernels.py::double n=1..2**31 x=fp32:n y=fp32:n BLOCK=1024 --grid 'cdiv(n, BLOCK)'"
    parser.epilog = f"{FORMS}\n\nexample: {example}"
    parser.add_argument("target", metavar="FILE::KERNEL", help="a kernel of a file")
    parser.add_argument("given", nargs="*", metavar="NAME=VALUE", help="the kernel's arguments, and sizes: see below")
    parser.add_argument(
        "--grid", metavar="X[,Y[,Z]]", help="the kernel's programs: expressions of sizes, cdiv(a, b), cores, cube_cores"
    )
    where = "what holds for the sizes: 'n %% 16 == 0', 's >= n'"
    parser.add_argument("--where", action="append", default=[], metavar="CONDITION", help=where)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        from ..bounds.kernel import prove
    except ImportError as error:
        raise OfflineError(f"{error.name} is missing: pip install 'npu-offline[bounds]'") from None
    console = new_console()
    subject = subject_of(options.target, options.given, options.grid, options.where)
    console.print(_title(subject), markup=False, highlight=False)
    verdicts = list(progress(prove(subject), "proving", 0, console))
    if not verdicts:
        raise OfflineError("the kernel accesses no memory")
    console.print(_table(verdicts))
    wrong = [verdict for verdict in verdicts if verdict.kind not in ("proved", "refused")]
    ttir = {subject.record.name: front_end_of(subject.record)[1]} if wrong else {}
    for text in dict.fromkeys(f"{_what(each)} ({each.access.place}) {each.kind} {_said(each)}" for each in wrong):
        print_finding(console, text, ttir)
    for line in dict.fromkeys(_runs(options, subject, verdicts)):
        print_line(console, line)
    kinds = [verdict.kind for verdict in verdicts]
    refused = kinds.count("refused")
    said = f"{len(kinds)} accesses: {kinds.count('proved')} proved, {len(wrong)} wrong, {refused} refused"
    console.print(said, markup=False)
    return 1 if wrong else 2 if refused else 0


def _title(subject: Subject) -> str:
    ranges = [f"{first} <= {name} < {stop}" for name, (first, stop) in subject.ranges.items()]
    conditions = ", ".join([*ranges, *subject.conditions])
    if not conditions:
        return f"{subject.record.name}, for these sizes"
    from ..bounds.kernel import MOST_PROGRAMS

    return f"{subject.record.name}, for all {conditions}, of at most {MOST_PROGRAMS:,} programs along an axis"


def _table(verdicts: Sequence[Verdict]) -> Table:
    """A row for each access; those of a line that are alike share one."""
    from rich.markup import escape

    colours = {"proved": "green", "refused": "yellow"}
    rows: dict[tuple[str, ...], int] = {}
    for verdict in verdicts:
        access = verdict.access
        what = _what(verdict)
        text = escape(" ".join([verdict.kind, _said(verdict)]).strip())
        colour = colours.get(verdict.kind, "red")
        row = what, access.place, f"[{colour}]{text}[/{colour}]"
        rows[row] = rows.get(row, 0) + 1
    table = Table("access", "where", "verdict")
    for (what, place, text), count in rows.items():
        table.add_row(f"{what} ({count} times)" if count > 1 else what, place, text)
    return table


def _what(verdict: Verdict) -> str:
    return f"{verdict.access.kind} {verdict.access.argument}".strip()


def _said(verdict: Verdict) -> str:
    found = verdict.counterexample
    if found is None:
        return f"({verdict.reason})" if verdict.reason else ""
    extent = found.extents[verdict.access.argument]
    where = f"program {found.program}: element {found.element} of {verdict.access.argument}, which has {extent}"
    data = [f"one of the {name} is {value}" for name, value in found.data.items()]
    overflow = [found.overflow] if found.overflow else []
    return f"for {_listed(found.sizes)}, {where}{''.join(f'; {each}' for each in (*data, *overflow))}"


def _listed(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "these sizes"


def _runs(options: argparse.Namespace, subject: Subject, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The commands that run counterexamples, where a machine can."""
    for verdict in verdicts:
        found = verdict.counterexample
        if found and not found.data and sum(found.extents.values()) <= _MOST_ELEMENTS and prod(found.grid) <= _MOST_PROGRAMS:
            if min(found.extents.values()) > 0:
                yield f"to see it: {_command(options, subject, found)}"


def _command(options: argparse.Namespace, subject: Subject, found: Counterexample) -> str:
    record, words = subject.record, ["npu-offline", "run", options.target]
    for name, kind in record.signature.items():
        if name in found.extents:
            words.append(f"{name}={kind[1:]}:{found.extents[name]}")
        elif name in found.numbers:
            words.append(f"{name}={found.numbers[name]}")
        else:
            given = [text for text in options.given if text.startswith(f"{name}=")]
            words += given
    grid = ",".join(map(str, found.grid)).removesuffix(",1").removesuffix(",1")
    return shlex.join([*words, "--grid", grid, "--linalg-only"])
