"""Device "emulated": what the kernels move, counted by npu-offline's emulation of an Ascend chip. No times.

The emulation runs on the host, so its times say nothing about a chip; the bytes are those of the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checks import default_tolerance, expect, verify
from .declaration import Benchmark, Case, Sweep
from .errors import BenchError, UnavailableError
from .modes import as_tuple, differentiated, matching
from .runner import make_inputs
from .tables import Table

# Forward bytes of the largest case that is emulated without being named: larger ones take minutes.
LARGEST_UNASKED = 2**25

_HEADERS = (
    "case",
    "mode",
    "provider",
    "kernel: argument",
    "result",
    "bytes read",
    "bytes written",
    "formula",
    "moved / formula",
)


@dataclass(frozen=True)
class Moved:
    """Bytes that one argument of one kernel crossed the chip's border for."""

    kernel: str
    argument: str
    read: int
    written: int


@dataclass(frozen=True)
class CaseTraffic:
    """What one provider moved on one case in one mode, against the benchmark's formula."""

    case: Case
    mode: str
    provider: str
    verdict: str
    moved: Sequence[Moved]
    formula: int

    @property
    def total(self) -> int:
        return sum(entry.read + entry.written for entry in self.moved)


def measure_traffic(
    benchmark: Benchmark,
    soc: str,
    sweep: Sweep,
    *,
    modes: Sequence[str],
    providers: Sequence[str],
    progress: Callable[[str], None],
) -> list[CaseTraffic]:
    """Run each case once in the emulation.

    Args:
        benchmark: what was declared.
        soc: the chip, a name of `npu_tiling.SOCS`.
        sweep: the cases.
        modes, providers: which of those declared.
        progress: told before each case what comes.

    Raises:
        BenchError: npu-offline is missing, or refuses.
    """
    try:
        from npu_offline import OfflineError, emulate
        from npu_tiling import UnknownDeviceError
    except ImportError as error:
        raise BenchError(f"device emulated needs npu-offline, which cannot be imported: {error}.") from None
    rows: list[CaseTraffic] = []
    for case in sweep.cases:
        progress(f"{case.name} on an emulated {soc}")
        try:
            with emulate(soc) as emulation:
                rows += _run_case(benchmark, emulation, case, modes, providers)
        except (OfflineError, UnknownDeviceError) as error:
            raise BenchError(f"{case.name}: {error}") from error
    return rows


def small_cases(benchmark: Benchmark, sweep: Sweep) -> tuple[Sweep, list[str]]:
    """The cases that the emulation runs without being asked by name, and the names of the others."""
    small = [case for case in sweep.cases if benchmark.traffic(case, "forward") <= LARGEST_UNASKED]
    if not small:
        raise BenchError("every case is large for the emulation, which takes minutes: name with --cases what to run.")
    left_out = [case.name for case in sweep.cases if case not in small]
    return Sweep(sweep.x_name, sweep.x_label, small), left_out


def traffic_table(benchmark: str, soc: str, rows: Sequence[CaseTraffic]) -> Table:
    """A line for each kernel argument, and one for the sum."""
    lines = []
    for row in rows:
        name = [row.case.name, row.mode, row.provider]
        for entry in row.moved if row.mode != "full" else ():  # its launches are those of forward and backward
            kernel = f"{entry.kernel}: {entry.argument}"
            lines.append([*name, kernel, "", f"{entry.read:,}", f"{entry.written:,}", "", ""])
        read = sum(entry.read for entry in row.moved)
        ratio = f"{row.total / row.formula:.3f}" if row.moved else "-"
        sums = [f"{read:,}", f"{row.total - read:,}", f"{row.formula:,}", ratio]
        lines.append([*name, "all", row.verdict, *sums])
    return Table(f"{benchmark}: global memory traffic on an emulated {soc}", _HEADERS, lines, labels=5)


def _run_case(
    benchmark: Benchmark, emulation: Any, case: Case, modes: Sequence[str], providers: Sequence[str]
) -> list[CaseTraffic]:
    cpu = torch.device("cpu")
    inputs = make_inputs(benchmark, case, cpu)
    expected, seeds = expect(benchmark.reference, inputs, torch.float64, benchmark.error)
    tolerance = benchmark.tolerance(case) or default_tolerance(inputs)
    rows = []
    for name in providers:
        try:
            forward = benchmark.providers[name](case, cpu)
        except UnavailableError as error:
            said = f"unavailable: {error}"
            rows += [CaseTraffic(case, mode, name, said, (), benchmark.bytes_moved(case, mode)) for mode in modes]
            continue
        verdict = verify(forward, inputs, seeds, expected, tolerance)
        moved = _moved_by_mode(emulation, forward, inputs, seeds)
        if not any(moved.values()):
            said = "launches no Triton kernel"
            rows += [CaseTraffic(case, mode, name, said, (), benchmark.bytes_moved(case, mode)) for mode in modes]
            continue
        rows += [CaseTraffic(case, m, name, str(verdict), moved[m], benchmark.bytes_moved(case, m)) for m in modes]
    return rows


def _moved_by_mode(
    emulation: Any, forward: Callable[..., Any], inputs: Mapping[str, Tensor], seeds: Sequence[Tensor]
) -> dict[str, list[Moved]]:
    emulation.launches.clear()
    with torch.no_grad():
        forward(*inputs.values())
    moved = {"no-grad-forward": _taken(emulation)}
    outputs = as_tuple(forward(*inputs.values()))
    moved["forward"] = _taken(emulation)
    wanted = tuple(differentiated(inputs).values())
    if wanted:
        torch.autograd.grad(outputs, wanted, matching(seeds, outputs), allow_unused=True)
    moved["backward"] = _taken(emulation)
    moved["full"] = moved["forward"] + moved["backward"]
    return moved


def _taken(emulation: Any) -> list[Moved]:
    """What was launched since the last call."""
    moved = [
        Moved(kernel, argument, traffic.read, traffic.written)
        for kernel, arguments in emulation.traffic().items()
        for argument, traffic in arguments.items()
        if traffic.read or traffic.written
    ]
    emulation.launches.clear()
    return moved
