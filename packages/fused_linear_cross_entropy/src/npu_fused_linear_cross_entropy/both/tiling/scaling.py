"""Launches that settle exponentials, and that multiply rows and values by numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil

from npu_tiling import ALL_TILES, Device, persistent_grid
from npu_tiling.budget.arithmetic import power_of_two

from .chunks import equal_units

_SETTLE_ROWS, _SETTLE_COLUMNS = 32, 128  # 16 KB of fp32
_SCALED_COLUMNS = {"cuda": 2048, "ascend": 8192}  # 4 and 16 KB of bf16
_SCALED_BYTES = 16 * 1024  # of a block on Ascend: see ascend/tiling.py
_SCALED_VALUES = 4096  # of a block on CUDA
_PROGRAMS = {"cuda": 8, "ascend": 1}  # that scale values, of a core
_UNIT = 16  # columns that make up an aligned piece of a row


class FourWarps:
    """A launch whose programs have four warps on CUDA."""

    device: Device

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {"num_warps": 4} if self.device.kind == "cuda" else {}


@dataclass(frozen=True, kw_only=True)
class SettleLaunch(FourWarps):
    """E is scaled where k rose, and set to 0 at the targets, in tiles of many rows whose columns are rarely read."""

    width: int
    device: Device = field(repr=False)

    def grid(self, rows: int) -> int:
        return persistent_grid(ceil(rows / _SETTLE_ROWS), self.device, per_core=all_or_one(self.device))

    @property
    def constants(self) -> dict[str, int | bool]:
        on_cuda, rest = self.device.kind == "cuda", self.width % _SETTLE_COLUMNS
        tail = power_of_two(rest) if on_cuda and rest else rest
        blocks = {"N": self.width, "BLOCK_M": _SETTLE_ROWS, "BLOCK_N": _SETTLE_COLUMNS, "TAIL_N": tail}
        return {**blocks, "BARRIER": on_cuda}


@dataclass(frozen=True, kw_only=True)
class ScaleRowsLaunch(FourWarps):
    """Rows are multiplied by a number each: programs stride over rows."""

    width: int
    device: Device = field(repr=False)

    def grid(self, rows: int) -> int:
        return persistent_grid(rows, self.device, per_core=all_or_one(self.device))

    @property
    def constants(self) -> dict[str, int | bool]:
        return {"N": self.width, "BLOCK_N": row_block(self.width, _SCALED_COLUMNS, self.device)}


@dataclass(frozen=True, kw_only=True)
class ScaleLaunch(FourWarps):
    """The launch that multiplies values of `itemsize` bytes by a number: programs stride over blocks of them."""

    itemsize: int
    device: Device = field(repr=False)

    @property
    def block_n(self) -> int:
        return _SCALED_VALUES if self.device.kind == "cuda" else _SCALED_BYTES // self.itemsize

    def grid(self, values: int) -> int:
        return persistent_grid(ceil(values / self.block_n), self.device, per_core=_PROGRAMS[self.device.kind])

    @property
    def constants(self) -> dict[str, int | bool]:
        return {"BLOCK_N": self.block_n}


def row_block(width: int, longest: Mapping[str, int], device: Device) -> int:
    """Columns of a block of a row; `longest`: by kind of device."""
    most = longest[device.kind]
    return min(most, power_of_two(width)) if device.kind == "cuda" else equal_units(width, most, _UNIT)


def all_or_one(device: Device) -> int:
    """Programs of a core: on CUDA one for each tile."""
    return ALL_TILES if device.kind == "cuda" else 1
