"""What several cores read at about the same time: it crosses main memory once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from .instructions import WORKSPACE, Transfer
from .program import Issue
from .scalars import UNKNOWN


def parts_read_first(programs: Iterable[Iterable[Issue]], window: float, most: int) -> Mapping[str, float]:
    """Of each argument's bytes that programs read, the share that a program reads first: no other has just read them.

    Args:
        programs: what runs at the same time, in step.
        window: bytes that one program moves while the cache is filled once.
        most: how many issues of each program to look at.
    """
    touched: Counter[str] = Counter()
    distinct: Counter[str] = Counter()
    seen: set[Any] = set()
    for issues in programs:
        moved, mine = 0, set()
        for _, item, place in islice(issues, most):
            if not isinstance(item, Transfer) or item.pipe != "MTE2" or item.argument == WORKSPACE:
                continue
            moved += item.moved
            key = (item.argument, item.useful, place, int(moved / window))
            if key in mine:
                continue
            mine.add(key)
            touched[item.argument] += item.useful
            if key not in seen or place is None or any(number is UNKNOWN for number in place):
                seen.add(key)
                distinct[item.argument] += item.useful
    return {argument: distinct[argument] / nbytes for argument, nbytes in touched.items() if nbytes}
