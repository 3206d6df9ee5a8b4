"""A discrete event simulation of one core's pipes.

The scalar unit issues in program order, and never waits for a pipe unless a flag or a barrier makes it. Each pipe takes what
it was issued in order. A vector instruction lets the next one follow after its repeats, and its result is there some cycles
later, which a flag or barrier waits for. A DMA transfer keeps its pipe for a start-up time, then moves bytes: at the rate of
the core's port, and no faster than the core's share of memory bandwidth, of which MTE2 and MTE3 get half each while both
move bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..errors import OfflineError
from .cache import Cache
from .instructions import PIPES, Barrier, Item, Pipe, ScalarAccess, SetFlag, Transfer, Vector, WaitFlag
from .program import Issue

_MOVERS: tuple[Pipe, Pipe] = ("MTE2", "MTE3")


@dataclass(frozen=True)
class Event:
    """Something that kept a pipe busy. Times in seconds; `amount` is elements of a vector instruction, else bytes."""

    pipe: Pipe
    start: float
    end: float
    name: str
    amount: int


@dataclass(frozen=True)
class Rates:
    """One core's rates: seconds of a cycle and of a transfer's start, bytes per second of the ports and of the share."""

    cycle: float
    start: float
    ports: Mapping[Pipe, float]
    share: float


@dataclass
class Outcome:
    """What a simulation found: seconds in all and of each pipe, and the first events."""

    seconds: float
    busy: dict[Pipe, float]
    events: list[Event]


class _Lane:
    """A pipe: when the next instruction may start, when all before are done, and what it was issued."""

    def __init__(self) -> None:
        self.free = 0.0
        self.done = 0.0
        self.busy = 0.0
        self.queue: deque[tuple[Item, float]] = deque()
        self.loads: deque[float] = deque()  # bytes of each transfer in the queue, as from_memory counts them
        self.transfer: Transfer | None = None
        self.began = 0.0
        self.moving = 0.0  # when the rest of the transfer's bytes start to move
        self.left = 0.0


class Core:
    """One core and what it was issued so far."""

    def __init__(self, rates: Rates, cache: Cache, max_events: int) -> None:
        self._rates = rates
        self._cache = cache
        self._lanes = {pipe: _Lane() for pipe in PIPES}
        self._flags: dict[tuple[Pipe, Pipe, int], deque[float]] = {}
        self._events: list[Event] = []
        self._max_events = max_events

    def run(self, issues: Iterable[Issue]) -> Outcome:
        """Simulate until all is done.

        Raises:
            OfflineError: a pipe waits for a flag that nothing sets.
        """
        scalar = self._lanes["S"]
        for cycles, item, place in issues:
            scalar.free += cycles * self._rates.cycle
            scalar.busy += cycles * self._rates.cycle
            if isinstance(item, Transfer):
                lane = self._lanes[item.pipe]
                lane.queue.append((item, scalar.free))
                lane.loads.append(self._cache.from_memory(item, place))
            else:
                self._issue(item, scalar)
        self._drain()
        for pipe, lane in self._lanes.items():
            if lane.queue:
                raise OfflineError(f"{pipe} waits for {lane.queue[0][0]}, which nothing sets")
        seconds = max(max(lane.free, lane.done) for lane in self._lanes.values())
        return Outcome(seconds, {pipe: lane.busy for pipe, lane in self._lanes.items()}, self._events)

    def _issue(self, item: Item, scalar: _Lane) -> None:
        """Anything but a transfer."""
        match item:
            case Vector():
                self._lanes["V"].queue.append((item, scalar.free))
            case ScalarAccess():
                seconds = item.cycles * self._rates.cycle
                self._note("S", scalar.free, scalar.free + seconds, item.name, item.nbytes)
                scalar.free += seconds
                scalar.busy += seconds
            case SetFlag():
                if item.source == "S":
                    self._signal(item, scalar.free)
                else:
                    self._lanes[item.source].queue.append((item, scalar.free))
            case WaitFlag():
                if item.target == "S":
                    scalar.queue.append((item, scalar.free))
                    self._drain(lambda: not scalar.queue)  # what follows may move bytes beside what is still moving
                    if scalar.queue:
                        raise OfflineError(f"the scalar unit waits for {item}, which nothing sets")
                else:
                    self._lanes[item.target].queue.append((item, scalar.free))
            case Barrier(pipe=None):
                self._drain()
                latest = max(max(lane.free, lane.done) for lane in self._lanes.values())
                for lane in self._lanes.values():
                    lane.free = latest
            case Barrier():
                if item.pipe != "S" and item.pipe is not None:
                    self._lanes[item.pipe].queue.append((item, scalar.free))

    def _drain(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Run every pipe until each is idle or waits for a flag, or until it is enough."""
        moved = True
        while moved:
            while sum(self._advance(pipe, lane) for pipe, lane in self._lanes.items()):
                pass
            moved = not enough() and self._finish_transfer()

    def _advance(self, pipe: Pipe, lane: _Lane) -> bool:
        """Take from a pipe's queue what can be taken; whether there was anything."""
        taken = False
        while lane.queue and lane.transfer is None:
            item, issued = lane.queue[0]
            start = max(lane.free, issued)
            match item:
                case WaitFlag():
                    times = self._flags.get((item.source, item.target, item.event))
                    if not times:
                        return taken
                    lane.free = max(start, times.popleft())
                case SetFlag():
                    self._signal(item, max(lane.done, start))
                case Barrier():
                    lane.free = max(start, lane.done)
                case Vector():
                    seconds = item.busy * self._rates.cycle
                    lane.free = start + seconds
                    lane.done = max(lane.done, lane.free + item.latency * self._rates.cycle)
                    lane.busy += seconds
                    self._note(pipe, start, lane.free, item.name, item.elements)
                case Transfer():
                    lane.transfer, lane.began = item, start
                    lane.moving = start + self._rates.start
                    lane.left = lane.loads.popleft()
            lane.queue.popleft()
            taken = True
        return taken

    def _finish_transfer(self) -> bool:
        """End the transfer that ends first. No other can start before: whoever could start one waits for an end."""
        lanes = [(pipe, self._lanes[pipe]) for pipe in _MOVERS if self._lanes[pipe].transfer is not None]
        if not lanes:
            return False
        if len(lanes) == 1:
            pipe, lane = lanes[0]
            self._end(pipe, lane, lane.moving + lane.left / self._rate(pipe, 1))
            return True
        (first_pipe, first), (second_pipe, second) = sorted(lanes, key=lambda entry: entry[1].moving)
        alone = self._rate(first_pipe, 1)
        if first.moving + first.left / alone <= second.moving:
            self._end(first_pipe, first, first.moving + first.left / alone)
            return True
        first.left -= (second.moving - first.moving) * alone
        first.moving = second.moving
        ends = [lane.moving + lane.left / self._rate(pipe, 2) for pipe, lane in lanes]
        end = min(ends)
        ended = ends.index(end)
        pipe, other = lanes[1 - ended]
        other.left = max(0.0, other.left - (end - other.moving) * self._rate(pipe, 2))
        other.moving = end
        self._end(*lanes[ended], end)
        return True

    def _rate(self, pipe: Pipe, movers: int) -> float:
        return min(self._rates.ports[pipe], self._rates.share / movers)

    def _end(self, pipe: Pipe, lane: _Lane, end: float) -> None:
        assert lane.transfer is not None
        self._note(pipe, lane.began, end, lane.transfer.name, lane.transfer.moved)
        lane.busy += end - lane.began
        lane.free = lane.done = end
        lane.transfer = None

    def _signal(self, item: SetFlag, time: float) -> None:
        self._flags.setdefault((item.source, item.target, item.event), deque()).append(time)

    def _note(self, pipe: Pipe, start: float, end: float, name: str, amount: int) -> None:
        if len(self._events) < self._max_events:
            self._events.append(Event(pipe, start, end, name, amount))
