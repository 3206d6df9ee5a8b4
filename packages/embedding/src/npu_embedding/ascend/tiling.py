"""The way of a gradient, and blocks of the kernels, on Ascend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from math import ceil, inf

from npu_tiling import Block, Device, Tile, fit, footprint, persistent_grid
from npu_tiling.budget.arithmetic import FP32, equal_blocks
from npu_tiling.places import here

from ..both.tiling import IndexLaunch, Rule, Way
from ..shape import RowShape

KEY_OF_ROW_0 = 0x00800000  # of the keys that are sorted: see keys.py
_MAX_ROWS = 2**31 - 2**24 - 1  # of a table: their keys are below infinity

WAYS = (
    # way, indices, rows of the table, why
    Rule(Way.SORTED_AS_FP32, inf, _MAX_ROWS, "CANN sorts fp32 numbers on vector cores, integers on the AI CPU", here()),
)

# A store of 32 KB is past the point where its length matters (16 KB reach 94 % of the bandwidth).
_TILE_BYTES = 32768
# Zeros are stored without a load beside them, so that the start of each store shows: half as many starts.
_ZEROS_BYTES = 2 * _TILE_BYTES
# Rows of a tile, however narrow: few enough that a few thousand indices divide evenly over the cores.
_MAX_TILE_ROWS = 32
_MIN_CHUNK = 8  # sorted positions: a shorter chunk costs more in partial sums than it spreads work
_INDEX = 8  # bytes


class Kernel(Enum):
    """The kernels over rows: module and function."""

    GATHER = ("ascend.gather", "gather_rows_kernel")
    SUMS = ("ascend.sums", "sum_runs_kernel")
    FINISH = ("ascend.sums", "finish_rows_kernel")


@dataclass(frozen=True, kw_only=True)
class AscendLaunch:
    """A launch over rows: blocks and compiler options. No number of rows changes it.

    Attributes:
        kernel: which one.
        shape: of the rows.
        block_m: rows of a tile; 1 where rows are taken one by one.
        block_n: columns of a tile.
        why: the reason for the tile.
        decided_at: file and line.
    """

    kernel: Kernel
    shape: RowShape
    block_m: int
    block_n: int
    why: str
    decided_at: str

    @property
    def column_blocks(self) -> int:
        return ceil(self.shape.width / self.block_n)

    @property
    def moves_tiles(self) -> bool:
        """Whether a tile is fetched and stored at once: the compiler does that with rows that fill 32-byte units."""
        return _fills_units(self.block_n, self.shape)

    @property
    def constants(self) -> dict[str, int | bool]:
        """The kernel's `tl.constexpr` that follow from the tiling."""
        blocks: dict[str, int | bool] = {"N": self.shape.width, "BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        if self.kernel is Kernel.SUMS:
            del blocks["BLOCK_M"]
        return {**blocks, "GATHER": self.moves_tiles} if self.kernel is Kernel.GATHER else blocks

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {}

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        tiles = _tiles(self.kernel, self.shape.itemsize, moves_tiles=self.moves_tiles)
        return footprint(tiles, {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}, self.shape.device)

    def grid(self, rows: int) -> int:
        """Programs for so many rows that are gathered or finished."""
        return persistent_grid(ceil(rows / self.block_m) * self.column_blocks, self.shape.device)

    def chunks(self, n: int) -> int:
        """Pieces that n sorted positions are cut in: as many as run at once, each through one block of columns."""
        return max(1, min(self.shape.device.vector_cores // self.column_blocks, ceil(n / _MIN_CHUNK)))


def gather_launch(shape: RowShape) -> AscendLaunch:
    """Blocks of the look-up. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    rows = Block("BLOCK_M", max(2, min(_MAX_TILE_ROWS, _TILE_BYTES // (shape.width * shape.itemsize))), 2)
    moves_tiles = _fills_units(shape.width, shape)
    why, decided_at = "a tile of rows moves at once", here()
    if not moves_tiles:
        why, decided_at = "rows that do not fill 32-byte units move one by one", here()
        single = _tiles(Kernel.GATHER, shape.itemsize, moves_tiles=False)
        if footprint(single, {"BLOCK_N": shape.width}, shape.device) > shape.device.ub_bytes:
            moves_tiles, why, decided_at = True, "a row does not fit: blocks of it, which fill 32-byte units", here()
    return _launch(Kernel.GATHER, shape, rows, moves_tiles=moves_tiles, why=why, decided_at=decided_at)


def sums_launch(shape: RowShape) -> AscendLaunch:
    """Blocks of the gradient's sums. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _launch(Kernel.SUMS, shape, None, why="rows are added one by one", decided_at=here())


def finish_launch(shape: RowShape) -> AscendLaunch:
    """Blocks of the gradient's zeros and partial sums. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    rows = Block("BLOCK_M", max(1, min(_MAX_TILE_ROWS, _ZEROS_BYTES // (shape.width * shape.itemsize))))
    why = "zeros are stored without loads beside them: long stores"
    return _launch(Kernel.FINISH, shape, rows, why=why, decided_at=here())


def keys_launch(device: Device) -> IndexLaunch:
    """The launch that makes keys of indices."""
    blocks = (("BLOCK_M", 256), ("KEY_OF_ROW_0", KEY_OF_ROW_0))
    return IndexLaunch(device=device, blocks=blocks, per_program=256, rule=WAYS[0])


def offsets_launch(device: Device) -> IndexLaunch:
    """The launch that finds where the indices of each row begin."""
    # Rows of a tile: a search for each tile is little of the work.
    return IndexLaunch(device=device, blocks=(("BLOCK_R", 256), ("BLOCK_I", 32)), per_program=256, rule=WAYS[0])


def smaller(launch: AscendLaunch) -> AscendLaunch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if launch.block_m > 2:
        return dataclasses.replace(launch, block_m=launch.block_m // 2)
    half = _equal_columns(launch.shape, ceil(launch.block_n / 2))
    return dataclasses.replace(launch, block_n=half) if half < launch.block_n else None


def _launch(
    kernel: Kernel, shape: RowShape, rows: Block | None, *, why: str, decided_at: str, moves_tiles: bool = True
) -> AscendLaunch:
    """The largest tile that fits: fewer rows, then fewer columns."""
    unit = shape.device.ub_align // shape.itemsize
    columns = Block("BLOCK_N", shape.width, min(shape.width, unit), unit)
    tiles = _tiles(kernel, shape.itemsize, moves_tiles=moves_tiles)
    blocks = fit(tiles, (columns,) if rows is None else (rows, columns), shape.device)
    return AscendLaunch(
        kernel=kernel,
        shape=shape,
        block_m=blocks.get("BLOCK_M", 1),
        block_n=_equal_columns(shape, blocks["BLOCK_N"]),
        why=why,
        decided_at=decided_at,
    )


def _tiles(kernel: Kernel, itemsize: int, *, moves_tiles: bool) -> list[Tile]:
    """What a kernel keeps in the Unified Buffer at once, as the compilers of CANN 8.5, 9.0 and 9.1 plan it."""
    row, tile, narrow = ("BLOCK_N",), ("BLOCK_M", "BLOCK_N"), itemsize < FP32
    if kernel is Kernel.GATHER:
        fills = Tile("rows of zeros and of NaN", (2, "BLOCK_N"), itemsize)
        if not moves_tiles:
            return [Tile("row", row, itemsize, 2), fills]
        # Rows that are taken one by one, where a tile has an index outside, use the tile's buffers.
        return [Tile("rows", tile, itemsize, 2), fills, Tile("indices", ("BLOCK_M",), _INDEX, 2)]
    if kernel is Kernel.SUMS:
        tiles = [Tile("row of dy", row, itemsize, 2), Tile("zeros", row, FP32), Tile("sum so far", row, FP32)]
        tiles += [Tile("row in fp32", row, FP32)] * narrow
    else:
        tiles = [Tile("row of zeros", row, itemsize), Tile("tile of zeros", tile, itemsize)]
        tiles += [Tile("partial sum", row, FP32, 2), *[Tile("sum so far", row, FP32)] * narrow]
    return [*tiles, Tile("row of dweight", row, itemsize, 2), Tile("length of a run", (1,), FP32)]


def _fills_units(columns: int, shape: RowShape) -> bool:
    """Whether so many columns are whole units of what the device transfers."""
    return columns * shape.itemsize % shape.device.ub_align == 0


def _equal_columns(shape: RowShape, largest: int) -> int:
    """Columns of as few blocks as fit, of equal length; whole units, if several."""
    if largest >= shape.width:
        return shape.width
    return equal_blocks(shape.width, largest, shape.device.ub_align // shape.itemsize)
