"""Which bytes of a core's transfers cross main memory, and which come from the L2 cache that all cores share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .instructions import WORKSPACE, Transfer
from .scalars import UNKNOWN


@dataclass
class Cache:
    """The L2 cache, as one core sees it while all others do the same.

    Memory that the core has read before comes from the cache if all cores together have moved fewer bytes since then than
    the cache holds. Of memory read for the first time, the part that other cores read too comes from it. Writes go to main
    memory, except those to the workspace: a few tiles that are overwritten many times stay in the cache.

    Attributes:
        share: bytes of the cache for one core, or one group of cores; infinite if the cache holds the whole launch.
        first: by argument, the share of first reads that come from main memory.
    """

    share: float
    first: Mapping[str, float]
    _moved: float = 0.0
    _seen: dict[Any, float] = field(default_factory=dict)

    def part_from_memory(self, item: Transfer, place: tuple[Any, ...] | None) -> float:
        """The share of a transfer's bytes that crosses main memory; the rest stays in the cache."""
        self._moved += item.moved
        if item.argument == WORKSPACE:
            return 0.0
        if item.pipe != "MTE2":
            return 1.0
        if place is not None and not any(number is UNKNOWN for number in place):
            key = (item.argument, item.useful, place)
            last = self._seen.get(key)
            self._seen[key] = self._moved
            if last is not None and self._moved - last <= self.share:
                return 0.0
        return self.first.get(item.argument, 1.0)
