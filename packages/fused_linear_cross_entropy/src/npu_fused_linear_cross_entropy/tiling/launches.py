"""The launches over chunks of logits, and over values that are scaled: what a tiling chose, as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from npu_tiling import ALL_TILES, Device, persistent_grid
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.launching.cuda import row_options

from .footprint import ub_bytes
from .problem import ROWS, Problem

_SCALED_COLUMNS = {"cuda": 2048, "ascend": 8192}  # 8 KB of bf16 and more
_LANES = 8  # fp32 numbers of 32 bytes
_UNFUSED = {"enable_fp_fusion": False}  # how the target's element is rounded is computed, which a fused product spoils
_SETTLE_ROWS, _SETTLE_COLUMNS = 32, 128  # 16 KB of fp32
_CUDA_SCALE_PROGRAMS = 8  # of a multiprocessor


@dataclass(frozen=True)
class Launch:
    """One launch but for its number of rows: blocks and compiler options.

    Attributes:
        problem: what it was made for.
        device: the chip.
        block_m, block_n: rows and columns of a tile; block_n is above the width where a row is one tile.
        tail_n: columns of the last tile of a row, 0 for none.
        warps: warps of a program (CUDA).
    """

    problem: Problem
    device: Device = field(repr=False)
    block_m: int
    block_n: int
    tail_n: int
    warps: int = 4

    def grid(self, rows: int) -> int:
        per_core = ALL_TILES if self.device.kind == "cuda" else 1
        return persistent_grid(ceil(rows / self.block_m), self.device, per_core=per_core)

    @property
    def streams(self) -> bool:
        """Whether a row is more than one tile."""
        return self.block_n <= self.problem.width

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        return ub_bytes(self.problem, self.streams, self.block_m, self.block_n, self.tail_n, self.device)

    @property
    def constants(self) -> dict[str, int | bool]:
        blocks: dict[str, int | bool] = {
            "N": self.problem.width,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "TAIL_N": self.tail_n,
        }
        if self.problem.exponentials:
            on_cuda, tiles = self.device.kind == "cuda", max(1, self.problem.width // self.block_n)
            padded = power_of_two(tiles) if on_cuda else ceil(tiles / _LANES) * _LANES
            return {**blocks, "TILES": padded, "PADDED": self._is_padded, "BARRIER": on_cuda}
        if self.problem.in_place and self.problem.statistics:
            blocks["PADDED"] = self._is_padded
        if self.problem.in_place and self.problem.gradient_itemsize:
            blocks["BARRIER"] = self.device.kind == "cuda" and self.problem.gradient_itemsize < self.problem.itemsize
        return blocks

    @property
    def _is_padded(self) -> bool:
        """Whether the logits' memory has whole tiles of rows."""
        return self.device.kind == "ascend" and self.block_m <= ROWS

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        if self.device.kind != "cuda":
            return {}
        options = row_options(min(self.block_n, self.tail_n or self.block_n), self.warps)
        return {**options, **_UNFUSED} if self.problem.exponentials else options


@dataclass(frozen=True)
class SettleLaunch:
    """The launch that makes exponentials a gradient: tiles of many rows, whose columns are rarely read."""

    width: int
    device: Device = field(repr=False)

    def grid(self, rows: int) -> int:
        per_core = ALL_TILES if self.device.kind == "cuda" else 1
        return persistent_grid(ceil(rows / _SETTLE_ROWS), self.device, per_core=per_core)

    @property
    def constants(self) -> dict[str, int | bool]:
        on_cuda, left = self.device.kind == "cuda", self.width % _SETTLE_COLUMNS
        tail = power_of_two(left) if on_cuda and left else left
        blocks = {"N": self.width, "BLOCK_M": _SETTLE_ROWS, "BLOCK_N": _SETTLE_COLUMNS, "TAIL_N": tail}
        return {**blocks, "BARRIER": on_cuda}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {"num_warps": 4, **_UNFUSED} if self.device.kind == "cuda" else {}


@dataclass(frozen=True)
class ScaleRowsLaunch:
    """The launch that multiplies rows by a number each: programs stride over rows."""

    width: int
    device: Device = field(repr=False)

    def grid(self, rows: int) -> int:
        per_core = ALL_TILES if self.device.kind == "cuda" else 1
        return persistent_grid(rows, self.device, per_core=per_core)

    @property
    def constants(self) -> dict[str, int | bool]:
        most, unit = _SCALED_COLUMNS[self.device.kind], 16
        if self.device.kind == "cuda":
            return {"N": self.width, "BLOCK_N": min(most, power_of_two(self.width))}
        blocks = ceil(self.width / most)  # of nearly one length
        return {"N": self.width, "BLOCK_N": ceil(self.width / blocks / unit) * unit}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {"num_warps": 4} if self.device.kind == "cuda" else {}


@dataclass(frozen=True)
class ScaleLaunch:
    """The launch that multiplies values by a number: programs stride over blocks of them."""

    device: Device = field(repr=False)
    block_n: int

    def grid(self, values: int) -> int:
        per_core = _CUDA_SCALE_PROGRAMS if self.device.kind == "cuda" else 1
        return persistent_grid(ceil(values / self.block_n), self.device, per_core=per_core)

    @property
    def constants(self) -> dict[str, int | bool]:
        return {"BLOCK_N": self.block_n}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4} if self.device.kind == "cuda" else {}
