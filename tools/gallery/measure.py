"""What npu-offline says of a call of somebody's kernels."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from npu_offline import VERSIONS, LaunchRecord, OfflineError, emulate, record
from npu_offline.check import Job, describe, run
from npu_offline.check.execution import random_values
from npu_offline.errors import reason_of
from npu_offline.execute.final.findings import WEAK
from npu_offline.lint import lint_kernel
from npu_offline.timing import time_launch
from torch import Tensor

from .sources import SOC, on_chip

NEWEST = VERSIONS[-1]
_ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest element


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        inputs: its tensors.
        call: takes copies of them; returns the outputs.
        reference: takes them in fp64; returns what the outputs must be.
        minimum: bytes that must cross memory; None for those of all inputs and outputs.
    """

    inputs: Sequence[Tensor]
    call: Callable[..., Any]
    reference: Callable[..., Any]
    minimum: int | None = None


@dataclass
class Row:
    """What was found; every text is as the page shows it."""

    kernels: list[str] = field(default_factory=list)
    compiles: dict[str, str] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    findings: dict[str, str] = field(default_factory=dict)
    lint: dict[str, int] = field(default_factory=dict)
    moved: int | None = None
    minimum: int | None = None
    scalars: int = 0
    predicted: float | None = None
    time_problem: str = ""


def measure(case: Case) -> Row:
    """Compile, run, check, lint and time a call."""
    row = Row()
    wanted = _tuple(case.reference(*(_wide(tensor) for tensor in case.inputs)))
    with on_chip(), record(SOC) as launches:
        outputs = _tuple(case.call(*(tensor.clone() for tensor in case.inputs)))
    row.kernels = list(dict.fromkeys(launch.name for launch in launches))
    tensors = [*case.inputs, *outputs]
    row.minimum = sum(t.numel() * t.itemsize for t in tensors) if case.minimum is None else case.minimum
    for version in VERSIONS:
        row.compiles[version] = _compiled(launches, version)
    row.results["Linalg IR"] = _ran(case, wanted, row)
    for version in VERSIONS:
        row.results[version] = _ran(case, wanted, None, toolchain=version, final=True)
        row.findings[version] = _checked(case, version)
    for launch in launches:
        try:
            row.lint.update(
                Counter(finding.rule for finding in lint_kernel(launch, soc=SOC, toolchain=NEWEST)) + Counter(row.lint)
            )
        except OfflineError:
            break
    try:
        row.predicted = sum(time_launch(launch, soc=SOC, toolchain=NEWEST).estimate for launch in launches)
    except OfflineError as error:
        row.time_problem = short(str(error))
    return row


def _compiled(launches: Sequence[LaunchRecord], version: str) -> str:
    shares = []
    for launch in launches:
        result = run(Job(*describe(launch), SOC, version))
        if result.report is None:
            return f"no: {short(result.problem)}"
        if not result.report.fits:
            return f"no: {launch.name} asks for {result.report.required_ub_bytes or '?'} bytes of UB"
        shares.append(result.report.ub.used / result.report.ub.available if result.report.ub.available else 0)
    return f"yes, {100 * max(shares):.0f} %" if shares else "no launch"


def _ran(case: Case, wanted: Sequence[Tensor], row: Row | None, **options: Any) -> str:
    """Run the call whole, and compare."""
    inputs = [tensor.clone() for tensor in case.inputs]
    try:
        with on_chip(), emulate(SOC, ledgers=row is not None, races=row is not None, **options) as emulation:
            outputs = _tuple(case.call(*inputs))
    except Exception as error:
        return _failed(error)
    if row is not None:
        traffic = [each for kernel in emulation.traffic().values() for each in kernel.values()]
        row.moved = sum(each.read + each.written for each in traffic)
        row.scalars = sum(each.scalars for each in traffic)
    return _verdict(outputs, wanted)


def _verdict(outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """The largest error of any output, as a share of that output's largest element, and whether that is allowed."""
    worst, right = 0.0, True
    for got, want in zip(outputs, wanted, strict=True):
        error = (got.double() - want).abs()
        share = float(error.max() / want.abs().max().clamp(min=1e-30)) if got.is_floating_point() else float(error.max())
        worst = max(worst, share) if share == share else float("nan")
        right = right and share <= _ALLOWED.get(got.dtype, 0.0)
    return f"{'right' if right else 'WRONG'}, {worst:.1g}"


def _checked(case: Case, version: str) -> str:
    inputs = [tensor.clone() for tensor in case.inputs]
    try:
        with (
            on_chip(),
            random_values(),  # what programs that are not run leave unwritten
            emulate(SOC, toolchain=version, threads=1, checks=True, distinct=True, keep_going=True) as emulation,
        ):
            case.call(*inputs)
    except Exception as error:
        return _failed(error)
    found = [f"{launch.kernel}, {note}" for launch in emulation.launches for note in launch.notes if note.kind != WEAK]
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{short(found[0])}{more}" if found else "none"


def _failed(error: Exception) -> str:
    said = reason_of(error)
    if not said:
        said = f"{type(error).__name__}: {error} ({traceback.extract_tb(error.__traceback__)[-1].name})"
    return f"not run: {short(said)}"


def short(text: str) -> str:
    """One line of a message."""
    line = " ".join(re.sub(r"/\S*/", "", text).split())  # names of files without their folders
    return line if len(line) <= 240 else f"{line[:237]}..."


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)
