"""Blocks of AttnRes's kernels on Ascend."""

from __future__ import annotations

import dataclasses
import functools
from math import ceil

from npu_tiling import Block, Device, Tile, UnifiedBufferError, Way, first_fit, fit
from npu_tiling.budget.arithmetic import FP32, INT32_END, equal_blocks, round_up

from .footprint import PREFETCHED, ROW_WAYS, RowWay, launch_tiles, row_tiles, row_way
from .launches import BESIDE_PREFIX, COLUMN_KINDS, ROW_BACKWARDS, Kind, Launch, Problem, WeightsLaunch

# Rows share a tile until one transfer has this many bytes: 8 KB reach 76 % of the bandwidth. 16 KB would reach 94 %, but
# when tiles fill the Unified Buffer the compilers reuse the idle half of a double buffer, and each load then waits for the
# arithmetic before it: `npu-offline tune` predicts less time for the smaller tiles. A forward that loads ahead keeps its
# buffers; with more than nine rows the time of its arithmetic on one number a row shows.
_TRANSFER_BYTES = 8 * 1024
_PREFETCH_BYTES = 14 * 1024
_PREFETCH_ROWS = 9
_COLUMN_BYTES = 8 * 1024  # of a transfer in the kernels that take columns
_LEAST_ROW = 2048  # columns from which on a backward of one row a tile is predicted to take less than one of several
_MOST_SOURCES = 64  # of a token, as in ascend/backward_row.py
_MAX_SUM_ROWS = 64  # there are as many partial sums as vector cores, 72 at most


def row_launch(problem: Problem, device: Device) -> Launch | None:
    """The launch of a kernel that takes whole rows; None where none fit on chip."""
    padded = _padded(problem, device)
    if problem.layers > 1:
        launches = [Launch(problem, device, 1, problem.layers, padded, double_buffered=each) for each in (True, False)]
        ways = [Way(launch, launch_tiles(launch)) for launch in launches]
    else:
        ways = _ways(problem, device, padded)
    try:
        launch, blocks = first_fit(ways, device)
    except UnifiedBufferError:
        return None
    return dataclasses.replace(launch, block_m=blocks.get("ROWS", 1))


def statistics_by_token(width: int, itemsize: int, n_sources: int, device: Device) -> bool:
    """Whether statistics of the forward are [tokens, sources], for a backward of `ROW_BACKWARDS`.

    On the Ascend950 such a backward was not tried. Blocks in fp32 have h, and one sweep.
    """
    if device.arch != "dav-c220" or itemsize > 2 or width < _LEAST_ROW or n_sources > _MOST_SOURCES:
        return False
    return _takes_rows(width, itemsize, device)


@functools.lru_cache(maxsize=256)
def _takes_rows(width: int, itemsize: int, device: Device) -> bool:
    return row_launch(Problem(Kind.ROW_BACKWARD, width, itemsize), device) is not None


def _ways(problem: Problem, device: Device, padded: int) -> list[Way[Launch]]:
    """Several rows a tile, then one row, from the fastest way to the one that takes least."""
    prefetch = problem.kind in PREFETCHED  # with a buffer of the kernel's own: another of the compiler's would take too much
    row_bytes = padded * problem.itemsize
    shared = max(2, _TRANSFER_BYTES // row_bytes, min(_PREFETCH_ROWS, _PREFETCH_BYTES // row_bytes) if prefetch else 0)
    # Two rows or more keep row reductions in the vector unit; the next tile under way is worth more than they are.
    shared = min(shared, _addressable(problem))
    launch = Launch(problem, device, block_d=padded, prefetch=prefetch, double_buffered=not prefetch)
    several = []
    if shared > 1 and problem.kind not in ROW_BACKWARDS:
        several = [Way(launch, row_tiles(problem, device, padded), (Block("ROWS", shared, 2),))]
    one = [_row_launch(launch, way) for way in ROW_WAYS.get(problem.kind, ())]
    return [*several, *(Way(launch, launch_tiles(launch)) for launch in one)]


def columns_launch(problem: Problem, device: Device) -> Launch:
    """The launch of a kernel that takes one block of columns. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    unit = _unit(problem, device)
    padded = _padded(problem, device)
    # Two rows at least: one alone reduces through the scalar unit, and loses its double buffer to CANN 9.0 on dav-c310.
    block_m = min(2, _addressable(problem)) if problem.layers == 1 else 1
    columns = Block("COLUMNS", min(padded, _COLUMN_BYTES // problem.itemsize), unit, unit)
    largest = fit(row_tiles(problem, device, "COLUMNS", problem.layers * block_m), (columns,), device)["COLUMNS"]
    return Launch(problem, device, block_m=block_m, block_s=problem.layers, block_d=equal_blocks(padded, largest, unit))


def weights_launch(width: int, device: Device) -> WeightsLaunch:
    """Blocks and grid of the kernel that adds the partial sums of dg."""
    unit = device.ub_align // 2
    padded = round_up(width, unit)
    tile = ("BLOCK_M", "BLOCK_D")
    tiles = [Tile("partial sums", tile, FP32, 2), Tile("sum", tile, FP32), Tile("sum over rows", tile, FP32)]
    tiles.append(Tile("weights and gradients", (1, "BLOCK_D"), FP32, 8))
    # Every core gets columns to add before a core gets more than it needs: rows fill what is left.
    columns = min(padded, round_up(ceil(padded / device.vector_cores), unit))
    rows = Block("BLOCK_M", min(device.vector_cores, _MAX_SUM_ROWS))
    blocks = fit(tiles, (rows, Block("BLOCK_D", columns, unit, unit)), device)
    return WeightsLaunch(width, device, blocks["BLOCK_M"], blocks["BLOCK_D"])


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end.

    The last one of a kernel for whole rows has fewer columns than a row: none fits, and other kernels are to take columns.
    """
    ways = ROW_WAYS.get(launch.problem.kind, ())
    if launch.block_m > 1:
        fewer = dataclasses.replace(launch, block_m=launch.block_m // 2)
        return _row_launch(fewer, ways[0]) if ways and fewer.block_m == 1 else fewer
    unit = _unit(launch.problem, launch.device)
    if launch.block_s == 1 and ways:
        tried = ways.index(row_way(launch)) + 1
        if tried < len(ways):
            return _row_launch(launch, ways[tried])
    if launch.block_d <= unit or launch.problem.kind not in COLUMN_KINDS and not launch.whole_rows:
        return None
    return dataclasses.replace(launch, block_d=round_up(ceil(launch.block_d / 2), unit))


def _row_launch(launch: Launch, way: RowWay) -> Launch:
    return dataclasses.replace(launch, prefetch=way.prefetch, double_buffered=way.double_buffered)


def _unit(problem: Problem, device: Device) -> int:
    """Columns that make up one aligned piece of a row in every tensor."""
    return device.ub_align // (2 if problem.kind in BESIDE_PREFIX else problem.itemsize)


def _padded(problem: Problem, device: Device) -> int:
    return round_up(problem.width, _unit(problem, device))


def _addressable(problem: Problem) -> int:
    """Rows that one tile may have: offsets inside a tile are 32-bit."""
    return max(1, (INT32_END - problem.width) // max(problem.row_stride, problem.width))
