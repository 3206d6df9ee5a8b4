"""The L2 cache of a launch: what it has before, and what programs that run at the same time read from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from ..launches import LaunchRecord
from .cache import Cache
from .cores import Cores, issues_of
from .costs import ChipCosts
from .counting import Stream
from .sharing import parts_read_first

_MOST_ISSUES = 500_000  # of all programs that run at the same time, to see what they share

L2State = Literal["cold", "warm", "dirty"]
"""What the L2 cache has before a launch: nothing of it; all of it, where the cache holds the launch; or written memory of
others, which must go to main memory before what is read can take its place."""


@dataclass(frozen=True)
class CacheDemand:
    """By stream the bytes that programs touch and that memory has; programs, those that run at a time, and the cores."""

    touched: Mapping[Stream, float]
    least: Mapping[Stream, float]
    programs: int
    running: int
    available: int


def cache_of(l2: L2State, costs: ChipCosts, traffic: CacheDemand, cores: Cores, launch: LaunchRecord) -> Callable[[], Cache]:
    """Makes the L2 cache as a core sees it at the start of a program."""
    touched, least = traffic.touched, traffic.least
    nbytes = sum(least.values())
    is_held = nbytes <= costs.cache_bytes
    reads = {stream: least[stream] for stream, all_of_it in touched.items() if not stream[1] and all_of_it}
    first = {stream[0]: n / touched[stream] for stream, n in reads.items() if n <= costs.cache_bytes}
    large = {stream[0] for stream, n in reads.items() if costs.cache_bytes < n < touched[stream]}
    if large:
        running = [issues_of(name, cores, launch, number) for number in range(traffic.running) for name in cores]
        found = parts_read_first(running, costs.cache_bytes / traffic.running, _MOST_ISSUES // len(running))
        first |= {argument: part for argument, part in found.items() if argument in large}
    alike = {
        stream[0] for stream, n in reads.items() if traffic.programs > 1 and touched[stream] >= 0.99 * traffic.programs * n
    }
    slowdown = 1 + (costs.same_address - 1) * traffic.running / traffic.available
    read = sum(reads.values())
    written_back = min(read, costs.cache_bytes) / read if l2 == "dirty" and read else 0.0
    return functools.partial(
        Cache,
        share=inf if is_held else costs.cache_bytes / traffic.running,
        first=first,
        dirty=written_back,
        common=dict.fromkeys(alike, slowdown),
        warm=l2 == "warm" and is_held,
    )
