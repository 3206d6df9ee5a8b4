"""The main memory of the Ascend950 family; its numbers, with sources, are in constants.py.

They are not in npu_tiling's table of chips, because an operator chooses the length of its chunks by the bandwidth there.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import constants as c


@dataclass(frozen=True)
class Memory:
    """Main memory: bytes per second, at most, of loads, and of copies."""

    peak: float
    read: float
    copy: float


_PR = Memory(c.PEAK_PR.value, c.READ_PR.value, c.COPY_PR.value)
_DT = Memory(c.PEAK_DT.value, c.READ_PR.value * c.DT_TO_PR.value, c.COPY_PR.value * c.DT_TO_PR.value)
_MEMORY = {"Ascend950PR_957": _PR, "Ascend950PR_958": _PR, "Ascend950DT_957": _DT, "Ascend950DT_958": _DT}


def memory_of(soc: str) -> Memory | None:
    """The memory of a chip; None where nothing is published of it: the smallest, the largest, and the names of 2024."""
    return _MEMORY.get(soc[:-1])
