"""`npu-offline tune`: compares the tiles of a package with other tiles, by predicted time."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..errors import OfflineError
from .options import add_what_to_time, assumptions, calls_of, where_of
from .output import new_console, progress, write_json

if TYPE_CHECKING:
    from ..tune.search import Candidate, Tuned
    from . import Subparsers

MARGIN = 0.05  # a choice may be slower than the best candidate by this share

_NOTHING = """nothing can be tuned: no kernel of these calls asks npu_tiling.fit for its sizes. Have sized_calls() list them:
    yield "1024 rows", lambda BLOCK: my_operator(x, BLOCK), {"BLOCK": (1024, 512, 2048)}  # the first is what you use now"""


_BEST = 3  # candidates that are shown


def add_parser(commands: Subparsers) -> None:
    """Add `tune` to the command line."""
    parser = commands.add_parser("tune", help="rank other tiles than a package's tiling chose by predicted time")
    add_what_to_time(parser)
    parser.add_argument("--kernel", default="", metavar="TEXT", help="only kernels whose name has this text")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilations at a time (all cores)")
    parser.add_argument("--all", action="store_true", help="every candidate, not only the best three")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the candidates there too")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from ..tune.search import search

    console = new_console()
    calls = calls_of(options, "sized_calls")
    found: list[Tuned] = []
    for call in progress(calls, "searching", len(calls), console):
        found += search(*call, **where_of(options), jobs=options.jobs, kernel=options.kernel)
    if not found:
        raise OfflineError(_NOTHING)
    console.print(_table(found, assumptions(options), everything=options.all))
    slow = [tuned for tuned in found if tuned.best is not None and tuned.best.gain > MARGIN]
    for tuned in found:
        console.print(_verdict(tuned), markup=False)
        for sizes, problem in _untimed(tuned):
            console.print(f"{tuned.label}: {sizes}: not timed: {problem}", markup=False)
    left = 0 if options.all else sum(max(0, len(tuned.candidates) - _BEST) for tuned in found)
    if left:
        console.print(f"{left} more candidates: --all", markup=False)
    if options.json:
        write_json("--json", options.json, [_as_json(tuned) for tuned in found])
    return 1 if slow else 2 if any(not _is_timed(tuned) for tuned in found) else 0


def _is_timed(tuned: Tuned) -> bool:
    """Whether anything could be timed: the sizes in use, or others."""
    return not all(candidate.seconds is None and isinf(candidate.chosen) for candidate in tuned.candidates)


def _untimed(tuned: Tuned) -> Iterator[tuple[str, str]]:
    """Sizes that could not be timed, and why; once for all sizes of which the same is said."""
    alike: dict[str, list[str]] = {}
    for candidate in tuned.candidates:
        if candidate.seconds is None:
            alike.setdefault(candidate.problem.partition("\n")[0], []).append(_sizes(candidate.sizes))
    for problem, sizes in alike.items():
        yield ", ".join(sizes), problem


def _verdict(tuned: Tuned) -> str:
    chosen, best = _sizes(dict(tuned.site.chosen)), tuned.best
    if not _is_timed(tuned):
        return f"{tuned.label}: nothing could be timed"
    if best is None:
        return f"{tuned.label}: no candidate is faster than {chosen} (in use)"
    if isinf(best.chosen):
        reason = best.chosen_problem.partition("\n")[0]
        return f"{tuned.label}: {_sizes(best.sizes)} is the fastest that can be timed; {chosen} (in use): {reason}"
    return f"{tuned.label}: {_sizes(best.sizes)} takes {best.gain:.0%} less time than {chosen} (in use)"


def _table(found: Sequence[Tuned], title: str, *, everything: bool) -> Table:
    table = Table("call", "chosen", "candidate", "kernels", "chosen µs", "candidate µs", "gain", title=title)
    for tuned in found:
        for candidate in tuned.candidates if everything else tuned.candidates[:_BEST]:
            table.add_row(tuned.label, _sizes(dict(tuned.site.chosen)), *_cells(candidate))
    return table


def _cells(candidate: Candidate) -> list[str]:
    kernels = " ".join(dict.fromkeys(kernel.partition(" ")[0] for kernel in candidate.kernels))
    chosen = "not timed" if isinf(candidate.chosen) else f"{candidate.chosen * 1e6:.1f}"
    if candidate.seconds is None:
        return [_sizes(candidate.sizes), kernels, chosen, "not timed", ""]
    gain = "" if isinf(candidate.chosen) else f"{candidate.gain:+.1%}"
    return [_sizes(candidate.sizes), kernels, chosen, f"{candidate.seconds * 1e6:.1f}", gain]


def _sizes(sizes: Any) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _as_json(tuned: Tuned) -> dict[str, object]:
    candidates = [
        {"sizes": dict(c.sizes), "kernels": c.kernels, "seconds": c.seconds, "problem": c.problem}
        | {"chosen": None if isinf(c.chosen) else c.chosen}
        for c in tuned.candidates
    ]
    return {"call": tuned.label, "chosen": dict(tuned.site.chosen), "candidates": candidates}
