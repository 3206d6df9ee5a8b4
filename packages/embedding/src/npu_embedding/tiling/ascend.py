"""Blocks of the embedding's kernels on Ascend."""

from __future__ import annotations

import dataclasses
from math import ceil

from npu_tiling import Block, Device, fit, footprint
from npu_tiling.budget.arithmetic import equal_blocks

from .footprint import finish_tiles, forward_tiles, runs_tiles
from .launches import FinishLaunch, ForwardLaunch, Launch, RunsLaunch, fills_units

# A store of 32 KB is past the point where its length matters (16 KB reach 94 % of the bandwidth).
_TILE_BYTES = 32768
# Zeros are stored without a load beside them, so that the start of each store shows: half as many starts.
_ZEROS_BYTES = 2 * _TILE_BYTES
# Rows of a tile, however narrow: few enough that a few thousand indices divide evenly over the cores.
_MAX_ROWS = 32


def forward_launch(width: int, itemsize: int, device: Device) -> ForwardLaunch:
    """Blocks of the forward. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    rows = Block("BLOCK_M", max(2, min(_MAX_ROWS, _TILE_BYTES // (width * itemsize))), 2)
    gathers = fills_units(width, itemsize, device)
    if not gathers and footprint(forward_tiles(width, 2, itemsize, gathers), {}, device) > device.ub_bytes:
        gathers = True  # several blocks, which are whole units
    blocks = fit(forward_tiles("BLOCK_N", "BLOCK_M", itemsize, gathers), (rows, _columns(width, itemsize, device)), device)
    return ForwardLaunch(
        device, width, itemsize, _equal_columns(width, blocks["BLOCK_N"], itemsize, device), blocks["BLOCK_M"]
    )


def runs_launch(width: int, itemsize: int, device: Device) -> RunsLaunch:
    """Blocks of the backward's sums. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    blocks = fit(runs_tiles("BLOCK_N", itemsize), (_columns(width, itemsize, device),), device)
    return RunsLaunch(device, width, itemsize, _equal_columns(width, blocks["BLOCK_N"], itemsize, device))


def finish_launch(width: int, itemsize: int, device: Device) -> FinishLaunch:
    """Blocks of the backward's zeros, partial sums (Ascend). Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    rows = Block("BLOCK_M", max(1, min(_MAX_ROWS, _ZEROS_BYTES // (width * itemsize))))
    blocks = fit(finish_tiles("BLOCK_N", "BLOCK_M", itemsize), (rows, _columns(width, itemsize, device)), device)
    return FinishLaunch(
        device, width, itemsize, _equal_columns(width, blocks["BLOCK_N"], itemsize, device), blocks["BLOCK_M"]
    )


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if launch.block_m > 2:
        return dataclasses.replace(launch, block_m=launch.block_m // 2)
    half = _equal_columns(launch.width, ceil(launch.block_n / 2), launch.itemsize, launch.device)
    return dataclasses.replace(launch, block_n=half) if half < launch.block_n else None


def _columns(width: int, itemsize: int, device: Device) -> Block:
    unit = device.ub_align // itemsize
    return Block("BLOCK_N", width, min(width, unit), unit)


def _equal_columns(width: int, largest: int, itemsize: int, device: Device) -> int:
    """Columns of as few blocks as fit, of equal length; whole units, if several."""
    return width if largest >= width else equal_blocks(width, largest, device.ub_align // itemsize)
