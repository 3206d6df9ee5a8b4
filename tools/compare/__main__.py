"""`hatch run compare`: ours, liger's kernels for Ascend, the floor and what was published, in one table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from npu_offline.timing import constants
from npu_offline.toolchain import compilers as toolchains
from rich.console import Console
from rich.progress import track
from rich.table import Table

from . import cases, depth, fla, page, peers, tables, widths
from .points import POINTS
from .predicted import key_of, predictions
from .published import SOC, Operator
from .results import GOALS, Result, results


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("--operator", action="append", choices=get_args(Operator), help="one of these (all)")
    version = "compiler version (%(default)s)"
    parser.add_argument("--toolchain", default=toolchains.DEFAULT, choices=toolchains.VERSIONS, help=version)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    about = "attn_res of 4096 and 7168 columns, stacked and as a list, beside liger's and fla's kernels, and nothing else"
    parser.add_argument("--depths", action="store_true", help=about)
    pages = "the calls with TEXT of the tables of RECORDS.md, with all compilers, and nothing else"
    parser.add_argument("--tables", nargs="?", const="", metavar="TEXT", help=pages)
    over_widths = "rms_norm over widths: the table of its page, and nothing else"
    parser.add_argument("--widths", action="store_true", help=over_widths)
    published = (
        "published times of other projects' kernels whose source and kernel have TEXT, and nothing else; writes their page"
    )
    parser.add_argument("--points", nargs="?", const="", metavar="TEXT", help=published)
    options = parser.parse_args(arguments)
    console = Console() if Console().is_terminal else Console(width=180)
    if options.depths:
        return _depths(console, options.toolchain, options.json)
    if options.tables is not None:
        found_tables = track(tables.predictions(toolchains.VERSIONS, options.tables), "predicting", console=console)
        console.print(tables.table(list(found_tables)))
        return 0
    if options.widths:
        print(widths.table(options.toolchain))
        return 0
    if options.points is not None:
        return _points(console, options.points)
    found = list(track(results(options.operator, options.toolchain), "predicting", console=console, transient=True))
    console.print(table(found))
    console.print(f"Predicted for {SOC} with toolchain {options.toolchain}, not measured. Published times include the host.")
    hint = peers.missing()
    if hint:
        console.print(f"Without liger's kernels: {hint}", markup=False)
    for result in found:
        if result.problem:
            console.print(f"{_label(result)}: {result.problem}", markup=False)
    for result in missed(found):
        goal = GOALS[result.row.operator]
        limits = ", ".join(f"{timing.kernel}: {timing.limited_by}" for timing in result.timings)
        text = f"{_label(result)}: {result.above_floor:.2f} times the floor, goal {goal} (busiest pipe of {limits})"
        console.print(text, markup=False)
    if options.json:
        options.json.write_text(json.dumps([as_json(result) for result in found], indent=1))
    return 0


def _points(console: Console, wanted: str) -> int:
    kept = {each.key: each for each in page.load()} if page.RESULTS.is_file() else {}
    for each in track(predictions(wanted), "predicting", total=len(POINTS), console=console, transient=True):
        console.print(f"{each.source} {each.kernel} {each.arguments}: {each.problem or f'{each.ratio:.2f}'}", markup=False)
        kept[each.key] = each
    ordered = [kept[key] for key in map(key_of, POINTS) if key in kept]
    page.RESULTS.write_text(json.dumps([dataclasses.asdict(each) for each in ordered], indent=1) + "\n")
    page.PAGE.write_text(page.rendered(page.load()))
    return 0


def _depths(console: Console, toolchain: str, path: Path | None) -> int:
    found = list(track(depth.depths(toolchain), "predicting", console=console, transient=True))
    console.print(depth.table(found))
    console.print(
        f"Predicted for {SOC} with toolchain {toolchain}, not measured; peers' copies of a list into one tensor not counted."
    )
    for peer, hint in (("liger's", peers.missing()), ("fla's", fla.missing())):
        if hint:
            console.print(f"Without {peer} kernels: {hint}", markup=False)
    for one in found:
        if one.problem:
            console.print(f"{one.width} {one.direction}, {one.whose}: {one.problem}", markup=False)
    if path:
        path.write_text(json.dumps([dataclasses.asdict(one) for one in found], indent=1))
    return 0


def missed(found: Sequence[Result]) -> list[Result]:
    """Our results above their operator's goal."""
    return [
        result
        for result in found
        if result.whose == "ours" and result.timings and result.above_floor > GOALS[result.row.operator]
    ]


def _label(result: Result) -> str:
    return f"{result.row.operator} {result.row.size} {result.row.direction}, {result.whose}"


_COLUMNS = (
    "operator",
    "size",
    "pass",
    "whose",
    "UB KiB",
    "MB moved",
    "scalar accesses",
    "flag waits",
    "bound µs",
    "predicted µs",
    "kernels / floor",
    "published µs",
    "predicted / published",
    "PyTorch µs",
)


def table(found: Sequence[Result]) -> Table:
    """One line for each prediction. Scalar accesses and waits are one core's; UB is the largest kernel's."""
    lines = Table(*_COLUMNS)
    for result in found:
        lines.add_row(*_cells(result))
    return lines


def _cells(result: Result) -> list[str]:
    row, timings = result.row, result.timings
    cells = [row.operator, str(row.size), row.direction, result.whose]
    if not timings:
        return [*cells, *["-"] * 7, _microseconds(row.existing), "-", _microseconds(row.pytorch)]
    return [
        *cells,
        f"{max(timing.ub_bytes for timing in timings) / 1024:.0f}",
        f"{result.times * sum(timing.moved for timing in timings) / 1e6:.1f}",
        str(result.times * sum(timing.scalar_accesses for timing in timings)),
        str(result.times * sum(timing.waits for timing in timings)),
        _microseconds(result.bound),
        _microseconds(result.predicted),
        f"{result.above_floor:.2f}",
        _microseconds(row.existing),
        f"{result.predicted / row.existing:.2f}" if result.whose == "liger" else "",
        _microseconds(row.pytorch),
    ]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def as_json(result: Result) -> dict[str, object]:
    """A result as the JSON file has it, in seconds and bytes."""
    row = result.row
    return {
        "operator": row.operator,
        "size": row.size,
        "direction": row.direction,
        "whose": result.whose,
        "kernels": [timing.kernel for timing in result.timings],
        "ub_bytes": max((timing.ub_bytes for timing in result.timings), default=None),
        "fewest": cases.fewest_bytes(row),
        "moved": result.times * sum(timing.moved for timing in result.timings),
        "scalar_accesses": result.times * sum(timing.scalar_accesses for timing in result.timings),
        "waits": result.times * sum(timing.waits for timing in result.timings),
        "bound": result.bound,
        "predicted": result.predicted if result.timings else None,
        "kernels_over_floor": result.above_floor if result.timings else None,
        "range_over_floor": [at.value * result.above_floor for at in (constants.RANGE_LOW, constants.RANGE_HIGH)],
        "floor": row.floor,
        "published": row.existing,
        "pytorch": row.pytorch,
        "problem": result.problem,
    }


if __name__ == "__main__":
    sys.exit(main())
