"""Costs of the instructions of a cube core: copies from L1 to L0, the matrix unit, and results out of L0C.

The numbers, with sources, are in constants.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from . import constants as c

FRACTAL = int(c.FRACTAL.value)
FRACTAL_BYTES = int(c.FRACTAL_BYTES.value)
L0_BYTES = int(c.L0_BYTES.value)
_FP32 = 4  # bytes


@dataclass(frozen=True)
class CubeCosts:
    """What depends on the chip.

    Attributes:
        cores: how many cores run matrix programs, alone or each with two vector cores.
        typical_load_port: bytes per second from global memory to a core's L1.
    """

    cores: int
    typical_load_port: float


def product(m: int, n: int, k: int, itemsize: int, hf32: bool) -> tuple[float, float]:
    """Cycles of one instruction of the matrix unit, and the fewest that its products take.

    Inferred: fp32 that is rounded to HF32 takes one pass, as its mantissa is no longer than that of fp16.
    """
    passes = c.PASSES_FP32.value if itemsize == _FP32 and not hf32 else 1
    cycles = passes * ceil(m / FRACTAL) * ceil(n / FRACTAL) * ceil(k * itemsize / FRACTAL_BYTES)
    return c.PRODUCT_HEAD.value + cycles, cycles


def to_l0a(nbytes: int) -> tuple[float, float]:
    """Cycles of a copy from L1 to L0A, and the fewest."""
    return nbytes / c.TO_L0A.value, nbytes / c.TO_L0A_PEAK.value


def to_l0b(nbytes: int) -> tuple[float, float]:
    """Cycles of a copy from L1 to L0B, and the fewest."""
    return nbytes / c.TO_L0B.value, nbytes / c.TO_L0B_PEAK.value


def fill_l1(nbytes: int) -> float:
    """Cycles to fill memory of L1 with a number."""
    return nbytes / c.FILL.value


def drain(rows: int, columns: int) -> float:
    """Cycles in which the fixpipe takes results from L0C, 32 bits each, its start aside."""
    groups = ceil(columns / c.DRAIN_GROUP.value)
    turns = groups // (groups & -groups) if groups else 1  # what is left of the groups without their powers of two
    return rows * (max(c.DRAIN_ROW.value, _FP32 * columns / c.DRAIN_BYTES.value) + c.DRAIN_TURN.value * (turns - 1))
