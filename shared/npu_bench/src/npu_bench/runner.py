"""Runs a benchmark: every provider on the same tensors, checked first, then measured in turns."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .ceilings import Ceilings, measure_ceilings
from .checks import Expected, Verdict, default_tolerance, expect, verify
from .declaration import Benchmark, Case, Forward, Sweep
from .devices import Device
from .environment import Environment
from .errors import BenchError, UnavailableError
from .graphs import capture
from .launches import count_launches, counts_launches
from .modes import as_tuple, differentiated, timed_call
from .timing import Quantiles, device_times, host_times, peak_memory, wall_times

SEED = 20
_WITH_GRADIENTS = ("backward", "full", "graph")
LEFT_OUT = "left out: the time for this case was over"
NO_GRADIENT = "unavailable: nothing in this case has a gradient"


@dataclass(frozen=True)
class Row:
    """One provider on one case in one mode.

    Attributes:
        verdict: what the check says, or why there is nothing to check.
        right: it ran and its results match; nothing is measured otherwise.
        device_ms, wall_ms, host_us, memory_mib: the measurements; memory is None where the device does not count.
        floor_ms: the time of the declared bytes or operations at the measured ceiling.
        rate, rate_unit: declared bytes or operations over the device time, whichever bounds the case.
        launches: what one call puts into the device's queue, where it was counted.
    """

    case: Case
    mode: str
    provider: str
    verdict: str
    right: bool = False
    device_ms: Quantiles | None = None
    wall_ms: Quantiles | None = None
    host_us: Quantiles | None = None
    memory_mib: Quantiles | None = None
    floor_ms: float | None = None
    rate: float | None = None
    rate_unit: str = "GB/s"
    launches: Quantiles | None = None


@dataclass(frozen=True)
class Run:
    """All rows of one run, and what they were measured with."""

    benchmark: str
    ours: str
    sweep: Sweep
    environment: Environment
    ceilings: Ceilings
    rows: Sequence[Row]


Measured = tuple[Quantiles, Quantiles, Quantiles, Quantiles | None]  # device, wall and host time, memory


@dataclass(frozen=True)
class Subject:
    """A case's tensors, what is right, the forwards that are, and what to say of each provider."""

    inputs: Mapping[str, Tensor]
    seeds: tuple[Tensor, ...]
    expected: Expected
    tolerance: float
    forwards: Mapping[str, Forward]
    verdicts: dict[str, str]


def run(
    benchmark: Benchmark,
    device: Device,
    environment: Environment,
    sweep: Sweep,
    *,
    modes: Sequence[str],
    providers: Sequence[str],
    budget_s: float,
    case_s: float = math.inf,
    launches: bool = False,
    progress: Callable[[str], None],
) -> Run:
    """Measure.

    Args:
        benchmark: what was declared.
        device: where.
        environment: what the records state.
        sweep: the cases to run, of `benchmark.select`.
        modes, providers: which of those declared.
        budget_s: seconds for each provider, mode and clock; at least ten samples are taken whatever they cost.
        case_s: seconds after which a case begins with no other provider or mode; what is left is not measured, and says so.
        launches: whether to count what a call puts into the device's queue.
        progress: told before each of `steps` steps what comes.

    Raises:
        BenchError: mode "graph" is asked for where there are no graphs, or launches where nobody counts them.
    """
    if launches and not counts_launches(device):
        raise BenchError(f"launches are asked for, and nobody counts them on {device.name}.")
    if "graph" in modes and not device.asynchronous:
        raise BenchError(f"modes has graph, which replays the queue of an accelerator, and the device is {device.name}.")
    progress("ceilings")
    ceilings = measure_ceilings(device, matmul=benchmark.flops is not None)
    rows: list[Row] = []
    for case in sweep.cases:
        progress(f"{case.name}: results")
        try:
            rows += _run_case(benchmark, device, ceilings, case, modes, providers, budget_s, case_s, progress)
        except torch.OutOfMemoryError as error:  # of the reference, which is in a wide dtype: other cases may be smaller
            rows += [Row(case, mode, name, _said(error)) for mode in modes for name in providers]
        gc.collect()
        device.release()
    if launches:
        progress("launches")
        rows = [_with_launches(benchmark, device, row) for row in rows]
    return Run(benchmark.name, benchmark.ours, sweep, environment, ceilings, rows)


def _with_launches(benchmark: Benchmark, device: Device, row: Row) -> Row:
    """The row with its launches, counted when no clock runs any more: the host is slower once a profiler has run."""
    if not row.right or row.mode == "graph":
        return row
    inputs = make_inputs(benchmark, row.case, device.torch_device)
    forward = benchmark.providers[row.provider](row.case, device.torch_device)
    with torch.set_grad_enabled(row.mode != "no-grad-forward"):
        seeds = tuple(torch.ones_like(output) for output in as_tuple(forward(*inputs.values())))
        call = timed_call(row.mode, forward, inputs, seeds)
        call()
        return replace(row, launches=count_launches(call, device))


def steps(sweep: Sweep, modes: Sequence[str], *, launches: bool = False) -> int:
    """How often `run` reports progress."""
    return 1 + len(sweep.cases) * (1 + len(modes)) + launches


def make_inputs(benchmark: Benchmark, case: Case, device: torch.device) -> Mapping[str, Tensor]:
    """The case's tensors, the same in every run."""
    torch.manual_seed(SEED)
    return benchmark.inputs(case, device)


def _run_case(
    benchmark: Benchmark,
    device: Device,
    ceilings: Ceilings,
    case: Case,
    modes: Sequence[str],
    providers: Sequence[str],
    budget_s: float,
    case_s: float,
    progress: Callable[[str], None],
) -> list[Row]:
    ends = time.perf_counter() + case_s
    inputs = make_inputs(benchmark, case, device.torch_device)
    subject = check_case(benchmark, device, case, inputs, providers, ends)
    rows = []
    for mode in modes:
        progress(f"{case.name}: {mode}")
        if time.perf_counter() > ends:
            rows += [Row(case, mode, name, LEFT_OUT) for name in providers]
            continue
        if mode in _WITH_GRADIENTS and not differentiated(inputs):
            rows += [Row(case, mode, name, NO_GRADIENT) for name in providers]
            continue
        verdicts, measured = (
            _measure_graphs(device, subject, budget_s) if mode == "graph" else _measure(device, mode, subject, budget_s)
        )
        for name in providers:
            if name in measured:
                rows.append(measured_row(benchmark, ceilings, case, mode, name, verdicts[name], measured[name]))
            else:
                rows.append(Row(case, mode, name, verdicts[name]))
    return rows


def measured_row(
    benchmark: Benchmark, ceilings: Ceilings, case: Case, mode: str, provider: str, verdict: str, measured: Measured
) -> Row:
    """The row of a right result, with what follows from the declared bytes and operations."""
    bytes_moved, operations = benchmark.bytes_moved(case, mode), benchmark.operations(case, mode)
    by_operations = ceilings.bound_by_operations(bytes_moved, operations)
    device_ms = measured[0].p50
    return Row(
        *(case, mode, provider, verdict, True, *measured),
        floor_ms=ceilings.floor_ms(bytes_moved, operations),
        rate=operations / device_ms / 1e9 if by_operations else bytes_moved / device_ms / 1e6,
        rate_unit="TFLOP/s" if by_operations else "GB/s",
    )


def check_case(
    benchmark: Benchmark,
    device: Device,
    case: Case,
    inputs: Mapping[str, Tensor],
    providers: Sequence[str],
    ends: float = math.inf,
) -> Subject:
    """Every provider's forward, checked; those that `time.perf_counter` leaves no time for are not run."""
    expected, seeds = expect(benchmark.reference, inputs, device.reference_dtype, benchmark.error)
    tolerance = benchmark.tolerance(case) or default_tolerance(inputs)
    forwards: dict[str, Forward] = {}
    verdicts: dict[str, str] = {}
    for name in providers:
        if time.perf_counter() > ends:
            verdicts[name] = LEFT_OUT
            continue
        try:
            forward = benchmark.providers[name](case, device.torch_device)
            verdict: Verdict = verify(forward, inputs, seeds, expected, tolerance)
        except Exception as error:  # a peer that breaks must not take the others' results with it; the row says how
            verdicts[name] = _said(error)
        else:
            verdicts[name] = str(verdict)
            if verdict.right:
                forwards[name] = forward
    return Subject(inputs, seeds, expected, tolerance, forwards, verdicts)


def _said(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    if isinstance(error, UnavailableError):
        return f"unavailable: {first_line}"
    return f"failed: {type(error).__name__}: {first_line}"


def _measure(device: Device, mode: str, subject: Subject, budget_s: float) -> tuple[dict[str, str], dict[str, Measured]]:
    def call_of(forward: Forward) -> Callable[[], object]:
        return timed_call(mode, forward, subject.inputs, subject.seeds)

    with torch.set_grad_enabled(mode != "no-grad-forward"):
        # Memory first, while no other provider's graph is alive.
        memory = {name: peak_memory(partial(call_of, forward), device) for name, forward in subject.forwards.items()}
        calls = {name: call_of(forward) for name, forward in subject.forwards.items()}
        return subject.verdicts, _times(device, calls, memory, budget_s)


def _measure_graphs(device: Device, subject: Subject, budget_s: float) -> tuple[dict[str, str], dict[str, Measured]]:
    """Replays, checked by themselves. Their memory belongs to the graphs and is not counted."""
    verdicts, calls = dict(subject.verdicts), {}
    for name, forward in subject.forwards.items():
        try:
            replay, verdict = capture(*(device, forward, subject.inputs, subject.seeds, subject.expected, subject.tolerance))
        except Exception as error:  # as for the results above
            verdicts[name] = _said(error)
        else:
            verdicts[name] = str(verdict)
            if verdict.right:
                calls[name] = replay
    return verdicts, _times(device, calls, dict.fromkeys(calls), budget_s)


def _times(
    device: Device,
    calls: Mapping[str, Callable[[], object]],
    memory: Mapping[str, Quantiles | None],
    budget_s: float,
) -> dict[str, Measured]:
    on_device = device_times(calls, device, budget_s)
    wall = wall_times(calls, device, budget_s)
    host = host_times(calls, device, budget_s / 3)
    return {name: (on_device[name], wall[name], host[name], memory[name]) for name in calls}
