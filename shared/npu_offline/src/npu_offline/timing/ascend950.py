"""The rates of the Ascend950 family, with the source of every number.

Kinds of source, beside those of costs.py:

- *chip*: the vendor's configuration files of these chips (`hicann/pypto`, framework/src/platform/parser/simulation_platform/
  platform_config/950PR_957x.ini and its three siblings: clock, cores, cache, rates in bytes per cycle and core).
- *announced*: Huawei Connect, September 2025.
- *measured*: on a 950PR, as the developers of PyPTO's kernels published it (a5-roofline-and-levers.md, July 2026).
- *vendor model*: the linear models of GE, the graph compiler, for these chips (see register_costs.py).

They are not in npu_tiling's table of chips, because an operator chooses the length of its chunks by the bandwidth there.
"""

from __future__ import annotations

from dataclasses import dataclass

CLOCK = 1.65e9  # chip: vec_freq
CACHE = 128 * 2**20  # chip: l2_size
LOAD_PORT = 100  # chip: l2_read_rate
STORE_PORT = 100  # chip: l2_write_rate
TYPICAL_LOAD_PORT = 53  # inferred: the same part of it as costs.py has of the Ascend910B1's, 58.6 of 110
TYPICAL_STORE_PORT = 42  # chip: ub_to_l2_rate
TRANSFER_START = 160 / CLOCK  # vendor model: 160 cycles for each load or store


@dataclass(frozen=True)
class Memory:
    """Main memory: bytes per second, at most and as kernels that load and store reach it."""

    peak: float
    achieved: float


_ANNOUNCED_PR, _ANNOUNCED_DT = 1.6e12, 4.0e12
# measured: 1.17 TB/s by a fused normalisation of large tensors; 1.7 TB/s by loads alone.
_ACHIEVED_PR = 1.17e12
# The peak is the largest of what is published: 1.6 TB/s announced, 64 cores x 16 bytes a cycle in the chip's file, 1.74 TB/s
# measured while reading weights.
_PR = Memory(1.74e12, _ACHIEVED_PR)
# Announced, and 64 cores x 40 bytes a cycle. inferred: the same part of what is announced is reached.
_DT = Memory(64 * 40 * CLOCK, _ANNOUNCED_DT * _ACHIEVED_PR / _ANNOUNCED_PR)
_MEMORY = {"Ascend950PR_957": _PR, "Ascend950PR_958": _PR, "Ascend950DT_957": _DT, "Ascend950DT_958": _DT}


def memory_of(soc: str) -> Memory | None:
    """The memory of a chip; None where nothing is published of it: the smallest, the largest, and the names of 2024."""
    return _MEMORY.get(soc[:-1])
