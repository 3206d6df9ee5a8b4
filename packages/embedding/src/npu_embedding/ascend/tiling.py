"""The way of a gradient, and blocks of the kernels, on Ascend."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from math import ceil, inf

from npu_tiling import Block, Device, Tile, fit, footprint
from npu_tiling.budget.arithmetic import FP32, equal_blocks
from npu_tiling.places import here

from ..both.tiling import MIN_CHUNK, Launch, Rule, Way, way_launch
from ..shape import RowShape

# See sort.py.
KEY_OF_ROW_0 = 0x00800000
_MAX_ROWS = 2**31 - 2**24 - 3  # of a table: their keys, and three more, are finite
_MAX_INDICES = 2**30  # places, and a quarter of a run more, are int32
_LOG = 11
BLOCK = 2**_LOG  # indices of a block; a sort takes 32 bytes of each
_MAX_RUNS = 4**3  # which three launches merge
MAX_ROWS_OF_ONE_DIGIT = 2 ** (31 - _LOG) - 2 ** (24 - _LOG) - 2  # and n_rows + 1 too
_SORT = (("LOG", _LOG), ("KEY_OF_ROW_0", KEY_OF_ROW_0))

WAYS = (
    # way, indices, elements of dy, rows of the table, why
    Rule(Way.MERGED, _MAX_INDICES, inf, _MAX_ROWS, f"a vector core sorts {BLOCK} numbers in its Unified Buffer", here()),
)

# A store of 32 KB is past the point where its length matters (16 KB reach 94 % of the bandwidth).
_TILE_BYTES = 32768
# Where rows are far apart, zeros are stored without a load beside them, so that the start of each store shows.
_ZEROS_BYTES = 2 * _TILE_BYTES
# Rows of a tile, however narrow: few enough that a few thousand indices divide evenly over the cores.
_MAX_TILE_ROWS = 32
_INDEX = 8  # bytes
# Tokens whose ids are hashed at once: whole 32-byte units of int32, two repeats of a vector instruction at most.
_TOKENS, _MAX_TOKENS = 8, 128
_NGRAM_NUMBERS = 40  # int32 of a token that are alive at once: limbs, products, remainders


class Kernel(Enum):
    """The kernels over rows."""

    GATHER = "gather_rows_kernel"
    SUMS = "sum_rows_kernel"
    PARTIALS = "add_partials_kernel"
    NGRAM = "ngram_rows_kernel"
    NGRAM_SUM = "ngram_rows_kernel, which adds"
    BAGS = "sum_bags_kernel, bag by bag"
    BAG_TILES = "sum_bags_kernel"
    SPREAD = "spread_bags_kernel, bag by bag"
    SPREAD_TILES = "spread_bags_kernel"


_NGRAMS = (Kernel.NGRAM, Kernel.NGRAM_SUM)
_BAGS = (Kernel.BAGS, Kernel.BAG_TILES, Kernel.SPREAD, Kernel.SPREAD_TILES)


@dataclass(frozen=True, kw_only=True)
class RowLaunch(Launch):
    """A launch over rows.

    Attributes:
        kernel: which one.
        shape: of the rows.
        block_m: rows of a tile; 1 where rows are taken one by one.
        block_n: columns of a tile.
    """

    kernel: Kernel
    shape: RowShape
    block_m: int
    block_n: int

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        tiles = _tiles(self.kernel, self.shape, moves_tiles=_fills_units(self.block_n, self.shape))
        return footprint(tiles, {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}, self.device)


def row_launch(kernel: Kernel, shape: RowShape, block_m: int, block_n: int, *, why: str, decided_at: str) -> RowLaunch:
    """A launch with a tile of so many rows and columns."""
    blocks, per_program = {"N": shape.width, "BLOCK_N": block_n}, block_m
    if kernel is not Kernel.PARTIALS:
        blocks["BLOCK_M"] = block_m
    if kernel is Kernel.GATHER:  # the compiler moves rows that fill 32-byte units as one tile
        blocks["GATHER"] = _fills_units(block_n, shape)
    if kernel in _NGRAMS:
        blocks["TILES"] = _fills_units(block_n, shape)
        per_program = block_m if blocks["TILES"] else 1
    if kernel in _BAGS:
        blocks["TILES"] = block_m > 1
    return RowLaunch(
        device=shape.device,
        blocks=tuple(blocks.items()),
        per_program=per_program,
        column_blocks=ceil(shape.width / block_n),
        why=why,
        decided_at=decided_at,
        kernel=kernel,
        shape=shape,
        block_m=block_m,
        block_n=block_n,
    )


def chunks(sums: Launch, n: int) -> int:
    """Pieces that n sorted positions and rows are cut in: as many as run at once, each through one block of columns."""
    return max(1, min(sums.device.vector_cores // sums.column_blocks, ceil(n / MIN_CHUNK)))


def gather_launch(shape: RowShape) -> RowLaunch:
    """Blocks of the look-up. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    rows = Block("BLOCK_M", max(2, min(_MAX_TILE_ROWS, _TILE_BYTES // (shape.width * shape.itemsize))), 2)
    moves_tiles = _fills_units(shape.width, shape)
    why, decided_at = "a tile of rows moves at once", here()
    if not moves_tiles:
        why, decided_at = "rows that do not fill 32-byte units move one by one", here()
        single = _tiles(Kernel.GATHER, shape, moves_tiles=False)
        if footprint(single, {"BLOCK_N": shape.width}, shape.device) > shape.device.ub_bytes:
            moves_tiles, why, decided_at = True, "a row does not fit: blocks of it, which fill 32-byte units", here()
    return _fitting(Kernel.GATHER, shape, rows, moves_tiles=moves_tiles, why=why, decided_at=decided_at)


def sums_launch(shape: RowShape) -> RowLaunch:
    """Blocks of the gradient's sums and zeros. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    # One row of zeros alone takes the double buffers of the sums from CANN 9.1 on an Ascend950.
    rows = Block("BLOCK_M", max(2, min(_MAX_TILE_ROWS, _ZEROS_BYTES // (shape.width * shape.itemsize))), 2)
    why = "rows are added one by one; zeros between them are long stores"
    return _fitting(Kernel.SUMS, shape, rows, why=why, decided_at=here())


def partials_launch(shape: RowShape) -> RowLaunch:
    """Blocks of the gradient's partial sums. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _fitting(Kernel.PARTIALS, shape, None, why="rows are added one by one", decided_at=here())


def ngram_launch(shape: RowShape) -> RowLaunch:
    """Blocks of the n-gram look-up that concatenates. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _ngram_launch(Kernel.NGRAM, shape)


def ngram_sum_launch(shape: RowShape) -> RowLaunch:
    """Blocks of the n-gram look-up that adds. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _ngram_launch(Kernel.NGRAM_SUM, shape)


def _ngram_launch(kernel: Kernel, shape: RowShape) -> RowLaunch:
    if not _fills_units(shape.width, shape):
        why = "rows that do not fill 32-byte units move one by one"
        return _fitting(kernel, shape, Block("BLOCK_M", _TOKENS, _TOKENS), moves_tiles=False, why=why, decided_at=here())
    tokens = min(_MAX_TOKENS, _TILE_BYTES // (shape.width * shape.itemsize) // _TOKENS * _TOKENS)
    rows = Block("BLOCK_M", max(_TOKENS, tokens), _TOKENS, _TOKENS)
    return _fitting(kernel, shape, rows, why="ids of many tokens are hashed at once", decided_at=here())


def bags_launch(shape: RowShape) -> RowLaunch:
    """Blocks of a look-up of bags between offsets. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _fitting(Kernel.BAGS, shape, None, why="rows of a bag are added one by one", decided_at=here())


def spread_launch(shape: RowShape) -> RowLaunch:
    """Blocks of the backward of bags up to dx and dsample. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _fitting(Kernel.SPREAD, shape, None, why="rows of a bag are written one by one", decided_at=here())


def bag_tiles_launch(shape: RowShape) -> RowLaunch:
    """Blocks of a look-up of bags of equally many ids. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _whole_rows(Kernel.BAG_TILES, shape) or bags_launch(shape)


def spread_tiles_launch(shape: RowShape) -> RowLaunch:
    """Blocks of the backward of normalised rows. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _whole_rows(Kernel.SPREAD_TILES, shape) or spread_launch(shape)


_ROW_BY_ROW = {Kernel.BAG_TILES: bags_launch, Kernel.SPREAD_TILES: spread_launch}


def _whole_rows(kernel: Kernel, shape: RowShape) -> RowLaunch | None:
    """Tiles of at least two whole rows, which the compiler moves at once; None where there are none."""
    if not _fills_units(shape.width, shape):
        return None
    rows = Block("BLOCK_M", max(2, min(_MAX_TILE_ROWS, _TILE_BYTES // (shape.width * shape.itemsize))), 2)
    launch = _fitting(kernel, shape, rows, why="the rows of several bags move at once", decided_at=here())
    return launch if launch.block_n == shape.width else None


def sort_launch(device: Device) -> Launch:
    """The launch that sorts runs of indices, and those that merge them."""
    return way_launch(WAYS[0], device, dict(_SORT), 1)


def sorted_runs(blocks: int, device: Device) -> tuple[int, int]:
    """Blocks of a run that one program sorts, and the rounds in which it merges them."""
    if blocks <= _MAX_RUNS:
        return 1, 0
    run, rounds = ceil(blocks / min(device.vector_cores, _MAX_RUNS)), 0
    while 4**rounds < run:
        rounds += 1
    return run, rounds


@functools.lru_cache(maxsize=64)
def search_steps(n: int) -> int:
    """Steps in which `first_keys` finds n keys: of n that are left, each takes a quarter."""
    steps = 0
    while n:
        n -= (n - 1) // 4 + 1
        steps += 1
    return steps


def slots_launch(device: Device) -> Launch:
    """The launch that finds slots of a sparse gradient."""
    why = f"{BLOCK} keys are searched at once"
    return Launch(device=device, blocks=_SORT, per_program=BLOCK, why=why, decided_at=here())


def smaller(launch: RowLaunch) -> RowLaunch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    kernel, shape, block_m, block_n = launch.kernel, launch.shape, launch.block_m, launch.block_n
    unit = _TOKENS if kernel in _NGRAMS else 1
    least = max(unit, 2)
    if block_m > least:
        block_m = max(least, block_m // 2 // unit * unit)
    elif kernel in _ROW_BY_ROW:  # tiles have whole rows
        return _ROW_BY_ROW[kernel](shape)
    else:
        block_n = _equal_columns(shape, ceil(block_n / 2))
        if block_n >= launch.block_n:  # no whole unit is left
            return None
    return row_launch(kernel, shape, block_m, block_n, why=launch.why, decided_at=launch.decided_at)


def _fitting(
    kernel: Kernel, shape: RowShape, rows: Block | None, *, why: str, decided_at: str, moves_tiles: bool = True
) -> RowLaunch:
    """The largest tile that fits: fewer rows, then fewer columns."""
    unit = shape.device.ub_align // shape.itemsize
    columns = Block("BLOCK_N", shape.width, min(shape.width, unit), unit)
    tiles = _tiles(kernel, shape, moves_tiles=moves_tiles)
    blocks = fit(tiles, (columns,) if rows is None else (rows, columns), shape.device)
    block_n = _equal_columns(shape, blocks["BLOCK_N"])
    return row_launch(kernel, shape, blocks.get("BLOCK_M", 1), block_n, why=why, decided_at=decided_at)


def _tiles(kernel: Kernel, shape: RowShape, *, moves_tiles: bool) -> list[Tile]:
    """What a kernel keeps in the Unified Buffer at once, as the compilers of CANN 8.5, 9.0 and 9.1 plan it."""
    itemsize = shape.itemsize
    row, tile, narrow = ("BLOCK_N",), ("BLOCK_M", "BLOCK_N"), itemsize < FP32
    if kernel is Kernel.GATHER:
        fills = Tile("rows of zeros and of NaN", (2, "BLOCK_N"), itemsize)
        if not moves_tiles:
            return [Tile("row", row, itemsize, 2), fills]
        # Rows that are taken one by one, where a tile has an index outside, use the tile's buffers.
        return [Tile("rows", tile, itemsize, 2), fills, Tile("indices", ("BLOCK_M",), _INDEX, 2)]
    if kernel in _NGRAMS:
        fetched: tuple[str, ...] = tile if moves_tiles else row
        tiles = [Tile("rows", fetched, itemsize, 2), Tile("row of NaN", row, itemsize), Tile("ids", ("BLOCK_M",), _INDEX, 6)]
        tiles += [Tile("numbers", (_NGRAM_NUMBERS, "BLOCK_M"), FP32)]
        if kernel is Kernel.NGRAM_SUM:
            rounded = [Tile("rows or sums that are rounded", fetched, FP32)] * (narrow or moves_tiles)
            tiles += [Tile("sums", fetched, FP32, 2), *rounded]
        return tiles
    if kernel is Kernel.BAGS:
        return [Tile("row and result", row, itemsize, 4), Tile("sum, and fp32 of a row in decoding", row, FP32, 8)]
    if kernel is Kernel.BAG_TILES:
        return [Tile("rows and results", tile, itemsize, 4), Tile("sums, and fp32 of rows", tile, FP32, 4)]
    if kernel is Kernel.SPREAD_TILES:
        return [Tile("rows, dy and dx", tile, itemsize, 6), Tile("fp32: rows, dy, products", tile, FP32, 4)]
    if kernel is Kernel.SPREAD:
        return [Tile("row, dy and dx", row, itemsize, 6), Tile("fp32: row, dy, product, dx", row, FP32, 4)]
    if kernel is Kernel.SUMS:
        tiles = [Tile("row of dy", row, itemsize, 2), Tile("zeros", row, FP32), Tile("sum so far", row, FP32)]
        tiles += [Tile("row in fp32", row, FP32)] * narrow
        tiles += [Tile("tile of zeros", tile, itemsize)]
    else:
        tiles = [Tile("partial sum", row, FP32, 2), *[Tile("sum so far", row, FP32)] * narrow]
        if shape.device.arch == "dav-c310":
            tiles += [Tile("product with 1", row, FP32, 1 if narrow else 2)]
    return [*tiles, Tile("row of dweight", row, itemsize, 2), Tile("length of a run", (1,), FP32)]


def _fills_units(columns: int, shape: RowShape) -> bool:
    """Whether so many columns are whole units of what the device transfers."""
    return columns * shape.itemsize % shape.device.ub_align == 0


def _equal_columns(shape: RowShape, largest: int) -> int:
    """Columns of as few blocks as fit, of equal length; whole units, if several."""
    if largest >= shape.width:
        return shape.width
    return equal_blocks(shape.width, largest, shape.device.ub_align // shape.itemsize)
