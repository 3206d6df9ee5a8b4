"""Parts of a range: of tokens, and of columns of the vocabulary."""

from __future__ import annotations

from math import ceil

UNIT = 128  # tokens and columns of a chunk are multiples of this: whole tiles of matrix products


def token_groups(tokens: int, longest: int) -> tuple[slice, ...]:
    """Groups of tokens whose sums of dx are in memory at a time: all of them, or a power of two units each."""
    if tokens <= longest:
        return (slice(0, tokens),)
    return exactly(tokens, UNIT << ((longest // UNIT).bit_length() - 1))


def joined(parts: tuple[slice, ...], count: int) -> tuple[slice, ...]:
    """Neighbours as one, `count` at a time."""
    groups = (parts[first : first + count] for first in range(0, len(parts), count))
    return tuple(slice(group[0].start, group[-1].stop) for group in groups)


def rounded(number: float) -> int:
    """The nearest multiple of the unit, at least one."""
    return max(1, round(number / UNIT)) * UNIT


def exactly(total: int, length: int) -> tuple[slice, ...]:
    """Parts of that length; the last may be shorter."""
    return tuple(slice(first, min(first + length, total)) for first in range(0, total, length))


def equally(total: int, longest: int) -> tuple[slice, ...]:
    """Parts of one length, a multiple of the unit, except the last: a kernel is compiled for each length."""
    if not total:
        return ()
    length = ceil(total / ceil(total / longest) / UNIT) * UNIT
    return exactly(total, min(length, longest) if longest >= UNIT else longest)


def evenly(total: int, longest: int) -> tuple[slice, ...]:
    """As few parts as possible, whose lengths differ by at most one unit."""
    if total <= longest:
        return (slice(0, total),) if total else ()
    unit = UNIT if longest % UNIT == 0 else 1
    units, count = ceil(total / unit), ceil(total / longest)
    ends = [min(total, (units * (i + 1) // count) * unit) for i in range(count)]
    return tuple(slice(first, end) for first, end in zip([0, *ends], ends, strict=False))
