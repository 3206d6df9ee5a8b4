"""The cost of a vector instruction, or library call, by its name and shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil, log2, prod

from ..errors import UnsupportedError
from .costs import MERGED, SORT_32, VECTOR_BYTES, VECTOR_COSTS, VectorCost
from .instructions import Vector

_ADD, _REDUCE = VECTOR_COSTS["vadd"], VECTOR_COSTS["reduce"]
_LIBRARY = {  # the library's names, and the operations' names for the same
    "copy_ubuf": "copy",
    "broadcast_scalar": "vbrc",
    "broadcast_last_axis": "vbrc",
    "broadcast_first_axis": "vbrc",
    "broadcast_middle_axis": "vbrc",
    "arange": "varange",
}
_COSTS = {**VECTOR_COSTS, **{name: VECTOR_COSTS[known] for name, known in _LIBRARY.items()}}
_BASE = re.compile(rf"^({'|'.join(sorted(_COSTS, key=len, reverse=True))})(_|$)")
_SORT = re.compile("v?sort(_|$)")
_CHUNK = 64  # lanes of fp32 that vcadd reduces to one


def vector(name: str, shape: Sequence[int], itemsize: float, reduced: Sequence[int] | None, head: float) -> Vector:
    """The cost of one vector instruction.

    Args:
        name: of the library function, or of the operation without its dialect.
        shape: of its largest operand, rows of contiguous elements.
        itemsize: bytes of the widest element it handles.
        reduced: the dimensions that a reduction sums over; None for anything else.
        head: cycles from its start to its first result.

    Raises:
        UnsupportedError: the instruction is in no table.
    """
    elements = prod(shape)
    peak = elements * itemsize / VECTOR_BYTES
    if reduced is not None:
        busy, latency = _reduction(shape, itemsize, reduced, head)
        return Vector(name, elements, busy, head + latency, peak)
    if _SORT.match(name):
        busy, latency = _sort(shape)
        return Vector(name, elements, busy, head + latency, peak)
    cost = _cost(name)
    return Vector(name, elements, cost.per_repeat * repeats(shape, itemsize), head + cost.latency, peak)


def repeats(shape: Sequence[int], itemsize: float) -> int:
    """Repeats of an instruction over rows: each row starts one."""
    return prod(shape[:-1]) * ceil(shape[-1] * itemsize / VECTOR_BYTES) if shape else 1


def _cost(name: str) -> VectorCost:
    found = _BASE.match(name)
    if found is None:
        raise UnsupportedError(f"the time model has no cost for the vector instruction {name}")
    return _COSTS[found[1]]


def _sort(shape: Sequence[int]) -> tuple[float, float]:
    """Cycles of sorting rows: lists of 32, of which four are merged at a time; keys leave their places at the end."""
    rows, length = prod(shape[:-1]), shape[-1]
    lists = ceil(length / 32)
    levels = ceil(log2(max(1, lists)) / 2)
    ends = VECTOR_COSTS["deinterleave"].per_repeat * ceil(8 * length / VECTOR_BYTES)
    busy = SORT_32.per_repeat * lists + MERGED.per_repeat * length * levels + ends
    return rows * busy, SORT_32.latency + MERGED.latency * levels


def _reduction(shape: Sequence[int], itemsize: float, reduced: Sequence[int], head: float) -> tuple[float, float]:
    """Cycles of a reduction: halves are added until a row is 64 lanes wide, which one instruction reduces.

    Over another dimension than the last, whole rows are added pairwise.
    """
    length = prod(shape[axis] for axis in reduced)
    kept = prod(shape) // max(1, length)
    if len(shape) - 1 not in reduced:
        levels = ceil(log2(max(2, length)))
        return _ADD.per_repeat * (length - 1) * repeats((kept,), itemsize), levels * (head + _ADD.latency)
    levels = max(0, ceil(log2(max(1, length / _CHUNK))))
    # Each level waits for the one before. All levels together add row - 64 lanes.
    adds = kept * max(0, ceil(length / _CHUNK) - 1) * ceil(_CHUNK * itemsize / VECTOR_BYTES)
    busy = _ADD.per_repeat * adds + levels * (head + _ADD.latency) + _REDUCE.per_repeat * kept
    return busy, _REDUCE.latency
