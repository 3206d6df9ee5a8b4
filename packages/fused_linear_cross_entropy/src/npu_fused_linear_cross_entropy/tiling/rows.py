"""Blocks and grids of the launches over rows, vectors of [tokens]."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from npu_tiling import Block, Device, Tile, fit, footprint, persistent_grid
from npu_tiling.budget.arithmetic import FP32, power_of_two

_ROWS = 1024  # of a tile: 4 KB of fp32
_WEIGHTED_ROWS = 128  # where each takes a load of its own, of a class weight: on Ascend .1 us by npu-offline's model
_FEWEST_ROWS = 32
_ALONE = 4  # tiles that one program takes alone, which takes it less time than another launch would
_WARPS = 4


class RowKernel(NamedTuple):
    """A kernel over rows.

    Attributes:
        module, name: where it is.
        numbers: fp32 numbers of a row in the Unified Buffer: the most that the compilers of CANN 8.5, 9.0 and 9.1 take where
            they have room, with every option. They can do with half of it.
        weighted: whether each row takes a load of its own, of a class weight.
    """

    module: str
    name: str
    numbers: int
    weighted: bool = False


TARGETS = RowKernel("kernels.targets", "cross_entropy_targets_kernel", 31)
WEIGHTED_TARGETS = TARGETS._replace(weighted=True)
LOSSES = RowKernel("kernels.losses", "cross_entropy_losses_kernel", 46)
COEFFICIENTS = RowKernel("kernels.losses", "cross_entropy_coefficients_kernel", 31)


@dataclass(frozen=True)
class RowLaunch:
    """One launch but for its number of rows.

    Attributes:
        device: the chip.
        block_m: rows of a tile.
        numbers: fp32 numbers that are kept of a row.
        alone: tiles that one program takes alone where rows are summed.
    """

    device: Device = field(repr=False)
    block_m: int
    numbers: int
    alone: int = _ALONE

    def grid(self, rows: int, summed: bool) -> int:
        """Programs for that many rows; `summed`: where more than one leave partial sums."""
        tiles = ceil(rows / self.block_m)
        return 1 if summed and tiles <= self.alone else persistent_grid(tiles, self.device)

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        return footprint(_tiles(self.numbers), {"BLOCK_M": self.block_m}, self.device)

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.block_m}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {"num_warps": _WARPS} if self.device.kind == "cuda" else {}


@dataclass(frozen=True)
class PartialsLaunch:
    """The launch of one program that adds partial sums."""

    device: Device = field(repr=False)

    @property
    def constants(self) -> dict[str, int]:
        most = self.device.vector_cores
        return {"BLOCK_P": power_of_two(most) if self.device.kind == "cuda" else most}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {"num_warps": _WARPS} if self.device.kind == "cuda" else {}


@functools.lru_cache(maxsize=64)
def row_launch(kernel: RowKernel, device: Device) -> RowLaunch:
    """Blocks for one of the kernels above."""
    if kernel.weighted:
        return RowLaunch(device, _WEIGHTED_ROWS, kernel.numbers, 1)
    if device.kind == "cuda":
        return RowLaunch(device, _ROWS, kernel.numbers)
    block = Block("BLOCK_M", _ROWS, _FEWEST_ROWS, _FEWEST_ROWS)
    return RowLaunch(device, fit(_tiles(kernel.numbers), (block,), device)["BLOCK_M"], kernel.numbers)


def smaller(launch: RowLaunch) -> RowLaunch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if launch.device.kind == "cuda" or launch.block_m <= _FEWEST_ROWS:
        return None
    return dataclasses.replace(launch, block_m=launch.block_m // 2)


def _tiles(numbers: int) -> list[Tile]:
    return [Tile("numbers of a row", ("BLOCK_M",), FP32, numbers)]
