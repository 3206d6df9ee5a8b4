"""Blocks and grids of the launches over rows, vectors of [tokens]."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import NamedTuple

from npu_tiling import Block, Device, Tile, fit, footprint, persistent_grid
from npu_tiling.budget.arithmetic import FP32, power_of_two
from npu_tiling.places import here

from .scaling import FourWarps

_ROWS = 1024  # of a tile: 4 KB of fp32
_WEIGHTED_ROWS = 128  # where each row loads a class weight: on Ascend .1 us by npu-offline's model
_MIN_ROWS = 32
_SINGLE_PROGRAM_TILES = 4  # tiles that one program takes alone, which takes it less time than another launch would


class _Kernel(NamedTuple):
    """A kernel over rows.

    Attributes:
        module, function: where it is.
        values: fp32 numbers of a row in the Unified Buffer, the maximum over the compilers of CANN 8.5, 9.0 and 9.1 and over
            all options. The compilers take fewer, down to half, where there is less room.
        loads_weights: whether each row loads a class weight.
    """

    module: str
    function: str
    values: int
    loads_weights: bool


class RowKernel(Enum):
    """The kernels over rows."""

    TARGETS = _Kernel("both.targets", "cross_entropy_targets_kernel", 31, False)
    WEIGHTED_TARGETS = _Kernel("both.targets", "cross_entropy_targets_kernel", 31, True)
    LOSSES = _Kernel("both.losses", "cross_entropy_losses_kernel", 46, False)
    COEFFICIENTS = _Kernel("both.losses", "cross_entropy_coefficients_kernel", 31, False)
    JOIN = _Kernel("both.losses", "cross_entropy_join_kernel", 42, False)


@dataclass(frozen=True, kw_only=True)
class RowLaunch(FourWarps):
    """One launch but for its number of rows.

    Attributes:
        kernel: which one.
        device: the chip.
        block_m: rows of a tile.
    """

    kernel: RowKernel
    device: Device = field(repr=False)
    block_m: int
    decided_at: str = field(default="", repr=False, compare=False)

    @property
    def why(self) -> str:
        return f"{self.block_m} rows a tile"

    def grid(self, rows: int, *, summed: bool) -> int:
        """Programs for that many rows; `summed`: where several of them leave partial sums."""
        tiles = ceil(rows / self.block_m)
        single = 1 if self.kernel.value.loads_weights else _SINGLE_PROGRAM_TILES
        return 1 if summed and tiles <= single else persistent_grid(tiles, self.device)

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        return footprint(_tiles(self.kernel), {"BLOCK_M": self.block_m}, self.device)

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.block_m}


@dataclass(frozen=True, kw_only=True)
class PartialsLaunch(FourWarps):
    """One program adds the partial sums, at most one of each core."""

    device: Device = field(repr=False)

    @property
    def constants(self) -> dict[str, int]:
        programs = self.device.vector_cores
        return {"BLOCK_P": power_of_two(programs) if self.device.kind == "cuda" else programs}


@functools.lru_cache(maxsize=64)
def row_launch(kernel: RowKernel, device: Device) -> RowLaunch:
    """Blocks for one of the kernels."""
    rows = _WEIGHTED_ROWS if kernel.value.loads_weights else _ROWS
    if device.kind == "ascend" and not kernel.value.loads_weights:
        rows = fit(_tiles(kernel), (Block("BLOCK_M", rows, _MIN_ROWS, _MIN_ROWS),), device)["BLOCK_M"]
    return RowLaunch(kernel=kernel, device=device, block_m=rows, decided_at=here())


def smaller(launch: RowLaunch) -> RowLaunch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if launch.device.kind == "cuda" or launch.block_m <= _MIN_ROWS:
        return None
    return dataclasses.replace(launch, block_m=launch.block_m // 2)


def _tiles(kernel: RowKernel) -> list[Tile]:
    return [Tile("numbers of a row", ("BLOCK_M",), FP32, kernel.value.values)]
