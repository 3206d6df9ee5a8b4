"""Which bytes of a core's transfers come from main memory, and which from the cache that all cores share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .instructions import WORKSPACE, Transfer
from .scalars import UNKNOWN


@dataclass
class Cache:
    """The L2 cache, as one core sees it while all others do the same.

    A transfer of memory that the core has read before comes from the cache if all cores together have moved less than the
    cache holds since then. Of memory read for the first time, the part that other cores read too comes from it. Writes go
    to main memory, except to the workspace: a few tiles that are overwritten again and again never leave the cache.

    Attributes:
        share: bytes of the cache that are one core's, or one group's of cores; without limit if it holds all of a launch.
        first: by argument, the part of its first readings that come from main memory.
    """

    share: float
    first: Mapping[str, float]
    _moved: float = 0.0
    _seen: dict[Any, float] = field(default_factory=dict)

    def part_from_memory(self, item: Transfer, place: tuple[Any, ...] | None) -> float:
        """The part of a transfer's bytes that crosses main memory; the rest comes from the cache or stays there."""
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
