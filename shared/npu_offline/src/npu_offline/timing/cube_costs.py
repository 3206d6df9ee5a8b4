"""Costs of the instructions of a cube core: copies from L1 to L0, the matrix unit, and results out of L0C.

The kinds of source are those of `costs`, and one more:

- *device sweep*: what Huawei's PyPTO compiler chooses tiles by (`pypto`, include/pypto/backend/common/backend_handler.h,
  2026): fitted by its authors to sweeps on A2 and A3 devices, whose pipes took 0.93 to 1.09 of what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

FRACTAL = 16  # chip: cube_m_size, cube_n_size; rows and columns of what the matrix unit multiplies in a cycle
FRACTAL_BYTES = 32  # chip: of a row along k, 16 elements of two bytes
L0_BYTES = 64 * 1024  # chip: of L0A, and of L0B

#: Bytes per second from global memory to L1. vendor model: 135 GiB/s. Inferred: the same on every chip, as the cache and its
#: network have a clock of their own: the product that an Ascend910B4 is published to sustain, at 221.5 TFLOP/s with results
#: of 128 x 256, the most that L0C holds, loads 130 GB/s a core, more than the figure leaves when it is scaled by the clock.
LOAD_PORT = 135 * 2**30

_HEAD = 21  # device sweep: cycles that each instruction of the matrix unit adds to its products
_PASSES = {4: 2}  # device sweep: a fractal of fp32 takes two cycles, of anything else one
_L0A, _L0B = 129.7, 85.4  # device sweep: bytes per cycle from L1 to L0A and to L0B
_L0A_PEAK, _L0B_PEAK = 512, 256  # chip: l1_to_l0_a_rate, l1_to_l0_b_rate
# device sweep: the fixpipe takes L0C row by row: this many cycles at least, or this many bytes a cycle, and for every turn
# beyond the first of a row whose groups of eight numbers are no power of two these
_ROW, _ROW_BYTES, _ROW_TURN = 4.45, 118, 2.6
_ROW_GROUP = 8
_FILL = 32 * 2**30 / 1.85e9  # vendor model: 32 GiB/s to fill L1 with a number, at its clock: bytes per cycle


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
    passes = 1 if hf32 else _PASSES.get(itemsize, 1)
    cycles = passes * ceil(m / FRACTAL) * ceil(n / FRACTAL) * ceil(k * itemsize / FRACTAL_BYTES)
    return _HEAD + cycles, cycles


def to_l0a(nbytes: int) -> tuple[float, float]:
    """Cycles of a copy from L1 to L0A, and the fewest."""
    return nbytes / _L0A, nbytes / _L0A_PEAK


def to_l0b(nbytes: int) -> tuple[float, float]:
    """Cycles of a copy from L1 to L0B, and the fewest."""
    return nbytes / _L0B, nbytes / _L0B_PEAK


def fill_l1(nbytes: int) -> float:
    """Cycles to fill memory of L1 with a number."""
    return nbytes / _FILL


def drain(rows: int, columns: int) -> float:
    """Cycles in which the fixpipe takes results from L0C, 32 bits each, its start aside."""
    groups = ceil(columns / _ROW_GROUP)
    turns = groups // (groups & -groups) if groups else 1  # what is left of the groups without their powers of two
    return rows * (max(_ROW, 4 * columns / _ROW_BYTES) + _ROW_TURN * (turns - 1))
