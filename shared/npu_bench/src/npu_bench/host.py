"""What small calls cost on the host, in microseconds and launches: every operator beside its peers, in one run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .declaration import Benchmark, Case, Sweep
from .devices import Device
from .environment import Environment
from .launches import count_launches, empty_function, one_operator, returning_at_once
from .modes import timed_call
from .runner import Row, check_case, make_inputs
from .tables import Table, markdown, number
from .timing import Quantiles, host_times

MODES = ("forward", "full")
_HEADERS = (
    "call",
    "provider",
    "result",
    "forward us (20-80 %)",
    "launches",
    "of one operator",
    "forward and backward us (20-80 %)",
    "launches",
    "of one operator",
    "ours over it",
)
_LABELS = 3
_NOTES = """\
- us: the host's clock around one call, caches warm, without waiting for the device, providers in turns; median and
  20th-80th percentile. Gradients are of every input that takes one; forward: with gradients enabled.
- launches: kernels, copies and fills that one call puts into the device's queue.
- of one operator: over the {operator} us ({low}-{high}) of torch.mm on two 16 x 16 matrices.
- {empty} us ({empty_low}-{empty_high}): an autograd function written in Python that computes nothing, forward and backward.
- ours over it: our time forward and backward over the provider's; below 1 ours is shorter.
"""


@dataclass(frozen=True)
class HostRun:
    """The rows of one operator's small calls, and two times to hold them against, of the same run.

    Attributes:
        operator_us: one operator of PyTorch.
        empty_us: an autograd function written in Python that computes nothing, forward and backward.
    """

    benchmark: str
    ours: str
    sweep: Sweep
    environment: Environment
    operator_us: Quantiles
    empty_us: Quantiles
    rows: Sequence[Row]


def host_run(
    benchmark: Benchmark,
    device: Device,
    environment: Environment,
    *,
    providers: Sequence[str],
    budget_s: float,
    progress: Callable[[str], None],
) -> HostRun:
    """Measure the `host_cases` of a benchmark.

    Args:
        benchmark: what was declared.
        device: where.
        environment: what the records state.
        providers: which of those declared.
        budget_s: seconds for each provider and mode; at least ten samples are taken whatever they cost.
        progress: told before each case what comes.
    """
    sweep = Sweep("host", "small calls", benchmark.host_cases)
    with returning_at_once(device):
        yardsticks = {"mm": one_operator(device.torch_device), "empty": empty_function(device.torch_device)}
        times = host_times(yardsticks, device, budget_s)
    rows: list[Row] = []
    for case in sweep.cases:
        progress(f"{benchmark.name} {case.name}")
        rows += _run_case(benchmark, device, case, providers, budget_s)
        gc.collect()
    return HostRun(benchmark.name, benchmark.ours, sweep, environment, times["mm"], times["empty"], rows)


def _run_case(benchmark: Benchmark, device: Device, case: Case, providers: Sequence[str], budget_s: float) -> list[Row]:
    inputs = make_inputs(benchmark, case, device.torch_device)
    subject = check_case(benchmark, device, case, inputs, providers)
    rows = []
    with returning_at_once(device), torch.enable_grad():
        for mode in MODES:
            calls = {name: timed_call(mode, forward, inputs, subject.seeds) for name, forward in subject.forwards.items()}
            times = host_times(calls, device, budget_s)
            for name in providers:
                verdict = subject.verdicts[name]
                if name in calls:
                    launches = count_launches(calls[name], device)
                    rows.append(Row(case, mode, name, verdict, True, host_us=times[name], launches=launches))
                else:
                    rows.append(Row(case, mode, name, verdict))
    return rows


def host_table(runs: Sequence[HostRun]) -> Table:
    """One table of several operators' runs; providers that are unavailable for all of an operator's cases are left out."""
    rows = []
    for run in runs:
        for case in run.sweep.cases:
            mine = [row for row in run.rows if row.case is case]
            for name in dict.fromkeys(row.provider for row in mine):
                forward, full = (next(r for r in mine if (r.provider, r.mode) == (name, mode)) for mode in MODES)
                if forward.verdict.startswith("unavailable"):
                    continue
                cells = [f"{run.benchmark} {case.name}", name, forward.verdict]
                for row in (forward, full):
                    cells += [_with_spread(row.host_us), _count(row.launches), _ratio(row.host_us, run.operator_us)]
                ours = next((r.host_us for r in mine if (r.provider, r.mode) == (run.ours, "full")), None)
                rows.append([*cells, _ratio(ours, full.host_us)])
    return Table("host time and launches of a call", _HEADERS, rows, _LABELS)


def host_notes(runs: Sequence[HostRun]) -> str:
    """What the columns mean, and which providers could not run."""
    operator, empty = runs[0].operator_us, runs[0].empty_us
    numbers = {"operator": number(operator.p50), "low": number(operator.p20), "high": number(operator.p80)}
    numbers |= {"empty": number(empty.p50), "empty_low": number(empty.p20), "empty_high": number(empty.p80)}
    absent = dict.fromkeys(
        f"- not run: {run.benchmark}'s {row.provider}, {row.verdict}.\n"
        for run in runs
        for row in run.rows
        if row.verdict.startswith("unavailable")
    )
    return _NOTES.format(**numbers) + "".join(absent)


def host_document(runs: Sequence[HostRun]) -> str:
    """The runs in Markdown."""
    return f"{host_header(runs)}.\n\n{markdown(host_table(runs))}\n{host_notes(runs)}"


def host_header(runs: Sequence[HostRun]) -> str:
    """What the numbers were measured with: the software of all, each named once."""
    software = {name: version for run in runs for name, version in run.environment.software.items()}
    first = runs[0].environment
    return str(Environment(first.device, first.version, software, first.command, first.timestamp))


def _with_spread(time: Quantiles | None) -> str:
    return "-" if time is None else f"{number(time.p50)} ({number(time.p20)}-{number(time.p80)})"


def _count(launches: Quantiles | None) -> str:
    return "-" if launches is None else f"{launches.p50:g}"


def _ratio(time: Quantiles | None, other: Quantiles | None) -> str:
    return "-" if time is None or other is None else f"{time.p50 / other.p50:.2f}"
