"""Times and memory of several calls, taken in turns.

Each turn has an order of its own: a GPU at its power limit is faster after a call that leaves units idle, and in one order
the same call would always come after it.

Three clocks, because they answer different questions:

- device time: time stamps in the device's queue around one call, the last-level cache overwritten before it. The
  overwriting also keeps the device busy until the host has queued the whole call, so that no host time is counted.
- wall time per call: the host's clock over many calls in a row with one synchronisation at the end, caches warm. What a
  loop of such calls costs: the larger of device and host time.
- host time per call: the host's clock around the call alone, without waiting for the device, whose queue is kept short.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from .devices import MIB, Device

Calls = Mapping[str, Callable[[], Any]]

MIN_SAMPLES = 10
MAX_SAMPLES = 200
_WARM_UP_CALLS = 3
_MEMORY_SAMPLES = 3
_WALL_BATCHES = 11
_QUEUED_CALLS = 8  # host times between two synchronisations; queues hold about a thousand launches
_HEAD_START = 2.0  # the device is kept busy for this many times the host's time for a call
_MAX_FLUSHES = 64


@dataclass(frozen=True)
class Quantiles:
    """The median and the 20th and 80th percentiles of `samples` measurements."""

    p50: float
    p20: float
    p80: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Of at least two measurements, by linear interpolation."""
        if len(values) < 2:
            raise ValueError(f"values has {len(values)} measurements and must have at least 2.")
        fifths = statistics.quantiles(values, n=5, method="inclusive")
        return cls(statistics.median(values), fifths[0], fifths[3], len(values))


def device_times(calls: Calls, device: Device, budget_s: float) -> dict[str, Quantiles]:
    """Milliseconds of each call on the device, cache cold. `budget_s` is meant for each call."""
    flush_ms = _batch_ms(device.flush, device, 5)
    flushes, round_ms = {}, 0.0
    for name, call in calls.items():
        _warm_up(call, device)
        host_ms = Quantiles.of(_host_samples(call, device, _QUEUED_CALLS)).p80 / 1e3 if device.asynchronous else 0.0
        flushes[name] = min(_MAX_FLUSHES, max(1, ceil(_HEAD_START * host_ms / flush_ms)))
        round_ms += flushes[name] * flush_ms + _batch_ms(call, device, 3)
    stamps: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    with _no_garbage_collection():
        for name in _turns(calls, _count(budget_s * len(calls), round_ms)):
            for _ in range(flushes[name]):
                device.flush()
            start = device.stamp()
            calls[name]()
            stamps[name].append((start, device.stamp()))
        device.synchronize()
    return {name: Quantiles.of([device.elapsed_ms(*pair) for pair in pairs]) for name, pairs in stamps.items()}


def wall_times(calls: Calls, device: Device, budget_s: float) -> dict[str, Quantiles]:
    """Milliseconds per call of each call in a row of its own kind, cache warm: quantiles over batches of calls."""
    lengths = {}
    for name, call in calls.items():
        _warm_up(call, device)
        lengths[name] = max(1, int(budget_s * 1e3 / _WALL_BATCHES / _batch_ms(call, device, 3)))
    batches: dict[str, list[float]] = {name: [] for name in calls}
    with _no_garbage_collection():
        for name in _turns(calls, _WALL_BATCHES):
            batches[name].append(_batch_ms(calls[name], device, lengths[name]))
    return {name: Quantiles.of(values) for name, values in batches.items()}


def host_times(calls: Calls, device: Device, budget_s: float) -> dict[str, Quantiles]:
    """Microseconds that each call keeps the host."""
    counts = {}
    for name, call in calls.items():
        _warm_up(call, device)
        counts[name] = _count(budget_s, _batch_ms(call, device, 3))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with _no_garbage_collection():
        for done in range(0, max(counts.values(), default=0), _QUEUED_CALLS):
            for name, call in calls.items():
                samples[name] += _host_samples(call, device, min(_QUEUED_CALLS, counts[name] - done))
    return {name: Quantiles.of(values) for name, values in samples.items()}


def peak_memory(make_call: Callable[[], Callable[[], Any]], device: Device) -> Quantiles | None:
    """Most MiB allocated during a call above what is allocated now; None where the device does not count.

    What `make_call` allocates and the call needs (the graph that a backward reads) counts.
    """
    before = device.allocated()
    if before is None:
        return None
    call = make_call()
    _warm_up(call, device)
    peaks = []
    for _ in range(_MEMORY_SAMPLES):
        device.reset_peak()
        call()
        device.synchronize()
        peaks.append(((device.peak() or 0) - before) / MIB)
    return Quantiles.of(peaks)


def _turns(calls: Calls, count: int) -> Iterator[str]:
    """Every name `count` times, each turn in an order of its own, the same in every run."""
    order = random.Random(0)
    for _ in range(count):
        yield from order.sample(list(calls), len(calls))


def _warm_up(call: Callable[[], Any], device: Device) -> None:
    for _ in range(_WARM_UP_CALLS):
        call()
    device.synchronize()


def _count(budget_s: float, each_ms: float) -> int:
    return max(MIN_SAMPLES, min(MAX_SAMPLES, int(budget_s * 1e3 / max(each_ms, 1e-6))))


def _batch_ms(call: Callable[[], Any], device: Device, count: int) -> float:
    device.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    device.synchronize()
    return max((time.perf_counter() - start) * 1e3 / count, 1e-6)


def _host_samples(call: Callable[[], Any], device: Device, count: int) -> list[float]:
    """Microseconds of so many calls in a row, `_QUEUED_CALLS` at most; none for a count below 1."""
    samples = []
    device.synchronize()
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    device.synchronize()
    return samples


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
