"""What is predicted for one published measurement, and how far that is from the floor and from what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from npu_offline import LaunchRecord, OfflineError
from npu_offline.timing import Timing, costs_of, time_launch

from . import cases, peers
from .published import CUBE_SUSTAINED, SOC, Published

GOALS = {"attn_res": 1.5, "embedding": 1.6, "rms_norm": 1.6, "fused_linear_cross_entropy": 1.5}
"""By operator, how many times the floor its kernels may take by prediction; of the last one, the pass over logits."""
_MATMULS = 3


@dataclass(frozen=True)
class Result:
    """One line of the comparison. Times in seconds.

    Attributes:
        row: what was published.
        whose: "ours", or "liger" for liger-kernel's kernels for Ascend.
        timings: of each launch.
        times: how often all of them run.
        other: predicted for what is not a kernel of the operator: matrix products, at the rate that was measured.
        floor: of the kernels alone.
        problem: why there is no prediction.
    """

    row: Published
    whose: Literal["ours", "liger"]
    timings: tuple[Timing, ...]
    times: int
    other: float
    floor: float
    problem: str = ""

    @property
    def kernels(self) -> float:
        """Predicted for the kernels, without what each launch costs."""
        return self.times * sum(timing.estimate - timing.launch for timing in self.timings)

    @property
    def predicted(self) -> float:
        """Predicted for everything on the device."""
        return self.times * sum(timing.estimate for timing in self.timings) + self.other

    @property
    def bound(self) -> float:
        """No run can take less."""
        return self.times * sum(timing.bound for timing in self.timings)

    @property
    def above_floor(self) -> float:
        """The kernels' time as a multiple of their floor."""
        return self.kernels / self.floor


def results(operators: list[str] | None, toolchain: str) -> Iterator[Result]:
    """Predictions for all published measurements of these operators, ours first."""
    known: dict[object, tuple[Timing, ...]] = {}
    hint = peers.missing()
    for row in cases.rows(operators):
        yield _result(row, "ours", cases.ours, toolchain, known)
        if hint is None:
            yield _result(row, "liger", cases.theirs, toolchain, known)


def _result(
    row: Published,
    whose: Literal["ours", "liger"],
    launches: Callable[[Published], list[LaunchRecord]],
    toolchain: str,
    known: dict[object, tuple[Timing, ...]],
) -> Result:
    times, other, floor = 1, 0.0, row.floor
    key: object = (row, whose)
    if row.operator == "fused_linear_cross_entropy":
        times, floor = row.size // cases.CHUNK, row.size * cases.VOCABULARY * 2 * 2 / costs_of(SOC).peak_bandwidth
        other = _MATMULS * 2 * row.size * cases.WIDTH * cases.VOCABULARY / CUBE_SUSTAINED
        key = whose  # a chunk of logits is the same for any number of tokens
    try:
        if key not in known:
            known[key] = _timed(launches(row), toolchain)
        return Result(row, whose, known[key], times, other, floor)
    except OfflineError as error:
        return Result(row, whose, (), times, other, floor, str(error))


def _timed(launches: Iterable[LaunchRecord], toolchain: str) -> tuple[Timing, ...]:
    return tuple(time_launch(launch, soc=SOC, toolchain=toolchain) for launch in launches)
