"""How long a launch should take: a bound from below, and an estimate."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from ..compilation import compile_kernel
from ..errors import OfflineError
from ..launches import LaunchRecord, Memory
from ..mlir import opt, parse
from ..toolchains import tool
from .cache import Cache
from .costs import ChipCosts, costs_of
from .counting import count, total
from .instructions import Pipe
from .program import Issue, Program, translate
from .rare import has_rare_branches
from .scalars import UNKNOWN
from .simulation import Core, Event, Rates

_ISSUES = 500_000  # how many instructions to count at most before programs of a grid are only sampled
_SAMPLES = 4  # the fewest programs that are counted


@dataclass(frozen=True)
class Timing:
    """How long a launch should take on a chip. Times in seconds.

    Attributes:
        kernel, soc, toolchain: what was timed, for what, as compiled by which version.
        grid: programs in x, y and z.
        bound: no launch can take less: see `time_launch`.
        estimate: what the simulation says, with the launch itself.
        busy: of each pipe of the busiest core, in the estimate.
        moved: bytes between global memory and all cores.
        least: bytes that have to come from, or go to, main memory: an argument that is read again counts once.
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


def time_launch(launch: LaunchRecord, *, soc: str = "Ascend910B4", toolchain: str = "1.2.0", events: int = 0) -> Timing:
    """Predict how long a recorded launch takes, from the final module that the compiler makes of it.

    The scalar control flow of one program is followed with the launch's arguments: numbers as they were given, elements of
    integer tensors as they are now, and no other: where something else decides how often the kernel does something, there
    is an error, but for branches of which the kernel's source says that they are rare: they are not taken. What it issues
    is simulated on the pipes of one core, loop by loop, nothing extrapolated.

    The bound is the larger of two times. One is for the bytes that must cross main memory, at its peak bandwidth: each
    argument counts once at most, what is read at addresses from memory does not count, and nothing is taken to be in the
    cache beforehand. The other is for the busiest pipe of the least busy program, at peak rates without start-ups.

    The estimate simulates the busiest program, or the busiest of a sample where counting what all of them issue would take
    long, as often as a core runs one, with the rates of `timing.costs`, and adds the launch. A grid larger than the cores
    runs in rounds, which cost nothing of their own.

    Args:
        launch: from `record`.
        soc: a chip of which the costs are known.
        toolchain: compiler version.
        events: how many events of the simulation to keep.

    Raises:
        UnsupportedError: the chip or an instruction has no costs, or the control flow depends on what the kernel computes.
        OfflineError: the kernel does not fit.
    """
    costs = costs_of(soc)
    report = compile_kernel(launch, soc=soc, toolchain=toolchain)
    if not report.fits:
        raise OfflineError(f"{launch.name} does not fit on {soc} with toolchain {toolchain}: {report.message}")
    types = tuple((name, launch.signature[name]) for name in launch.arguments)
    program = _program(report.stages["final"], types, toolchain, costs, has_rare_branches(launch.kernel))
    programs = launch.grid[0] * launch.grid[1] * launch.grid[2]
    samples = max(_SAMPLES, _ISSUES // count(_issues(program, launch, 0)).issues)
    numbers = (
        sorted({round(i * (programs - 1) / (samples - 1)) for i in range(samples)})
        if samples < programs
        else range(programs)
    )
    counts = [count(_issues(program, launch, number)) for number in numbers]
    busiest = max(range(len(numbers)), key=lambda i: counts[i].seconds(costs))
    cores = min(programs, costs.vector_cores)
    rounds = ceil(programs / costs.vector_cores)
    touched = {stream: n * programs / len(numbers) for stream, n in total(c.once for c in counts).items()}
    sizes = {name: value.nbytes for name, value in launch.arguments.items() if isinstance(value, Memory)}
    least = {stream: min(nbytes, sizes.get(stream[0], nbytes)) for stream, nbytes in touched.items()}
    ports: dict[Pipe, float] = {"MTE2": costs.typical_load_port, "MTE3": costs.typical_store_port}
    rates = Rates(costs.cycle, costs.transfer_start, ports, costs.bandwidth / cores)
    first = {
        stream[0]: nbytes / touched[stream]
        for stream, nbytes in least.items()
        if not stream[1] and nbytes <= costs.cache_bytes and touched[stream]
    }
    cache = Cache(costs.cache_bytes / cores, min(1.0, rates.share / costs.typical_load_port), first)
    outcome = Core(rates, cache, events).run(_issues(program, launch, numbers[busiest]))
    certain = sum(nbytes for (_, _, gathered), nbytes in least.items() if not gathered)
    pipes = min(c.peak_seconds(costs) for c in counts) * programs / costs.vector_cores
    return Timing(
        kernel=launch.name,
        soc=soc,
        toolchain=toolchain,
        grid=launch.grid,
        bound=max(certain / costs.peak_bandwidth, pipes),
        estimate=outcome.seconds * rounds + costs.launch,
        busy={pipe: seconds * rounds for pipe, seconds in outcome.busy.items()},
        moved=round(sum(sum(c.moved.values()) for c in counts) * programs / len(numbers)),
        least=round(sum(least.values())),
        scalar_accesses=counts[busiest].scalars * rounds,
        waits=counts[busiest].waits * rounds,
        ub_bytes=report.ub.used,
        events=tuple(outcome.events),
    )


def _issues(program: Program, launch: LaunchRecord, number: int) -> Iterator[Issue]:
    values = launch.arguments

    def element(name: str, index: Any) -> Any:
        memory = values[name]
        if index is UNKNOWN or not isinstance(memory, Memory) or memory.values is None:
            return UNKNOWN
        return int(memory.values.view(-1)[index])

    scalars = [value for value in values.values() if not isinstance(value, Memory)]
    return program.run(number, *launch.grid, element, *scalars)


@functools.lru_cache(maxsize=64)
def _program(final: str, types: tuple[tuple[str, str], ...], toolchain: str, costs: ChipCosts, rare: bool) -> Program:
    generic = opt(tool(toolchain, "bishengir-opt"), final, "--mlir-print-op-generic")
    return translate(parse(generic), dict(types), costs, rare=rare)
