"""The launch that adds partial sums, with the kernel of device/partials.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from ..budget.arithmetic import FP32, power_of_two, round_up
from ..budget.grid import ALL_TILES, persistent_grid
from ..budget.tiles import Block, Tile, fit
from ..chips.devices import Device
from ..places import here
from .kernels import Kernels, LaunchSpec

if TYPE_CHECKING:
    from torch import Tensor

KERNELS = Kernels(f"{__package__.rpartition('.')[0]}.device", "npu-tiling")

TRANSFER_BYTES = 12 * 1024  # of one tile on Ascend: the next tile is loaded while one is added
MAX_ROWS = 64  # of a tile on Ascend; chips have up to 72 vector cores, and each stores one partial sum

# On CUDA, by the width of a row, up to and including: rows and columns of a tile. Narrow tiles let many programs wait for
# memory at once; launches of wider rows have fewer partial sums. Chosen with the backwards of rms_norm on an H200.
CUDA_TILES: tuple[tuple[int, int, int, str], ...] = (
    # width  rows  columns
    (8192, 256, 8, here()),
    (16384, 128, 64, here()),
    (2**31, 32, 64, here()),
)


@dataclass(frozen=True, kw_only=True)
class SumTiling:
    """Tile and grid of the launch that adds partial sums [n, width] over n.

    Attributes:
        width: elements of a row.
        device: the chip.
        rows, columns: of a tile; a program takes columns and loops over rows.
        decided_at: file and line of the rule, or of the table's row.
    """

    why: ClassVar[str] = "every program adds all partial sums of some columns"

    width: int
    device: Device = field(repr=False)
    rows: int
    columns: int
    decided_at: str = field(default="", repr=False, compare=False)

    @functools.cached_property
    def grid(self) -> int:
        return persistent_grid(ceil(self.width / self.columns), self.device, per_core=ALL_TILES)

    @property
    def constants(self) -> dict[str, int]:
        return {"N": self.width, "BLOCK_M": self.rows, "BLOCK_N": self.columns}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        if self.device.kind == "cuda":
            return {"num_warps": 4}
        # With two buffers for a single row CANN 9.0 and 9.1 put no barrier between the additions to it.
        return {} if self.rows > 1 else {"multibuffer": False}


def choose_sum(width: int, device: Device) -> SumTiling:
    """The tiling for rows of `width` elements. On Ascend every core gets columns before one gets more than it needs."""
    if device.kind == "cuda":
        rows, columns, place = next(row[1:] for row in CUDA_TILES if power_of_two(width) <= row[0])
        columns = min(columns, power_of_two(width))
        return SumTiling(width=width, device=device, rows=rows, columns=columns, decided_at=place)
    unit, tile = device.ub_align // FP32, ("BLOCK_M", "BLOCK_N")
    padded = round_up(width, unit)
    columns = min(padded, round_up(ceil(padded / device.vector_cores), unit))
    rows = min(device.vector_cores, MAX_ROWS, max(1, TRANSFER_BYTES // (columns * FP32)))
    tiles = [Tile("partial sums", tile, FP32, 2), Tile("sum", tile, FP32), Tile("sum over rows", tile, FP32)]
    blocks = fit(tiles, (Block("BLOCK_M", rows), Block("BLOCK_N", columns, unit, unit)), device)
    tile_rows, tile_columns = blocks["BLOCK_M"], blocks["BLOCK_N"]
    return SumTiling(width=width, device=device, rows=tile_rows, columns=tile_columns, decided_at=here())


def add_partials(partials: Tensor, total: Tensor, device: Device) -> None:
    """Writes the sum of `partials`, fp32 [n, total.numel()], over n to `total`, of any float dtype."""
    spec = sum_spec(total.numel(), device)
    scalars = (partials.shape[0],)
    KERNELS.launch("partials", "sum_partials_kernel", spec, spec.launch.grid, (partials, total), scalars)


@functools.lru_cache(maxsize=4096)
def sum_spec(width: int, device: Device) -> LaunchSpec:
    """The launch for rows of `width` elements."""
    return LaunchSpec.of(choose_sum(width, device), {})
