"""`npu-offline conformance`: every operation of Triton's language on every dtype, through every compiler."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OfflineError
from .output import new_console, new_folder, writing_to

if TYPE_CHECKING:
    from . import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add `conformance` to the command line."""
    parser = commands.add_parser("conformance", help="are Triton's operations right on every dtype and compiler")
    parser.add_argument(
        "--limit", type=float, default=3600, metavar="SECONDS", help="begin no kernel after it (%(default)s)"
    )
    parser.add_argument("--operation", action="append", metavar="NAME", help="such as '>>' or tl.sum (all)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write the page and drafts of reports there")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..conformance import suite  # torch, and all that emulates
    from ..conformance.grammar import CASES, OPERATIONS

    known = {operation.name for operation in OPERATIONS}
    if unknown := set(options.operation or ()) - known:
        raise OfflineError(f"--operation is {min(unknown)!r}, must be one of {', '.join(sorted(known))}")
    cases = [case for case in CASES if not options.operation or case.operation.name in options.operation]
    if options.output:
        new_folder("--output", options.output)
    console, start = new_console(), time.monotonic()
    found = []
    for each in suite.run(options.limit, cases):
        found.append(each)
        if each.verdict == "wrong":
            console.print(f"{each.case.name}, {each.variant}, {each.level}: {each.text}", markup=False, highlight=False)
    text = suite.page(found, time.monotonic() - start)
    console.print(text, markup=False, highlight=False)
    if options.output:
        with writing_to("--output", options.output):
            (options.output / "conformance.md").write_text(text)
            for name, report in suite.reports(found):
                (options.output / f"{name}.md").write_text(report)
    return 1 if any(each.verdict == "wrong" and not each.faults for each in found) else 0
