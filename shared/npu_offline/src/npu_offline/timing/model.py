"""How long a launch should take: a lower bound and an estimate."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any

from ..errors import OfflineError, UnsupportedError
from ..launches import LaunchRecord, Memory
from ..module.operations import PIPES, Pipe
from ..toolchain.compilation import compile_kernel
from ..toolchain.compilers import DEFAULT
from ..toolchain.opt import parse_stage
from .cache import Cache
from .core import Rates
from .costs import ChipCosts, costs_of
from .counting import Count, count, total
from .program import Issue, Program, needs_cube_cores, translate
from .rare_branches import has_rare_branches
from .registers import vector_functions
from .scalars import UNKNOWN
from .simulation import Event, simulate

_ISSUES = 500_000  # instructions that are counted before programs of a grid are only sampled
_SAMPLES = 4  # the fewest programs that are counted


@dataclass(frozen=True)
class Timing:
    """How long a launch should take on a chip. Times in seconds.

    Attributes:
        kernel, soc, toolchain: what was timed, for what, as compiled by which version.
        grid: programs in x, y and z.
        bound: a time that no launch can beat; see `time_launch`.
        estimate: simulated, with the time of the launch itself.
        busy: seconds of each pipe of the busiest core, in the estimate.
        moved: bytes between global memory and all cores, with those that cores hand to each other.
        least: bytes that must cross main memory; an argument that is read several times counts once.
        scalar_accesses: elements that the scalar unit of the busiest core reads or writes.
        waits: flags that the pipes of the busiest core wait for.
        ub_bytes: Unified Buffer that the kernel takes.
        events: what the pipes of one program do, in order; as many as were asked for.
    """

    kernel: str
    soc: str
    toolchain: str
    grid: tuple[int, int, int]
    bound: float
    estimate: float
    busy: Mapping[Pipe, float]
    moved: int
    least: int
    scalar_accesses: int
    waits: int
    ub_bytes: int
    events: tuple[Event, ...] = field(default=(), repr=False)

    @property
    def limited_by(self) -> Pipe:
        """The pipe that is busiest."""
        return max(self.busy, key=lambda pipe: self.busy[pipe])


def time_launch(launch: LaunchRecord, *, soc: str = "Ascend910B4", toolchain: str = DEFAULT, events: int = 0) -> Timing:
    """Predict how long a recorded launch takes, from the final module that the compiler makes of it.

    The scalar control flow of one program is run with the launch's numbers and the elements of its integer tensors. Control
    flow that depends on other values is an error; a branch may, if the kernel's source says `# time: rare: REASON`: it is
    then not taken. The instructions that the program issues are simulated on the pipes of one core, every iteration of
    every loop.

    A kernel with matrix products runs on cube cores; one that computes with their results too is compiled in two parts, for
    a cube core and its two vector cores, which are simulated together.

    The bound is the larger of two times. The first is that of the bytes that must cross main memory, at its peak bandwidth:
    each argument counts once at most, reads at addresses that were loaded from memory do not count, and the cache is empty
    before the launch. The second is that of the busiest pipe, at peak rates without start-up times: all programs spread
    evenly over the cores, or the longest program alone.

    The estimate simulates the busiest program with the rates of `timing.costs`, once for each program that a core runs, and
    adds the time of a launch. In a large grid the busiest program of a sample is taken. Starting one program after another
    on a core costs nothing in this model.

    Args:
        launch: from `record`.
        soc: a chip of which the costs are known.
        toolchain: compiler version.
        events: how many events of the simulation to keep.

    Returns:
        The prediction.

    Raises:
        UnsupportedError: the chip, its cube cores where the kernel needs them, or an instruction has no costs, or the
            control flow depends on what the kernel computes.
        OfflineError: the kernel does not fit.
    """
    costs = costs_of(soc)
    report = compile_kernel(launch, soc=soc, toolchain=toolchain)
    if not report.fits:
        raise OfflineError(f"{launch.name} does not fit on {soc} with toolchain {toolchain}: {report.message}")
    types = tuple((name, launch.signature[name]) for name in launch.arguments)
    rare = has_rare_branches(launch.kernel)
    cores = _cores(_programs(report.stages["final"], types, soc, toolchain, costs, rare))
    programs = launch.grid[0] * launch.grid[1] * launch.grid[2]
    samples = max(_SAMPLES, _ISSUES // sum(each.issues for each in _count(cores, launch, 0)))
    numbers = (
        sorted({round(i * (programs - 1) / (samples - 1)) for i in range(samples)})
        if samples < programs
        else range(programs)
    )
    counts = [_count(cores, launch, number) for number in numbers]
    busiest = max(range(len(numbers)), key=lambda i: max(c.seconds(costs) for c in counts[i]))
    available = costs.cube.cores if costs.cube is not None and "AIC" in cores else costs.vector_cores
    running = min(programs, available)
    rounds = ceil(programs / available)
    touched = {stream: n * programs / len(numbers) for stream, n in total(c.once for each in counts for c in each).items()}
    sizes = {name: value.nbytes for name, value in launch.arguments.items() if isinstance(value, Memory)}
    least = {stream: min(nbytes, sizes.get(stream[0], nbytes)) for stream, nbytes in touched.items()}
    first = {
        stream[0]: nbytes / touched[stream]
        for stream, nbytes in least.items()
        if not stream[1] and nbytes <= costs.cache_bytes and touched[stream]
    }
    outcome = simulate(
        {name: (_issues(name, cores, launch, numbers[busiest]), _rates(name, costs)) for name in cores},
        costs.bandwidth / running,
        Cache(inf if sum(least.values()) <= costs.cache_bytes else costs.cache_bytes / running, first),
        events,
    )
    certain = sum(nbytes for (_, _, gathered), nbytes in least.items() if not gathered)
    peaks = [max(c.peak_seconds(costs) for c in each) for each in counts]
    pipes = max(*peaks, (sum(peaks) if len(peaks) == programs else min(peaks) * programs) / available)
    return Timing(
        kernel=launch.name,
        soc=soc,
        toolchain=toolchain,
        grid=launch.grid,
        bound=max(certain / costs.peak_bandwidth, pipes),
        estimate=outcome.seconds * rounds + costs.launch,
        busy={pipe: max(busy[pipe] for busy in outcome.busy.values()) * rounds for pipe in PIPES},
        moved=round(sum(sum(c.moved.values()) for each in counts for c in each) * programs / len(numbers)),
        least=round(sum(least.values())),
        scalar_accesses=max(c.scalars for c in counts[busiest]) * rounds,
        waits=max(c.waits for c in counts[busiest]) * rounds,
        ub_bytes=report.ub.used,
        events=tuple(outcome.events),
    )


_Cores = Mapping[str, tuple[Program, int]]
"""By the name of a core, as in `Event`: the program that it runs, and its number among the vector cores of a cube core."""


def _cores(programs: tuple[Program, ...]) -> _Cores:
    if len(programs) == 1:
        return {programs[0].core: (programs[0], 0)}
    by_core = {program.core: program for program in programs}
    return {"AIC": (by_core["AIC"], 0), "AIV0": (by_core["AIV"], 0), "AIV1": (by_core["AIV"], 1)}


def _count(cores: _Cores, launch: LaunchRecord, number: int) -> list[Count]:
    seen: set[Any] = set()
    return [count(_issues(name, cores, launch, number), seen) for name in cores]


def _rates(name: str, costs: ChipCosts) -> Rates:
    ports: dict[Pipe, float] = {"MTE2": costs.typical_load_port, "MTE3": costs.typical_store_port}
    if name == "AIC" and costs.cube is not None:
        ports = {"MTE2": costs.cube.typical_load_port, "FIX": costs.store_port}
    return Rates(costs.cycle, costs.transfer_start, ports)


def _issues(name: str, cores: _Cores, launch: LaunchRecord, number: int) -> Iterator[Issue]:
    program, sub_block = cores[name]
    values = launch.arguments

    def element(name: str, index: Any) -> Any:
        memory = values.get(name)
        if index is UNKNOWN or not isinstance(memory, Memory) or memory.values is None:
            return UNKNOWN
        return int(memory.values.view(-1)[index])

    scalars = [value for value in values.values() if not isinstance(value, Memory)]
    return program.run(number, sub_block, *launch.grid, element, *scalars)


@functools.lru_cache(maxsize=64)
def _programs(
    final: str, types: tuple[tuple[str, str], ...], soc: str, toolchain: str, costs: ChipCosts, rare: bool
) -> tuple[Program, ...]:
    module = parse_stage(final, soc, toolchain)
    if costs.cube is None and needs_cube_cores(module):
        raise UnsupportedError(f"soc is {soc}, must be a chip whose cube cores' costs are known: the kernel needs them")
    functions = vector_functions(module, costs, rare=rare) if costs.registers else {}
    return translate(module, dict(types), costs, functions, rare=rare)
