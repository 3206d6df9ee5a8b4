"""A discrete event simulation of the pipes of one core, or of a cube core and its vector cores.

The scalar unit issues in program order and waits only for flags and barriers. Each pipe runs its items in order. The next
vector instruction may start after the repeats of the one before, the next transfer after the bytes of the one before; flags
and barriers also wait for latencies. A transfer has a start-up time, then moves bytes at the rate of the core's port. Bytes
that main memory gives also share the core's part of its bandwidth: each pipe that moves such bytes has a share in proportion
to the part of its bytes that are such. A pipe is busy while one of its instructions is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..module.operations import PIPES, Pipe
from .cache import Cache
from .core import Core, CrossFlags, Lane, Rates
from .program import Issue

_MOVERS: tuple[Pipe, ...] = ("MTE2", "MTE3", "FIX")


@dataclass(frozen=True)
class Event:
    """Something that kept a pipe busy.

    Attributes:
        pipe: its name.
        start, end: in seconds.
        name: of the instruction.
        amount: elements of a vector instruction, multiplications of a matrix product, else bytes.
        core: "AIV" or "AIC"; where cores of both kinds work together "AIC", "AIV0" and "AIV1".
    """

    pipe: Pipe
    start: float
    end: float
    name: str
    amount: int
    core: str


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        seconds: in all.
        read, written: bytes that main memory gives and takes.
        busy: seconds of each core's pipes.
        events: the first.
    """

    seconds: float
    read: float
    written: float
    busy: Mapping[str, Mapping[Pipe, float]]
    events: Sequence[Event]


def simulate(programs: Mapping[str, tuple[Iterable[Issue], Rates]], share: float, cache: Cache, max_events: int) -> Outcome:
    """Simulate cores that run one program together, until all is done.

    Args:
        programs: what each core's scalar unit issues, and the core's rates, by the core's name: see `Event`.
        share: bytes per second of main memory that these cores have, of loads.
        cache: what the cores see of it.
        max_events: how many events to keep.

    Raises:
        OfflineError: a core waits for a flag that nothing sets, or sets one that nothing waits for.
    """
    events: list[Event] = []

    def core_of(name: str, issues: Iterable[Issue], rates: Rates) -> Core:
        def note(pipe: Pipe, start: float, end: float, what: str, amount: int) -> None:
            if len(events) < max_events:
                events.append(Event(pipe, start, end, what, amount, name))

        return Core(name, issues, rates, cache, crossing, note)

    crossing = CrossFlags(programs)
    cores = [core_of(name, *program) for name, program in programs.items()]
    moving = True
    while moving:
        while any([core.issue() for core in cores] + [core.advance() for core in cores]):
            pass
        moving = _finish_transfer(cores, share)
    for core in cores:
        core.check_done()
    crossing.check_done()
    busy = {core.name: {pipe: core.lanes[pipe].busy for pipe in PIPES} for core in cores}
    return Outcome(max(core.latest for core in cores), cache.read, cache.written, busy, events)


def _finish_transfer(cores: Sequence[Core], share: float) -> bool:
    """End the transfer that ends first. No other can start before: everything else waits."""
    movers = [(core, pipe, lane) for core in cores for pipe in _MOVERS if (lane := core.lanes[pipe]).transfer is not None]
    if not movers:
        return False
    time = min(lane.moving for _, _, lane in movers)
    while True:
        active = [mover for mover in movers if mover[2].moving <= time]
        sharing = max(1.0, sum(lane.path.part for _, _, lane in active))
        ends = [time + lane.left / lane.rate(share / sharing) for _, _, lane in active]
        first = min(ends)
        joins = min((lane.moving for _, _, lane in movers if lane.moving > time), default=first)
        until = min(first, joins)
        for _, _, lane in active:
            _move(lane, until, share / sharing)
        if first <= joins:
            core, pipe, _ = active[ends.index(first)]
            core.end_transfer(pipe, first)
            return True
        time = until


def _move(lane: Lane, until: float, share: float) -> None:
    lane.left = max(0.0, lane.left - (until - lane.moving) * lane.rate(share))
    lane.moving = until
