"""What a kernel keeps in the Unified Buffer at once, as the compiler plans it."""

from __future__ import annotations

from npu_tiling import Device, Tile
from npu_tiling.budget.arithmetic import FP32

from .problem import Problem


def row_tiles(
    problem: Problem, device: Device, width: int, backward: bool, double_buffered: bool, several_rows: bool
) -> list[Tile]:
    """What one pass keeps on chip at once."""
    buffers = 2 if double_buffered else 1
    tile = ("ROWS", width)
    tiles = [Tile("rows read", tile, itemsize, buffers) for itemsize in problem.itemsizes]
    # The fp32 tile that a narrower output is cast from is the output's buffer, and there are two such tiles while one is
    # computed from the other. An fp32 output is computed in the buffer that was loaded, next to one more; but on dav-c310
    # the loaded buffers are left alone.
    in_place = not problem.narrow_output and device.arch != "dav-c310"
    tiles.append(Tile("fp32 arithmetic", tile, FP32, 1 if in_place else 2))
    if device.arch == "dav-c310":
        tiles += [Tile("fp32 copy", tile, FP32) for itemsize in problem.itemsizes if itemsize == FP32]
        if problem.second_output:
            tiles.append(Tile("result in another dtype", tile, FP32 // 2, 3))
    tiles.append(Tile("row reduction", tile, FP32 // 2))
    if problem.quantised:
        tiles.append(Tile("result times 0", tile, FP32))
    if several_rows and not backward:
        if problem.added:
            tiles.append(Tile("sum stored", tile, problem.itemsizes[1], buffers))
        if problem.biased and problem.rounded:
            tiles.append(Tile("rounded product", tile, FP32))
    tiles.append(Tile("scale", (1, width), FP32))
    if problem.biased:
        tiles.append(Tile("bias", (1, width), FP32))
    tiles.append(Tile("rstd, mean and rounded rstd", ("ROWS", 1), FP32, 3))
    if backward:
        tiles.append(Tile("sums of dw and db", tile, FP32, 1 + problem.biased))
        if problem.gated:
            tiles.append(Tile("gate, its derivative and their products", tile, FP32, 6))
        if several_rows:
            tiles.append(Tile("sum of dw over the rows", tile, FP32 // 2))
        elif problem.rounded_factors and double_buffered and device.arch != "dav-c310":
            tiles.append(Tile("rounded product", tile, FP32 // 2))
    return tiles


def column_tiles(problem: Problem, backward: bool) -> list[Tile]:
    """What the passes over column blocks keep on chip at once, one row at a time."""
    tile = (1, "BLOCK_N")
    tiles = [Tile("rows read", tile, itemsize, 2) for itemsize in problem.itemsizes]
    tiles.append(Tile("fp32 arithmetic", tile, FP32, 2))
    tiles.append(Tile("row reduction", tile, FP32 // 2))
    tiles.append(Tile("weight read", tile, FP32, 2))
    tiles.append(Tile("scale", tile, FP32))
    if problem.biased:
        tiles.append(Tile("bias read, and as it is added", tile, FP32, 3))
    tiles.append(Tile("rstd and mean", (1, 1), FP32, 2))
    tiles.append(Tile("sums over rows or columns", tile, FP32, 1 + (problem.biased and backward)))
    if problem.quantised:
        tiles.append(Tile("result times 0", tile, FP32))
    if problem.gated and backward:
        tiles.append(Tile("gate, its derivative and their products", tile, FP32, 5))
    return tiles
