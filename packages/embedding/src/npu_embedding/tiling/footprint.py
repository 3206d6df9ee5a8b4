"""What each kernel keeps in the Unified Buffer at once, as the compiler plans it; blocks are symbols or numbers."""

from __future__ import annotations

from npu_tiling import Tile
from npu_tiling.budget.arithmetic import FP32

INDEX = 8  # bytes of an index


def forward_tiles(block_n: str | int, block_m: str | int, itemsize: int, gathers: bool) -> list[Tile]:
    """Tiles of the launch that copies rows."""
    fills = Tile("rows of zeros and of NaN", (2, block_n), itemsize)
    if not gathers:
        return [Tile("row", (block_n,), itemsize, 2), fills]
    # Rows that are taken one by one, where a tile has an index outside, use the tile's buffers.
    return [Tile("rows", (block_m, block_n), itemsize, 2), fills, Tile("indices", (block_m,), INDEX, 2)]


def runs_tiles(block_n: str | int, itemsize: int) -> list[Tile]:
    """Tiles of the launch that sums runs."""
    tiles = [
        Tile("row of dy", (block_n,), itemsize, 2),
        Tile("zeros", (block_n,), FP32),
        Tile("sum so far", (block_n,), FP32),
    ]
    if itemsize < FP32:
        tiles += [Tile("row in fp32", (block_n,), FP32), Tile("row of dweight", (block_n,), itemsize, 2)]
    else:
        tiles.append(Tile("row of dweight", (block_n,), FP32, 2))
    return [*tiles, Tile("length of a run", (1,), FP32)]


def finish_tiles(block_n: str | int, block_m: str | int, itemsize: int) -> list[Tile]:
    """Tiles of the launch that stores zeros and adds partial sums."""
    tiles = [
        Tile("row of zeros", (block_n,), itemsize),
        Tile("tile of zeros", (block_m, block_n), itemsize),
        Tile("partial sum", (block_n,), FP32, 2),
        Tile("row of dweight", (block_n,), itemsize, 2),
    ]
    if itemsize < FP32:
        tiles.append(Tile("sum so far", (block_n,), FP32))
    return [*tiles, Tile("length of a run", (1,), FP32)]
