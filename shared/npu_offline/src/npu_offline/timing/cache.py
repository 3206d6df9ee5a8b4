"""Which bytes of a core's transfers cross main memory, and which come from the L2 cache that all cores share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .instructions import WORKSPACE, Transfer
from .scalars import UNKNOWN


@dataclass(frozen=True)
class Path:
    """How a transfer's bytes go.

    Attributes:
        part: the share that the core waits for main memory to give; the cache gives or takes the rest.
        slowdown: times as long, at the core's port.
    """

    part: float
    slowdown: float = 1.0


@dataclass
class Cache:
    """The L2 cache, as one core sees it while all others do the same.

    Memory that the core has read before comes from the cache if all cores together have moved fewer bytes since then than
    the cache holds. Of memory read for the first time, the part that other cores read too comes from it. It takes what is
    written at once, and writes it to main memory later; but not the workspace: a few tiles that are overwritten many times.

    Attributes:
        share: bytes of the cache for one core, or one group of cores; infinite if the cache holds the whole launch.
        first: by argument, the share of first reads that come from main memory.
        dirty: bytes that must be written to main memory for each byte that is read from it.
        common: by argument that all cores read alike, `Path.slowdown` of its reads.
        warm: whether the cache held everything before the launch, and holds what it writes.
        read, written: bytes so far that main memory gives and takes.
    """

    share: float
    first: Mapping[str, float]
    dirty: float = 0.0
    common: Mapping[str, float] = field(default_factory=dict)
    warm: bool = False
    read: float = 0.0
    written: float = 0.0
    _moved: float = 0.0
    _seen: dict[Any, float] = field(default_factory=dict)

    def path(self, item: Transfer, place: tuple[Any, ...] | None) -> Path:
        """How a transfer's bytes go."""
        self._moved += item.moved
        if item.argument == WORKSPACE:
            return Path(0.0)
        if item.pipe != "MTE2":
            self.written += 0 if self.warm else item.moved
            return Path(0.0)
        slowdown = self.common.get(item.argument, 1.0)
        if self.warm or self._is_held(item, place):
            return Path(0.0, slowdown)
        part = self.first.get(item.argument, 1.0)
        self.read += item.moved * part
        self.written += item.moved * part * self.dirty
        return Path(part, slowdown)

    def _is_held(self, item: Transfer, place: tuple[Any, ...] | None) -> bool:
        """Whether the core read the same memory before and the cache still holds it."""
        if place is None or any(number is UNKNOWN for number in place):
            return False
        key = (item.argument, item.useful, place)
        last = self._seen.get(key)
        self._seen[key] = self._moved
        return last is not None and self._moved - last <= self.share
