"""One core of a simulation: its scalar unit, its pipes with what they were issued, and the flags between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import OfflineError
from ..module.operations import PIPES, Pipe
from .cache import Cache, Path
from .instructions import (
    Barrier,
    CubeStep,
    Item,
    ScalarAccess,
    SetCrossFlag,
    SetFlag,
    Transfer,
    Vector,
    WaitCrossFlag,
    WaitFlag,
)
from .program import Issue

Note = Callable[[Pipe, float, float, str, int], None]
"""Called for each event: pipe, start, end, name, amount."""


@dataclass(frozen=True)
class Rates:
    """The rates of a core. Times in seconds.

    Attributes:
        cycle: of its clock.
        issue: of the scalar unit, each instruction that it issues.
        start: of a transfer, before its bytes move.
        latency: from a transfer's last byte until what waits for it goes on.
        memory_latency: the same, further, where all bytes cross main memory.
        ports: bytes per second by pipe.
    """

    cycle: float
    issue: float
    start: float
    latency: float
    memory_latency: float
    ports: Mapping[Pipe, float]


class CrossFlags:
    """Flags between the cube core of a group and its vector cores.

    A flag that the cube core sets is set for each vector core. A flag that vector cores set is set for the cube core once
    each of them has set it. Flags count: a flag that is set twice can be waited for twice.
    """

    def __init__(self, cores: Iterable[str]) -> None:
        self._cores = tuple(cores)
        self._times: dict[tuple[str, str, int], deque[float]] = {}

    def set(self, source: str, flag: int, time: float) -> None:
        """`source` sets a flag for all cores of the other kind."""
        for target in self._others(source):
            self._times.setdefault((source, target, flag), deque()).append(time)

    def take(self, target: str, flag: int) -> float | None:
        """When the last of the other kind of cores set a flag, which this clears; None as long as one has not."""
        queues = [self._times.get((source, target, flag)) for source in self._others(target)]
        if not queues or not all(queues):
            return None
        return max(queue.popleft() for queue in queues if queue)

    def check_done(self) -> None:
        """Raises OfflineError: a core sets a flag that nothing waits for."""
        for (source, target, flag), times in self._times.items():
            if times:
                raise OfflineError(f"{source} sets flag {flag} for {target}, which nothing waits for")

    def _others(self, core: str) -> list[str]:
        return [other for other in self._cores if other[:3] != core[:3]]


class Lane:
    """A pipe: when the next instruction may start, when all before it are done, and the queue of issued items."""

    def __init__(self) -> None:
        self.free = 0.0
        self.done = 0.0
        self.busy = 0.0
        self.queue: deque[tuple[Item, float]] = deque()
        self.paths: deque[Path] = deque()  # of each transfer in the queue
        self.transfer: Transfer | None = None
        self.began = 0.0
        self.moving = 0.0  # when the rest of the transfer's bytes start to move
        self.left = 0.0
        self.path = Path(0.0)
        self.port = 0.0  # bytes per second that the transfer reaches at most

    def rate(self, share: float) -> float:
        """Bytes per second of the transfer, if its part of main memory's bandwidth is `share`."""
        part = self.path.part
        return 1 / (part / min(self.port, share) + (1 - part) / self.port)

    def work(self, start: float, free: float, done: float) -> float:
        """An instruction holds the pipe from `start` to `free`, its result is there at `done`. Returns when it is alone."""
        began = max(start, self.done)
        self.free, self.done = free, max(self.done, done)
        self.busy += max(0.0, self.done - began)
        return began


class Core:
    """One core and what it was issued so far. `name` begins with its kind, "AIC" or "AIV"."""

    def __init__(
        self, name: str, issues: Iterable[Issue], rates: Rates, cache: Cache, crossing: CrossFlags, note: Note
    ) -> None:
        self.name = name
        self.lanes = {pipe: Lane() for pipe in PIPES}
        self._issues: Iterator[Issue] = iter(issues)
        self._rates = rates
        self._cache = cache
        self._crossing = crossing
        self._note = note
        self._flags: dict[tuple[Pipe, Pipe, int], deque[float]] = {}
        self._held: Item | None = None  # what the scalar unit waits for

    def issue(self) -> bool:
        """Let the scalar unit issue until it has to wait; whether it did anything."""
        if self._held is not None and not self._resume(self._held):
            return False
        resumed, self._held = self._held is not None, None
        scalar, cycle = self.lanes["S"], self._rates.cycle
        for cycles, item, place in self._issues:
            self._occupy(cycles * cycle)
            match item:
                case Vector() | CubeStep():
                    self._occupy(self._rates.issue)
                    self.lanes[item.pipe].queue.append((item, scalar.free))
                case Transfer():
                    self._occupy(self._rates.issue)
                    if not item.moved:  # all of it is masked
                        continue
                    self.lanes[item.pipe].queue.append((item, scalar.free))
                    self.lanes[item.pipe].paths.append(self._cache.path(item, place))
                case SetCrossFlag():
                    self.lanes[item.pipe].queue.append((item, scalar.free))
                case ScalarAccess():
                    start = scalar.free
                    self._occupy(item.cycles * cycle)
                    self._note("S", start, scalar.free, item.name, item.nbytes)
                case SetFlag(source="S"):
                    self._signal(item, scalar.free)
                case SetFlag():
                    self.lanes[item.source].queue.append((item, scalar.free))
                case WaitFlag(target="S") | WaitCrossFlag() | Barrier(pipe=None):
                    self._held = item
                    return True
                case WaitFlag():
                    self.lanes[item.target].queue.append((item, scalar.free))
                case Barrier():
                    if item.pipe != "S" and item.pipe is not None:
                        self.lanes[item.pipe].queue.append((item, scalar.free))
            resumed = True
        return resumed

    def advance(self) -> bool:
        """Run every pipe until each is idle, moves bytes or waits for a flag; whether there was anything to run."""
        ran = False
        while sum(self._advance(pipe, lane) for pipe, lane in self.lanes.items() if lane.queue):
            ran = True
        return ran

    def end_transfer(self, pipe: Pipe, end: float) -> None:
        """A pipe's transfer has moved its last byte."""
        lane = self.lanes[pipe]
        assert lane.transfer is not None
        done = end + self._rates.latency + lane.path.part * self._rates.memory_latency
        began = lane.work(lane.began, end, done)
        self._note(pipe, began, lane.done, lane.transfer.name, lane.transfer.moved)
        lane.transfer = None

    @property
    def latest(self) -> float:
        """When all that was issued is done."""
        return max(max(lane.free, lane.done) for lane in self.lanes.values())

    def check_done(self) -> None:
        """Raises OfflineError: something waits for a flag that nothing sets, or sets one that nothing waits for."""
        if self._held is not None:
            raise OfflineError(f"the scalar unit of {self.name} waits for {self._held}, which nothing sets")
        for pipe, lane in self.lanes.items():
            if lane.queue:
                raise OfflineError(f"{pipe} of {self.name} waits for {lane.queue[0][0]}, which nothing sets")
        for (source, target, event), times in self._flags.items():
            if times:
                raise OfflineError(f"{source} of {self.name} sets flag {event} for {target}, which nothing waits for")

    def _resume(self, item: Item) -> bool:
        """Whether the scalar unit can go on after what it waits for."""
        scalar = self.lanes["S"]
        match item:
            case WaitFlag():
                times = self._flags.get((item.source, item.target, item.event))
                if not times:
                    return False
                scalar.free = max(scalar.free, times.popleft())
            case WaitCrossFlag():
                time = self._crossing.take(self.name, item.flag)
                if time is None:
                    return False
                scalar.free = max(scalar.free, time)
            case Barrier():
                if any(lane.queue or lane.transfer is not None for lane in self.lanes.values()):
                    return False
                latest = self.latest
                for lane in self.lanes.values():
                    lane.free = latest
        return True

    def _advance(self, pipe: Pipe, lane: Lane) -> bool:
        """Run items from a pipe's queue until one has to wait; returns whether any ran."""
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
                case SetCrossFlag():
                    self._crossing.set(self.name, item.flag, max(lane.done, start))
                case Barrier():
                    lane.free = max(start, lane.done)
                case Vector() | CubeStep():
                    free = start + item.busy * self._rates.cycle
                    began = lane.work(start, free, free + item.latency * self._rates.cycle)
                    self._note(pipe, began, max(began, lane.done), item.name, item.amount)
                case Transfer():
                    self._start(item, pipe, lane, start)
            lane.queue.popleft()
            taken = True
        return taken

    def _start(self, item: Transfer, pipe: Pipe, lane: Lane, start: float) -> None:
        lane.transfer, lane.began = item, start
        lane.moving = start + self._rates.start
        lane.left = item.moved
        lane.path = lane.paths.popleft()
        lane.port = self._rates.ports[pipe] / lane.path.slowdown
        if item.cycles:
            lane.port = min(lane.port, item.moved / (item.cycles * self._rates.cycle))

    def _occupy(self, seconds: float) -> None:
        """The scalar unit works."""
        self.lanes["S"].free += seconds
        self.lanes["S"].busy += seconds

    def _signal(self, item: SetFlag, time: float) -> None:
        self._flags.setdefault((item.source, item.target, item.event), deque()).append(time)
