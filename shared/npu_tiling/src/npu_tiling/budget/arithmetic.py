"""Whole-number arithmetic that tilings share."""

from __future__ import annotations

FP32 = 4  # bytes of one number
INT32_END = 2**31  # one past the largest: offsets inside a tile are 32-bit


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def round_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least n."""
    return -(-n // unit) * unit


def equal_blocks(length: int, largest: int, unit: int) -> int:
    """The size of the fewest blocks of at most `largest` that cover `length`, so that the last one is not a short one."""
    return round_up(-(-length // -(-length // largest)), unit)
