"""The command line: `npu-bench NAME`, and `npu-bench host`, `stages`, `show`, `compare` and `export`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from . import scripts
from .brief import brief_document
from .compare import compare
from .declaration import MODES, Benchmark, choose
from .devices import default_kind, open_device
from .environment import describe, why_not_repeatable
from .errors import BenchError, UnavailableError
from .export import export
from .history import recorded_run
from .host import host_document, host_header, host_notes, host_run, host_table
from .plots import plot, require_matplotlib
from .progress import progress_bar
from .records import append, records_of
from .report import document, header, notes, tables_of
from .runner import LEFT_OUT, NO_GRADIENT, Run, run, steps
from .stages import stage_table
from .tables import Table, markdown, show
from .traffic import measure_traffic, small_cases, traffic_table

KINDS = ("cuda", "npu", "emulated", "cpu")
_TIMED = [kind for kind in KINDS if kind != "emulated"]
_DEFAULT_SOC = "Ascend910B4"
_DEFAULT_BUDGET = 0.3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 where a provider of ours was wrong or failed, 2 for a bad request."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"compare": _compare, "export": _export, "host": _host, "show": _show, "stages": _stages}
    try:
        if arguments[:1] and arguments[0] in commands:
            return commands[arguments[0]](arguments)
        return _bench(arguments)
    except BenchError as error:
        print(f"npu-bench: {error}", file=sys.stderr)
        return 2


def _bench(arguments: Sequence[str]) -> int:
    parser = _parser("npu-bench", "Measure an operator beside its peers. Also: host, stages, show, compare, export.")
    parser.add_argument("benchmark", help="an operator of packages/, or the path of a benchmark script")
    parser.add_argument("--device", choices=KINDS, help="the accelerator that is here, else cpu, unless given")
    _choices_and_outputs(parser)
    parser.add_argument("--budget", type=_seconds, metavar="S", help=f"seconds a measurement ({_DEFAULT_BUDGET})")
    parser.add_argument("--case-seconds", type=_seconds, metavar="S", help="begin no provider or mode of a case later")
    parser.add_argument(
        "--launches", action="store_const", const=True, help="count what a call puts into the device's queue"
    )
    parser.add_argument("--soc", help=f"the chip of --device emulated ({_DEFAULT_SOC})")
    _records(parser)
    options = parser.parse_args(arguments)
    script = scripts.find(options.benchmark, Path.cwd())
    benchmark = scripts.load(script)
    if options.device == "emulated":
        return _emulated(benchmark, script, options, arguments)
    if options.soc is not None:
        raise BenchError("--soc is for --device emulated: other devices are the chips they are.")
    _require_repeatable(options, script)
    if options.plot:
        require_matplotlib()
    sweep = benchmark.select(options.sweep, options.cases)
    modes = benchmark.select_modes(options.modes)
    providers = choose("providers", options.providers, list(benchmark.providers))
    device = open_device(options.device or default_kind())
    environment = describe(device.name, benchmark.distribution, script, benchmark.peers, arguments, options.label)
    with progress_bar(steps(sweep, modes, launches=bool(options.launches))) as progress:
        result = run(
            *(benchmark, device, environment, sweep),
            modes=modes,
            providers=providers,
            budget_s=options.budget or _DEFAULT_BUDGET,
            case_s=options.case_seconds or math.inf,
            launches=bool(options.launches),
            progress=progress,
        )
    if options.json:
        append(options.json, records_of(result))
    _report(result, options)
    ours = (row for row in result.rows if row.provider == benchmark.ours and row.verdict not in (LEFT_OUT, NO_GRADIENT))
    return int(any(not row.right for row in ours))


def _show(arguments: Sequence[str]) -> int:
    parser = _parser("npu-bench show", "Tables and plots of what a history has, without a device.")
    parser.add_argument("benchmark", help="an operator of packages/, or the path of a benchmark script")
    parser.add_argument("history", help="FILE (its latest version) or FILE@VERSION")
    _choices_and_outputs(parser)
    options = parser.parse_args(arguments[1:])
    benchmark = scripts.load(scripts.find(options.benchmark, Path.cwd()))
    sweep = benchmark.select(options.sweep, options.cases)
    modes = choose("modes", options.modes, MODES)
    providers = choose("providers", options.providers, list(benchmark.providers))
    _report(recorded_run(benchmark, options.history, sweep, modes, providers), options)
    return 0


def _report(result: Run, options: argparse.Namespace) -> None:
    print(header(result))
    for table in tables_of(result):
        show(table)
    print(notes(result), end="")
    if options.markdown:
        _write(options.markdown, document(result))
    if options.brief:
        _write(options.brief, brief_document(result))
    if options.plot:
        plot(result, options.plot)


def _choices_and_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sweep", help="a sweep of the benchmark (tokens, hidden, ...) instead of its named cases")
    for option in ("cases", "modes", "providers"):
        parser.add_argument(f"--{option}", type=_names, metavar="A,B", help="only these")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables in Markdown")
    parser.add_argument("--brief", type=Path, metavar="FILE", help="write a table of times with a row a case, in Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write time, rate and memory as a picture")


def _emulated(benchmark: Benchmark, script: Path, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    for option in ("json", "brief", "plot", "budget", "case_seconds", "label", "launches"):
        if getattr(options, option) is not None:
            name = option.replace("_", "-")
            raise BenchError(f"--{name} is about times and records of times, which an emulation does not give.")
    soc = options.soc or _DEFAULT_SOC
    sweep = benchmark.select(options.sweep, options.cases)
    left_out: list[str] = []
    if options.cases is None:
        sweep, left_out = small_cases(benchmark, sweep)
    modes = benchmark.select_modes(options.modes)
    if "graph" in modes:
        raise BenchError("modes has graph, which is about times, and an emulation gives none.")
    providers = choose("providers", options.providers or [benchmark.ours], list(benchmark.providers))
    with progress_bar(len(sweep.cases)) as progress:
        rows = measure_traffic(benchmark, soc, sweep, modes=modes, providers=providers, progress=progress)
    table = traffic_table(benchmark.name, soc, rows)
    show(table)
    note = f"Too large to emulate unasked, run with --cases: {', '.join(left_out)}.\n" if left_out else ""
    print(note, end="")
    if options.markdown:
        environment = describe(f"emulated {soc}", benchmark.distribution, script, (), arguments, None)
        _write(options.markdown, f"{environment}.\n\n{markdown(table)}\n{note}")
    return int(any(row.verdict.startswith("WRONG") for row in rows))


def _host(arguments: Sequence[str]) -> int:
    parser = _parser("npu-bench host", "Microseconds of the host and launches of a small call, beside the peers'.")
    parser.add_argument("benchmarks", nargs="*", metavar="benchmark", help="operators, or scripts' paths; all unless given")
    parser.add_argument("--device", choices=_TIMED, help="the accelerator that is here, else cpu, unless given")
    parser.add_argument("--providers", type=_names, metavar="A,B", help="only these, of each benchmark that has them")
    parser.add_argument("--budget", type=_seconds, metavar="S", default=_DEFAULT_BUDGET, help="seconds a measurement")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table in Markdown")
    _records(parser)
    options = parser.parse_args(arguments[1:])
    found = [scripts.find(name, Path.cwd()) for name in options.benchmarks or scripts.names(Path.cwd())]
    benchmarks = [(script, scripts.load(script)) for script in found]
    known = dict.fromkeys(name for _, benchmark in benchmarks for name in benchmark.providers)
    providers = choose("providers", options.providers, list(known))
    for script, benchmark in benchmarks:
        _require_repeatable(options, script)
        if not benchmark.host_cases:
            raise BenchError(f"benchmark {benchmark.name} declares no host_cases.")
    device = open_device(options.device or default_kind())
    runs = []
    with progress_bar(sum(len(benchmark.host_cases) for _, benchmark in benchmarks)) as progress:
        for script, benchmark in benchmarks:
            software = (device.name, benchmark.distribution, script, benchmark.peers, arguments, options.label)
            wanted = [name for name in benchmark.providers if name in providers]
            measured = host_run(
                *(benchmark, device, describe(*software)), providers=wanted, budget_s=options.budget, progress=progress
            )
            runs.append(measured)
    if options.json:
        append(options.json, [record for one in runs for record in records_of(one)])
    print(host_header(runs))
    show(host_table(runs))
    print(host_notes(runs), end="")
    if options.markdown:
        _write(options.markdown, host_document(runs))
    return int(any(row.provider == one.ours and not row.right for one in runs for row in one.rows))


def _stages(arguments: Sequence[str]) -> int:
    parser = _parser("npu-bench stages", "Where the host's time of one call goes.")
    parser.add_argument("benchmark", help="an operator of packages/, or the path of a benchmark script")
    parser.add_argument("--device", choices=_TIMED)
    parser.add_argument("--budget", type=_seconds, metavar="S", default=_DEFAULT_BUDGET, help="seconds for each stage")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table in Markdown")
    options = parser.parse_args(arguments[1:])
    script = scripts.find(options.benchmark, Path.cwd())
    benchmark = scripts.load(script)
    if benchmark.host_stages is None:
        raise BenchError(f"benchmark {benchmark.name} declares no host stages.")
    device = open_device(options.device or default_kind())
    environment = describe(device.name, benchmark.distribution, script, (), arguments, None)
    try:
        stages = benchmark.host_stages(device.torch_device)
    except UnavailableError as error:
        raise BenchError(f"host stages of {benchmark.name}: {error}") from None
    table = stage_table(f"{benchmark.name}: host time of one call", stages, device, options.budget)
    print(environment)
    show(table)
    if options.markdown:
        _write(options.markdown, f"{environment}.\n\n{markdown(table)}")
    return 0


def _records(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--label", help="appended to the version in records, to tell states of a working tree apart")
    parser.add_argument("--json", type=Path, metavar="FILE", help="history of records to append to")
    parser.add_argument("--allow-dirty", action="store_true", help="write records that no commit can be repeated from")


def _require_repeatable(options: argparse.Namespace, script: Path) -> None:
    if options.json and not options.allow_dirty and (reason := why_not_repeatable(script)):
        raise BenchError(
            f"--json {options.json}: {reason}, so nobody could repeat what is recorded: commit, or --allow-dirty."
        )


def _compare(arguments: Sequence[str]) -> int:
    parser = _parser("npu-bench compare", "Two versions side by side.")
    parser.add_argument("before", help="FILE (its latest version) or FILE@VERSION")
    parser.add_argument("after", help="likewise")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table in Markdown")
    options = parser.parse_args(arguments[1:])
    table: Table = compare(options.before, options.after)
    show(table)
    if options.markdown:
        _write(options.markdown, markdown(table))
    return 0


def _export(arguments: Sequence[str]) -> int:
    parser = _parser("npu-bench export", "A version of a history as the CSV file that Liger-Kernel's visualizer draws.")
    parser.add_argument("history", help="FILE (its latest version) or FILE@VERSION")
    parser.add_argument("csv", type=Path, help="the file to write")
    parser.add_argument("--sweep", metavar="X", help="the x axis (tokens, hidden, ...), where the history has several")
    options = parser.parse_args(arguments[1:])
    written = export(options.history, options.csv, options.sweep)
    print(f"{written} points in {options.csv}")
    return 0


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(name, description=description, allow_abbrev=False)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text} and must be above 0")
    return value


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
