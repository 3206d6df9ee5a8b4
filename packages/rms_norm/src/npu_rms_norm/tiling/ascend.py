"""Blocks of RMSNorm's kernels on Ascend."""

from __future__ import annotations

import dataclasses
import functools
from math import ceil

from npu_tiling import Block, Device, Tile, Way, first_fit, fit
from npu_tiling.budget.arithmetic import FP32, equal_blocks, round_up

from .footprint import column_tiles, row_tiles
from .launches import Launch, SumLaunch
from .problem import Problem

# Rows share a tile until one transfer has this many bytes: 8 KB reach 76 % of the bandwidth and 16 KB 94 %, and a tile that
# fills the Unified Buffer leaves the compilers, which differ in what they need, no room.
_TRANSFER_BYTES = 12 * 1024
_WIDE_TRANSFER_BYTES = 8 * 1024  # more is alive at once in the passes over column blocks
_SUM_BYTES = 12 * 1024  # of a tile of partial sums: the next one is on its way while one is added
# Where buffers have no place of their own, compilers let transfers wait for arithmetic: a tile of several rows takes fewer
# instead, and leaves this part of the Unified Buffer.
_SPARE = 8
_MAX_SUM_ROWS = 64  # there are as many partial sums as vector cores, 72 at most


def row_launch(problem: Problem, device: Device, *, backward: bool) -> Launch:
    """Several rows a tile, one row double-buffered, one row, or column blocks: the first of these that fits."""
    unit = _unit(problem, device)
    padded = round_up(problem.width, unit)
    itemsize = min(problem.itemsizes)
    shared = max(2, _TRANSFER_BYTES // (padded * itemsize))
    # Two rows or more keep row reductions in the vector unit. One pass over memory with the next tile under way is best; one
    # pass without it still moves a third less than two passes.
    rows = _shared_rows(problem, shared)
    tiles = functools.partial(row_tiles, problem, device, padded, backward)
    several = tiles(True, rows.largest > 1)
    spare = [Tile("room to spare", (1, device.ub_bytes // _SPARE), 1)]
    if rows.multiple_of > 1:
        spare.append(Tile("rows of groups", ("ROWS", padded), FP32))
    ways = [Way(True, [*several, *spare], (rows,))]
    if backward:  # two rows that crowd each other are still no slower than one
        ways.append(Way(True, several, (rows,)))
    if not backward or device.arch != "dav-c310":
        # On an Ascend950 a single row of a backward is summed up anew for every 64 columns that use the sum: two passes are
        # faster by far.
        one_row = (Block("ROWS", 1),)
        ways += [Way(True, tiles(True, False), one_row), Way(False, tiles(False, False), one_row)]
    columns = Block("BLOCK_N", min(padded, _WIDE_TRANSFER_BYTES // itemsize), unit, unit)
    double_buffered, blocks = first_fit([*ways, Way(True, column_tiles(problem, backward), (columns,))], device)
    if "BLOCK_N" in blocks:
        return Launch(problem, device, backward, True, True, 1, equal_blocks(padded, blocks["BLOCK_N"], unit))
    shared = blocks["ROWS"]
    groups = shared // problem.n_inner if shared > 1 and rows.multiple_of > 1 else 1
    if groups == 1 and problem.n_outer > 1:  # no short tile at the end of every group
        shared = ceil(problem.n_inner / ceil(problem.n_inner / shared))
    return Launch(problem, device, backward, False, double_buffered, shared // groups, padded, groups)


def _unit(problem: Problem, device: Device) -> int:
    """Columns that make up one aligned piece of a row in every tensor."""
    return device.ub_align // (1 if problem.quantised else min(problem.itemsizes))


def _shared_rows(problem: Problem, wanted: int) -> Block:
    """How many rows a tile may share: rows of one group or, where a group has fewer than wanted, whole groups."""
    rows = min(wanted, problem.max_rows)
    groups = min(wanted // problem.n_inner, problem.max_groups)
    if problem.per_head or problem.n_outer == 1 or rows < problem.n_inner or groups < 2:
        return Block("ROWS", rows, min(2, rows))
    return Block("ROWS", groups * problem.n_inner, 2 * problem.n_inner, problem.n_inner)


def sum_launch(width: int, device: Device) -> SumLaunch:
    """Blocks and grid of the kernel that adds the partial sums of dw."""
    unit = device.ub_align // FP32
    padded = round_up(width, unit)
    tile = ("BLOCK_M", "BLOCK_N")
    tiles = [Tile("partial sums", tile, FP32, 2), Tile("sum", tile, FP32), Tile("sum over rows", tile, FP32)]
    # Every core gets columns to add before a core gets more than it needs.
    columns = min(padded, round_up(ceil(padded / device.vector_cores), unit))
    rows = min(device.vector_cores, _MAX_SUM_ROWS, max(1, _SUM_BYTES // (columns * FP32)))
    blocks = fit(tiles, (Block("BLOCK_M", rows), Block("BLOCK_N", columns, unit, unit)), device)
    return SumLaunch(width, device, blocks["BLOCK_M"], blocks["BLOCK_N"])


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if launch.block_g > 1:
        return dataclasses.replace(launch, block_g=launch.block_g // 2)
    if launch.block_m > 1:
        return dataclasses.replace(launch, block_m=launch.block_m // 2)
    if launch.double_buffered and not launch.wide:
        return dataclasses.replace(launch, double_buffered=False)
    unit = _unit(launch.problem, launch.device)
    if launch.block_n <= unit:
        return None
    half = round_up(ceil(launch.block_n / 2), unit)
    return dataclasses.replace(launch, wide=True, double_buffered=True, block_n=half)
