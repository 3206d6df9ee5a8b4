"""How long a launch should take: a lower bound and an estimate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

import npu_tiling

from ..errors import OfflineError, reported
from ..launches import LaunchRecord, Memory
from ..module.operations import PIPES, Pipe
from ..toolchain.compilation import compile_kernel
from ..toolchain.compilers import DEFAULT
from . import constants
from .cache import Cache
from .cores import Cores, cores_of, counts_of, issues_of, programs_of, rates_of
from .costs import ChipCosts, costs_of
from .counting import total
from .rare_branches import has_rare_branches
from .simulation import Event, Outcome, simulate
from .traffic import CacheDemand, L2State, cache_of

_ISSUES = 500_000  # instructions that are counted before programs of a grid are only sampled
_SAMPLES = 4  # the fewest programs that are counted


@dataclass(frozen=True)
class Timing:
    """How long a launch should take on a chip. Times in seconds.

    Attributes:
        kernel, soc, toolchain: what was timed, for what, as compiled by which version.
        grid: programs in x, y and z.
        l2: what the L2 cache had before the launch.
        clock: that the caller gave, in Hz; None where the chip's is published.
        bound: a time that no launch with such an L2 cache can beat; see `time_launch`.
        estimate: simulated, with the time of the launch itself.
        launch: that time: what a launch costs, and each core that it starts.
        busy: seconds of each pipe of a core, in the estimate.
        moved: bytes between global memory and all cores, with those that cores hand to each other.
        least: bytes that must cross main memory; an argument that is read several times counts once.
        scalar_accesses: elements that the scalar unit of a core reads or writes.
        waits: flags that the pipes of a core wait for.
        ub_bytes: Unified Buffer that the kernel takes.
        events: what the pipes of one program do, in order; as many as were asked for.
    """

    kernel: str
    soc: str
    toolchain: str
    grid: tuple[int, int, int]
    l2: L2State
    clock: float | None
    bound: float
    estimate: float
    launch: float
    busy: Mapping[Pipe, float]
    moved: int
    least: int
    scalar_accesses: int
    waits: int
    ub_bytes: int
    events: tuple[Event, ...] = field(default=(), repr=False)

    @property
    def range(self) -> tuple[float, float] | None:
        """Where nine of ten published times lie beside estimates; None for chips of which no times are published."""
        if npu_tiling.soc(self.soc).arch == "dav-c310":
            return None
        return self.estimate * constants.RANGE_LOW.value, self.estimate * constants.RANGE_HIGH.value

    @property
    def limited_by(self) -> Pipe:
        """The pipe that is busiest."""
        return max(self.busy, key=lambda pipe: self.busy[pipe])


@reported
def time_launch(
    launch: LaunchRecord,
    *,
    soc: str = "Ascend910B4",
    toolchain: str = DEFAULT,
    events: int = 0,
    l2: L2State = "cold",
    clock: float | None = None,
) -> Timing:
    """Predict how long a recorded launch takes, from the final module that the compiler makes of it.

    The scalar control flow of one program is run with the launch's numbers and the elements of its integer tensors. Control
    flow that depends on other values is an error; a branch may, if the kernel's source says `# time: rare: REASON`: it is
    then not taken. The instructions that the program issues are simulated on the pipes of one core, every iteration of
    every loop.

    A kernel with matrix products runs on cube cores; one that computes with their results too is compiled in two parts, for
    a cube core and its two vector cores, which are simulated together.

    The bound is the larger of two times. The first is that of the bytes that must cross main memory, at its peak bandwidth:
    each argument counts once at most, reads at addresses that were loaded from memory do not count, nor does what a warm
    cache can hold. The second is that of the busiest pipe, at peak rates without start-up times: all programs spread
    evenly over the cores, or the longest program alone.

    The estimate simulates one program with the rates of `timing.costs`, once for each program that a core runs, with the
    start of each further program, or takes the time of main memory where that is longer. It adds the time of a launch and
    of each core that it starts. The program is the longest, or where cores run several the one nearest to the mean; in a
    large grid, of a sample.

    Args:
        launch: from `record`.
        soc: a chip of which the costs are known.
        toolchain: compiler version.
        events: how many events of the simulation to keep.
        l2: what the L2 cache has before the launch: "cold", "warm" as after the same call, or "dirty" as after a benchmark
            that clears it by writing.
        clock: of the cores in Hz, for a chip of which none is published.

    Returns:
        The prediction.

    Raises:
        UnsupportedError: the chip, its cube cores where the kernel needs them, or an instruction has no costs, or the
            control flow depends on what the kernel computes.
        OfflineError: the kernel does not fit, or the chip's clock is published.
    """
    costs = costs_of(soc) if clock is None else costs_of(soc, clock)
    report = compile_kernel(launch, soc=soc, toolchain=toolchain)
    if not report.fits:
        raise OfflineError(f"{launch.name} does not fit on {soc} with toolchain {toolchain}: {report.message}")
    types = tuple((name, launch.signature[name]) for name in launch.arguments)
    rare = has_rare_branches(launch.kernel)
    cores = cores_of(programs_of(report.stages["final"], types, soc, toolchain, costs, rare))
    programs = launch.grid[0] * launch.grid[1] * launch.grid[2]
    samples = max(_SAMPLES, _ISSUES // sum(core.issues for core in counts_of(cores, launch, 0)))
    numbers = (
        sorted({round(i * (programs - 1) / (samples - 1)) for i in range(samples)})
        if samples < programs
        else range(programs)
    )
    counts = [counts_of(cores, launch, number) for number in numbers]
    available = costs.cube.cores if costs.cube is not None and "AIC" in cores else costs.vector_cores
    running = min(programs, available)
    rounds = ceil(programs / available)
    chosen = _chosen([max(c.seconds(costs) for c in one) for one in counts], rounds)
    touched = {stream: n * programs / len(numbers) for stream, n in total(c.once for one in counts for c in one).items()}
    sizes = {name: value.nbytes for name, value in launch.arguments.items() if isinstance(value, Memory)}
    least = {stream: min(nbytes, sizes.get(stream[0], nbytes)) for stream, nbytes in touched.items()}
    cache = cache_of(l2, costs, CacheDemand(touched, least, programs, running, available), cores, launch)
    outcome, seconds = _simulated(numbers[chosen], cores, launch, costs, cache, programs, available, events)
    certain = sum(nbytes for (_, _, gathered), nbytes in least.items() if not gathered)
    certain = max(0, certain - costs.cache_bytes) if l2 == "warm" else certain
    peaks = [max(c.peak_seconds(costs) for c in one) for one in counts]
    pipes = max(*peaks, (sum(peaks) if len(peaks) == programs else min(peaks) * programs) / available)
    start = costs.launch + running * costs.launch_block
    further = (rounds - 1) * costs.next_program
    each = [sum(sum(c.moved.values()) for c in one) for one in counts]  # bytes of a program
    moved = sum(each) * programs / len(each)
    all_of_them = moved / each[chosen] if each[chosen] else 0.0  # programs such as the chosen one
    memory = costs.memory_seconds(outcome.read * all_of_them, outcome.written * all_of_them)
    busy = {pipe: max(busy[pipe] for busy in outcome.busy.values()) * rounds for pipe in PIPES}
    return Timing(
        kernel=launch.name,
        soc=soc,
        toolchain=toolchain,
        grid=launch.grid,
        l2=l2,
        clock=clock,
        bound=max(certain / costs.peak_bandwidth, pipes),
        estimate=max(seconds + further, memory) + start,
        launch=start,
        busy={**busy, "S": busy["S"] + further},
        moved=round(moved),
        least=round(sum(least.values())),
        scalar_accesses=max(c.scalars for c in counts[chosen]) * rounds,
        waits=max(c.waits for c in counts[chosen]) * rounds,
        ub_bytes=report.ub.used,
        events=tuple(outcome.events),
    )


def _chosen(seconds: Sequence[float], rounds: int) -> int:
    """Which program stands for all: the longest where a core runs one, else that which is nearest to the mean."""
    if rounds == 1:
        return seconds.index(max(seconds))
    mean = sum(seconds) / len(seconds)
    return min(range(len(seconds)), key=lambda i: abs(seconds[i] - mean))


def _simulated(
    number: int,
    cores: Cores,
    launch: LaunchRecord,
    costs: ChipCosts,
    cache: Callable[[], Cache],
    programs: int,
    available: int,
    events: int,
) -> tuple[Outcome, float]:
    """One program, and the seconds of all programs of a core.

    While a core starts a further program, the others have its part of main memory's bandwidth; programs of the last round
    share all of it.
    """

    def run(share: float) -> Outcome:
        issued = {name: (issues_of(name, cores, launch, number), rates_of(name, costs)) for name in cores}
        return simulate(issued, share, cache(), events)

    outcome = run(costs.read_bandwidth / min(programs, available))
    if programs <= available:
        return outcome, outcome.seconds
    at_work = outcome.seconds / (outcome.seconds + costs.next_program)
    outcome = run(costs.read_bandwidth / available / at_work)
    whole, last = divmod(programs, available)
    return outcome, whole * outcome.seconds + (run(costs.read_bandwidth / last).seconds if last else 0.0)
