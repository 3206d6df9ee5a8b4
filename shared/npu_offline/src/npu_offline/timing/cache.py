"""Which bytes of a core's transfers come from main memory, and which from the cache that all cores share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .instructions import Transfer
from .scalars import UNKNOWN


@dataclass
class Cache:
    """The L2 cache, as one core sees it while all others do the same.

    A transfer of memory that the core has read before comes from the cache if all cores together have moved less than the
    cache holds since then. Of memory read for the first time, the part that other cores read too comes from it. Writes go
    to main memory.

    Attributes:
        share: bytes of the cache that are one core's.
        relative_cost: time of a byte from the cache, as a part of the time of one from main memory.
        first: by argument, the part of its first readings that come from main memory.
    """

    share: float
    relative_cost: float
    first: Mapping[str, float]
    _moved: float = 0.0
    _seen: dict[Any, float] = field(default_factory=dict)

    def from_memory(self, item: Transfer, place: tuple[Any, ...] | None) -> float:
        """The bytes from main memory that take as long as this transfer's bytes do, wherever they come from."""
        self._moved += item.moved
        if item.pipe == "MTE3":
            return item.moved
        part = self.first.get(item.argument, 1.0)
        if place is not None and not any(number is UNKNOWN for number in place):
            key = (item.argument, item.useful, place)
            last = self._seen.get(key)
            self._seen[key] = self._moved
            if last is not None and self._moved - last <= self.share:
                part = 0.0
        return item.moved * (part + (1 - part) * self.relative_cost)
