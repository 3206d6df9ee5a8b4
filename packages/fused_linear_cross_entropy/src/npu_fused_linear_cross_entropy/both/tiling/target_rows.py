"""Launches that add the targets' part of the weight's gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from npu_tiling import Device, persistent_grid

from .scaling import FourWarps, all_or_one, row_block

_ORDER_ROWS, _ORDER_COLUMNS = 32, 128  # 16 KB of fp32, a handful of which are on chip
_COLUMNS = {"cuda": 1024, "ascend": 8192}
_AT_ONCE = {"cuda": 4, "ascend": 1}  # rows of x: on CUDA loads wait for one another less


@dataclass(frozen=True, kw_only=True)
class OrderLaunch(FourWarps):
    """Rows are sorted by target, a tile of them a program at a time."""

    columns: int
    device: Device = field(repr=False)

    def grid(self, rows: int) -> int:
        return persistent_grid(ceil(rows / _ORDER_ROWS), self.device, per_core=all_or_one(self.device))

    @property
    def constants(self) -> dict[str, int]:
        return {"N": self.columns, "BLOCK_M": _ORDER_ROWS, "BLOCK_N": _ORDER_COLUMNS}


@dataclass(frozen=True, kw_only=True)
class TargetRowsLaunch(FourWarps):
    """Rows of the weight's gradient, one a program at a time."""

    width: int
    device: Device = field(repr=False)

    def grid(self, rows: int) -> int:
        return persistent_grid(rows, self.device, per_core=all_or_one(self.device))

    @property
    def constants(self) -> dict[str, int]:
        block = row_block(self.width, _COLUMNS, self.device)
        return {"H": self.width, "BLOCK_H": block, "AT_ONCE": _AT_ONCE[self.device.kind]}
