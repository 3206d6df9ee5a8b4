"""Predictions for published points, and how far from them they are."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from npu_offline import LaunchRecord, OfflineError
from npu_offline.timing import Timing, constants, time_launch

from . import data_copy, kernels
from .points import POINTS, SOURCES, Point

_MICRO = 1e6
_NINE_OF_TEN = 0.9


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a published time.

    Attributes:
        source: a key of `SOURCES`.
        kernel: its name.
        arguments: as text.
        commit: of the source.
        published, predicted: microseconds; `predicted` is zero where there is a problem.
        pipes: by pipe, published and predicted microseconds, and whether a constant was chosen after the former.
        fitted: whether a constant was chosen after it.
        problem: why there is no prediction.
    """

    source: str
    kernel: str
    arguments: str
    commit: str
    published: float
    predicted: float = 0.0
    pipes: dict[str, tuple[float, float, bool]] = field(default_factory=dict)
    fitted: bool = False
    problem: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """Which point it is of, as `key_of`."""
        return self.source, self.kernel, self.arguments, self.commit

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published


def predictions(wanted: str = "") -> Iterator[Prediction]:
    """A prediction for every point whose source and kernel have a text."""
    for point in POINTS:
        if wanted in f"{point.source} {point.kernel}":
            yield _predicted(point)


def key_of(point: Point) -> tuple[str, str, str, str]:
    """Source, kernel, arguments as text, and commit."""
    arguments = " ".join(f"{name}={_text(value)}" for name, value in point.arguments.items())
    return point.source, point.kernel, arguments, point.commit[:10]


def _predicted(point: Point) -> Prediction:
    found = Prediction(*key_of(point), point.microseconds, fitted=constants.is_fitted(point.label))
    try:
        seconds, busy = _best(point)
    except OfflineError as error:
        return dataclasses.replace(found, problem=str(error).splitlines()[0])
    pipes = {pipe: (time, busy[pipe] * _MICRO, constants.is_fitted(point.label, pipe)) for pipe, time in point.pipes.items()}
    return dataclasses.replace(found, predicted=seconds * _MICRO, pipes=pipes)


def _text(value: object) -> str:
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _best(point: Point) -> tuple[float, dict[str, float]]:
    """Seconds, and those of each pipe, in the fastest configuration that fits."""
    source = SOURCES[point.source]
    if point.kernel == "data_copy":
        return data_copy.seconds(source.chip, **point.arguments)
    timed: list[list[Timing]] = []
    problem = OfflineError(f"{point.kernel} has no configuration")
    for launches in kernels.variants(point):
        try:
            timed.append([_timed(launch, point) for launch in launches])
        except OfflineError as error:  # the configuration does not fit
            problem = error
    if not timed:
        raise problem
    best = min(timed, key=lambda timings: sum(timing.estimate for timing in timings))
    busy = {pipe: sum(timing.busy[pipe] for timing in best) for pipe in best[0].busy}
    return sum(timing.estimate for timing in best), {str(pipe): seconds for pipe, seconds in busy.items()}


def _timed(launch: LaunchRecord, point: Point) -> Timing:
    source = SOURCES[point.source]
    return time_launch(launch, soc=source.chip, toolchain=source.toolchain, l2=source.l2, clock=source.clock)


@dataclass(frozen=True)
class Spread:
    """How far predictions are from what was published, as |predicted / published| in logarithms.

    Attributes:
        number: of predictions.
        median: half of them are no further.
        nine_of_ten: nine of ten are no further.
        bias: the median ratio of predicted to published.
    """

    number: int
    median: float
    nine_of_ten: float
    bias: float


def spread(ratios: Iterable[float]) -> Spread:
    """Of ratios of predicted to published: .5 and 2 are both 100 % off."""
    found = list(ratios)
    errors = sorted(math.exp(abs(math.log(ratio))) - 1 for ratio in found)
    within = errors[math.ceil(_NINE_OF_TEN * len(errors)) - 1]
    return Spread(len(found), statistics.median(errors), within, statistics.median(found))


def counted(found: Sequence[Prediction]) -> list[Prediction]:
    """Those that count: predicted, and no constant was chosen after them."""
    return [each for each in found if not each.problem and not each.fitted]


def times(found: Sequence[Prediction]) -> tuple[float, float]:
    """What to multiply an estimate by: nine of ten published times lie between; half of the others on either side."""
    ratios = sorted(1 / each.ratio for each in counted(found))
    outside = round((1 - _NINE_OF_TEN) / 2 * len(ratios))
    return ratios[outside], ratios[-1 - outside]
