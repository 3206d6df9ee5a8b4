"""`npu-offline run`: every program of a kernel on CPU tensors, with its results, its races and the bytes that it moves."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from .. import check
from ..errors import OfflineError
from ..launches import Launch, Ledger, Traffic
from ..toolchain import compilers as toolchains
from .options import add_limit, add_target, soc_name
from .output import new_console, new_folder, print_finding, write_json, writing_to
from .script import run_script

if TYPE_CHECKING:
    from ..check.culprit import Verdict
    from ..check.run_calls import Outcome
    from . import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Add `run` to the command line."""
    parser = commands.add_parser("run", help="run a kernel on CPU tensors: results, races between programs, bytes moved")
    add_target(parser, or_script=True)
    parser.add_argument("--soc", default="Ascend910B4", type=soc_name, metavar="NAME", help="(%(default)s)")
    parser.add_argument("--toolchain", action="append", choices=toolchains.VERSIONS, help="whose final modules run (all)")
    parser.add_argument("--linalg-only", action="store_true", help="no final modules: the Linalg IR alone")
    parser.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="NAME=EXPRESSION",
        help="what PyTorch computes from the arguments: 'y=x.softmax(-1)'; or a file, as of a run on a GPU: y=y.npy",
    )
    parser.add_argument("--rtol", type=float, help="relative tolerance (torch.testing's, by dtype)")
    parser.add_argument("--atol", type=float, help="absolute tolerance (torch.testing's, of the largest element)")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FOLDER",
        help="write pictures of the Unified Buffer over time there: a page, and a PNG file for each launch",
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="of a program, write the first launch of each kernel and tile: a TARGET"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write verdicts and what each level computed there too")
    add_limit(parser)
    parser.set_defaults(run=_run, script=[])


def _run(options: argparse.Namespace) -> int:
    if options.script:
        return run_script(options)
    if options.target is None:
        raise OfflineError("TARGET is missing: FILE::KERNEL, a FILE with calls(), a folder, or -- python FILE ...")
    if options.record:
        raise OfflineError("--record is for a program: npu-offline run --record FILE -- python FILE ...")
    from ..check import kernel_file, run_calls
    from ..check.calls import launches_of, ttir_of
    from ..check.culprit import judged
    from ..check.execution import LINALG, MEANING

    console = new_console()
    if "::" in str(options.target) or kernel_file.is_recording(str(options.target)):
        launches = kernel_file.parse(str(options.target), options.given, options.grid)
        runs = [(call.label, run_calls.compared(call, options.expect, options.rtol, options.atol)) for call in launches]
        if options.grid is None and not kernel_file.is_recording(str(options.target)):
            console.print("--grid is 1: the kernel does not ask which program it is", markup=False)
    elif options.expect:
        raise OfflineError("--expect is for FILE::KERNEL; in calls() compare the results yourself")
    else:
        calls = check.load_calls(options.target, given=options.given, grid=options.grid)
        runs = [(label, {"": function}) for label, function in calls]
    versions = [] if options.linalg_only else options.toolchain or list(toolchains.VERSIONS)
    versions = [version for version in versions if toolchains.supported(options.soc, version)]
    if toolchains.is_a5(options.soc):
        versions = []  # final modules of its vector functions cannot be run here
    asked = {LINALG} if options.linalg_only else set(options.toolchain or (LINALG, *versions))
    written: list[dict[str, object]] = []
    found: list[Verdict] = []
    options.endless = False
    good, unrun = True, [f"final modules, {version}" for version in sorted(asked - {LINALG, *versions})]
    for label, functions in runs:
        console.print(label, markup=False, highlight=False)
        outcomes = list(run_calls.run_levels(label, functions, options.soc, (MEANING, LINALG, *versions)))
        console.print(_levels(outcomes))
        options.endless |= any(outcome.endless for outcome in outcomes)
        if outcomes[1].launches:
            console.print(_bytes(outcomes[1].launches))
        call = (label, next(iter(functions.values())))
        records = functools.cache(functools.partial(launches_of, [call], options.soc, {}))
        verdicts = list(judged(label, functions, outcomes, records, options.soc, expected=bool(options.expect)))
        found += verdicts
        for verdict in verdicts:
            if verdict.culprit or verdict.refused:
                print_finding(console, str(verdict), ttir_of(records()), str(options.target).partition("::")[0])
            else:
                console.print(str(verdict), markup=False)
            good = good and not verdict.culprit
        written.append(
            {"call": label, "verdicts": list(map(dataclasses.asdict, verdicts)), "levels": list(map(_as_json, outcomes))}
        )
        good = good and (all(outcome.ok for outcome in outcomes) or any(verdict.is_right for verdict in verdicts))
        untold = [outcome for outcome in outcomes if outcome.refused and outcome.level in asked]
        unrun += [label] if verdicts[0].refused else [f"{label}, {_level(outcome)}" for outcome in untold]
    options.verdict = "; ".join(dict.fromkeys(verdict.short for verdict in found))
    if options.json:
        write_json("--json", options.json, {"calls": written, "unrun": unrun})
    if options.picture:
        for path in _draw(options.picture, [(label, each[""]) for label, each in runs], options.soc, versions):
            console.print(path, markup=False)
    if not options.expect and options.given:
        console.print("results were compared with nothing: --expect 'NAME=EXPRESSION'", markup=False)
    if toolchains.is_a5(options.soc):
        console.print(f"final modules: not run: the emulation has no vector functions of {options.soc}", markup=False)
    for each in unrun:
        console.print(f"not run: {each}", markup=False)
    return 1 if not good else 2 if unrun else 0


def _draw(
    folder: Path, calls: Sequence[tuple[str, Callable[[], object]]], soc: str, versions: Sequence[str]
) -> Iterator[Path]:
    """Write the pictures of all launches of final modules."""
    from ..check.run_calls import run_with_accesses
    from ..reporting import buffers

    new_folder("--picture", folder)
    pictures = []
    for label, function in calls:
        for version in versions:
            for number, launch in enumerate(run_with_accesses(function, soc, version)):
                name = re.sub(r"\W+", "_", f"{label} {number} {launch.kernel}") + f"-{version}.png"
                with writing_to("--picture", folder):
                    buffers.save(launch, folder / name)
                yield folder / name
                pictures.append((f"{label}: {launch.kernel}, final module of {version}", launch))
    with writing_to("--picture", folder):
        (folder / "index.html").write_text(buffers.page(pictures))
    yield folder / "index.html"


def _as_json(outcome: Outcome) -> dict[str, object]:
    """A level and what it computed."""
    return {
        "level": _level(outcome),
        "ok": outcome.ok,
        "refused": outcome.refused,
        "problem": outcome.problem,
        "differences": [dataclasses.asdict(each) for each in outcome.differences],
        "traffic": [{"kernel": launch.kernel, "arguments": _traffic(launch)} for launch in outcome.launches],
    }


def _traffic(launch: Launch) -> dict[str, object]:
    return {name: dataclasses.asdict(traffic) for name, traffic in launch.arguments.items()}


def _level(outcome: Outcome) -> str:
    from ..check.execution import LINALG, MEANING

    return {MEANING: "TTIR, as Triton means it", LINALG: "Linalg IR"}.get(outcome.level, f"final module, {outcome.level}")


def _levels(found: Sequence[Outcome]) -> Table:
    table = Table("what ran", "programs", "largest error", "verdict")
    said = ""
    for outcome in found:
        programs = sum(launch.grid[0] * launch.grid[1] * launch.grid[2] for launch in outcome.launches)
        errors = "\n".join(f"{each.name} {each.error:.2g}" for each in outcome.differences)
        verdict = _verdict(outcome)
        repeated = "\n" in verdict and verdict == said
        table.add_row(_level(outcome), str(programs or ""), errors, "as above" if repeated else verdict)
        said = verdict
    return table


def _verdict(outcome: Outcome) -> str:
    from rich.markup import escape

    numbers = outcome.numbers and f"{outcome.numbers}: "
    if outcome.refused:
        return f"[yellow]not run: {escape(numbers + outcome.problem)}[/yellow]"
    if outcome.problem:
        return f"[red]{escape(numbers + outcome.problem)}[/red]"
    wrong = [each for each in outcome.differences if each.wrong]
    if wrong:
        lines = (f"{numbers}{each.wrong} of {each.of} elements of {each.name} are wrong: {each.first}" for each in wrong)
        return f"[red]{escape(chr(10).join(lines))}[/red]"
    rounded = ", ".join(each.name for each in outcome.differences if each.rounded)
    return f"as expected, but for roundings of {rounded}" if rounded else "as expected" if outcome.differences else "ran"


def _bytes(launches: Sequence[Launch]) -> Table:
    title = "global memory, from Linalg IR: bytes moved, and distinct bytes"
    table = Table("kernel", "argument", "read", "distinct", "written", "distinct", "transfers", "scalars", title=title)
    total: dict[tuple[str, str], tuple[Traffic, list[Ledger]]] = {}
    for launch in launches:
        for name, traffic in launch.arguments.items():
            moved, ledgers = total.get((launch.kernel, name), (Traffic(), []))
            total[launch.kernel, name] = (moved + traffic, [*ledgers, launch.ledgers[name]])
    for (kernel, name), (moved, ledgers) in total.items():
        read, written = sum(each.useful_read for each in ledgers), sum(each.useful_written for each in ledgers)
        table.add_row(
            kernel, name, *(f"{n:,}" for n in (moved.read, read, moved.written, written, moved.transfers, moved.scalars))
        )
    return table
