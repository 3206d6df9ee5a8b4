"""Candidate tiles of a call: recorded, compiled in parallel, ranked by predicted time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf

import npu_tiling

from .. import check
from ..check.values import combinations
from ..errors import OfflineError
from ..execute.recording import record
from ..launches import LaunchRecord, describe_tile
from ..timing import Timing, time_launch
from ..timing.traffic import L2State
from ..toolchain.compilers import DEFAULT
from .sizes import Site, Sizes, answering

_candidates = itertools.count()


@dataclass(frozen=True)
class Candidate:
    """One choice of block sizes.

    Attributes:
        sizes: by name; empty for the tiling's own.
        kernels: the launches that it changes: name and tile.
        seconds: predicted for those launches; None where there is no prediction.
        chosen: what the tiling's own launches in their place are predicted to take; infinity where there is no prediction.
        problem: why there is no prediction.
        chosen_problem: why there is none of the tiling's own.
    """

    sizes: Sizes
    kernels: tuple[str, ...]
    seconds: float | None
    chosen: float
    problem: str = ""
    chosen_problem: str = ""

    @property
    def gain(self) -> float:
        """The share of the tiling's time that it saves; negative where it is slower."""
        return 0.0 if self.seconds is None or not self.chosen else 1 - self.seconds / self.chosen


@dataclass(frozen=True)
class Tuned:
    """The candidates for one call of `npu_tiling.fit`, fastest first."""

    label: str
    site: Site
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate, if it is faster than the tiling's choice."""
        return next((candidate for candidate in self.candidates if candidate.gain > 0), None)


_Recorded = tuple[list[Site], list[LaunchRecord]]


def search(
    label: str,
    call: Callable[..., None],
    choices: Mapping[str, Sequence[int]] | Sequence[Sizes] | None = None,
    *,
    soc: str = "Ascend910B4",
    toolchain: str = DEFAULT,
    l2: L2State = "cold",
    clock: float | None = None,
    jobs: int | None = None,
    kernel: str = "",
) -> list[Tuned]:
    """Try other block sizes for everything that a call launches.

    A tiling calls `npu_tiling.fit` once for every launch that it makes. Each result is replaced in turn by sizes from a
    quarter to four times of it, and the launches that the call then makes are compiled and timed. A call that takes its
    sizes as arguments lists them instead. A candidate is compared with the launches that it replaces: those of the same
    kernels, whose constants or grid differ.

    Args:
        label: of the call.
        call: what to run, on CPU tensors.
        choices: names of keyword arguments of `call` and the sizes that each may be, or combinations of sizes; the first
            are those in use.
        soc, toolchain: what for, and by which compiler.
        l2, clock: as for `time_launch`.
        jobs: compilations at a time; None for all cores.
        kernel: only sizes that change a kernel with this text in its name.

    Returns:
        The candidates, for each result of `npu_tiling.fit` or each listed argument.
    """
    runs: list[tuple[int, Sizes, Callable[[], _Recorded]]]
    if choices:
        first, *others = combinations(choices) if isinstance(choices, Mapping) else choices
        sites, own = [Site((), tuple(first.items()))], _recorded(functools.partial(call, **first), soc)[1]
        runs = [(0, other, functools.partial(_recorded, functools.partial(call, **other), soc)) for other in others]
    else:
        sites, own = _recorded(call, soc)
        plans = [(number, other) for number, site in enumerate(sites) for other in site.others()]
        runs = [(number, other, functools.partial(_recorded, call, soc, number, other)) for number, other in plans]
    tried: list[tuple[int, Sizes, list[LaunchRecord]]] = []
    for number, sizes, launches_with in runs:
        with contextlib.suppress(OfflineError, ValueError, ZeroDivisionError):  # the tiling refuses these sizes
            tried.append((number, sizes, launches_with()[1]))
    wanted = [(number, sizes, new) for number, sizes, new in tried if _changes(own, new, kernel)]
    _compile([launch for _, _, new in wanted for launch in new], soc, toolchain, jobs)
    times = _Predictions(functools.partial(time_launch, soc=soc, toolchain=toolchain, l2=l2, clock=clock))
    found: dict[int, list[Candidate]] = {}
    for number, sizes, new in wanted:
        found.setdefault(number, []).append(_candidate(sizes, own, new, times))
    ranked = {n: sorted(cs, key=lambda c: float("inf") if c.seconds is None else c.seconds) for n, cs in found.items()}
    return [Tuned(label, sites[number], tuple(candidates)) for number, candidates in sorted(ranked.items())]


def _recorded(call: Callable[[], None], soc: str, number: int = -1, sizes: Sizes | None = None) -> _Recorded:
    """The sites and launches of a call, with these sizes at the site of this number."""
    # Tilings cache launches by device: a unique name keeps candidates apart.
    device = dataclasses.replace(npu_tiling.soc(soc), name=f"{soc}, candidate {next(_candidates)}")
    with (
        answering(lambda n, _: sizes if n == number else None) as sites,
        record(soc) as launches,
        npu_tiling.use_device(device, emulated=True),
    ):
        call()
    return sites, list(launches)


def _identity(launch: LaunchRecord) -> tuple[object, ...]:
    return launch.name, launch.grid, tuple(sorted(launch.constants.items(), key=str)), tuple(launch.options.items())


def _changes(own: Sequence[LaunchRecord], new: Sequence[LaunchRecord], kernel: str) -> bool:
    known = {_identity(launch) for launch in own}
    return any(_identity(launch) not in known and kernel in launch.name for launch in new)


class _Predictions:
    """Predicted times, computed once for each launch."""

    def __init__(self, predict: Callable[[LaunchRecord], Timing]) -> None:
        self._predict = predict
        self._known: dict[object, float] = {}

    def seconds(self, launches: Sequence[LaunchRecord]) -> float:
        """Of all these launches together."""
        for launch in launches:
            if _identity(launch) not in self._known:
                self._known[_identity(launch)] = self._predict(launch).estimate
        return sum(self._known[_identity(launch)] for launch in launches)

    def seconds_or_problem(self, launches: Sequence[LaunchRecord]) -> tuple[float | None, str]:
        """Of all these launches together, or why there is no prediction."""
        try:
            return self.seconds(launches), ""
        except OfflineError as error:
            return None, str(error)


def _candidate(sizes: Sizes, own: Sequence[LaunchRecord], new: Sequence[LaunchRecord], times: _Predictions) -> Candidate:
    known = {_identity(launch) for launch in own}
    still = {_identity(launch) for launch in new}
    changed = [launch for launch in new if _identity(launch) not in known]
    replaced = [launch for launch in own if _identity(launch) not in still]
    kernels = tuple(f"{launch.name} {describe_tile(launch)}" for launch in changed)
    chosen, chosen_problem = times.seconds_or_problem(replaced)
    seconds, problem = times.seconds_or_problem(changed)
    return Candidate(sizes, kernels, seconds, inf if chosen is None else chosen, problem, chosen_problem)


def _compile(launches: Iterable[LaunchRecord], soc: str, toolchain: str, jobs: int | None) -> None:
    """Compile in parallel, to fill the cache on disk. Threads suffice: the compiler is a separate process."""
    described = dict.fromkeys(check.describe(launch) for launch in launches)
    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        list(pool.map(check.run, [check.Job(*parts, soc, toolchain) for parts in described]))
