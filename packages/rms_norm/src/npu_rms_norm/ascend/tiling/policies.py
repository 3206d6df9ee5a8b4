"""The ways to hold rows on an Ascend chip and the buffers that each takes, as tables: the first way that fits is taken."""

from __future__ import annotations

from typing import Any, NamedTuple

from npu_tiling import Device, Tile
from npu_tiling.budget.arithmetic import FP32
from npu_tiling.places import here

from ...shape import Shape

HALF = FP32 // 2


class Policy(NamedTuple):
    """A row of the table of ways to hold rows on chip.

    Attributes:
        way: its name.
        kernel: "rows" holds a tile of whole rows, "wide" reads a row twice, in blocks of columns.
        rows: of a tile: "several", as many as fill a transfer, or "one".
        buffers: 2: the next tile is loaded while this one is computed.
        spare: part of the Unified Buffer that stays free.
        launches: which may take it: "forward" and "backward" on a 910B, the same "of fp32" where rows of fp32 are read, and
            "forward 950" and "backward 950" on an Ascend950.
        why: for people.
        decided_at: file and line of the row.
    """

    way: str
    kernel: str
    rows: str
    buffers: int
    spare: float
    launches: frozenset[str]
    why: str
    decided_at: str


def _row(*columns: Any) -> Policy:
    return Policy._make((*columns, here(2)))


ALL = frozenset({"forward", "backward", "forward 950", "backward 950"})
# A forward of an Ascend950 in tiles that leave no room: twice the time with CANN 9.1 (bf16 with a bias, 6144, predicted).
NO_ROOM = ALL - {"forward 950"}
# Rows of 16 bits are cast as soon as they are loaded: their buffer is free for the next row. fp32 rows are computed on
# in the load's buffer, so a second buffer pays. So it does in a forward on an Ascend950, whatever the dtype.
FP32_ROWS = frozenset({"forward of fp32", "backward of fp32", "forward 950"})
# An Ascend950 sums a single row of a backward anew for every 64 columns that use the sum: two passes are faster there.
ONE_ROW = ALL - {"backward 950"}

# The first way that fits is taken. The comments are microseconds that the time model predicts (Ascend910B4, CANN 9.1, 4096
# rows): of bf16, for forward 2048, forward 5760, backward 2048, backward 3584, forward 8192 and backward 8192, without the
# sum of dw's parts; of fp32, for a gated forward of 4096. -: it does not fit. CANN 8.5 and 9.0 agree about which is faster:
# a forward in several rows without room takes 20 to 36 % less time than one in single rows (bf16, widths from 4096 with a
# bias, 3072 with a sum to int8, 5504 plain); a row of bf16 takes with two buffers as long as with one, or 3 to 11 % longer,
# on CANN 8.5 up to 34 % longer (forward 10240: 395 and 294); a row of fp32 takes up to 12 % longer with one buffer than with
# two. No chip has shown any of it.
# fmt: off
POLICIES = (
    #                                                                                   f.   f.   b.   b.   f.   b.   f.
    #                                                                                 2048 5760 2048 3584 8192 8192 4096
    #    way                           kernel  rows       buffers  spare  launches     bf16                           fp32
    _row("several rows",               "rows", "several", 2,       1 / 8, ALL,       #  57    -   80    -    -    -    -
         "a transfer of several rows is fast, and their sums stay in the vector unit"),
    _row("several rows, no room left", "rows", "several", 2,       0,     NO_ROOM,   #  57  169   80  184    -    -    -
         "rows that fill the Unified Buffer are no slower than one"),
    _row("a row, two buffers",         "rows", "one",     2,       0,     FP32_ROWS, # 129  194  141  201  236    -  339
         "one row fits beside the next one, and a second buffer pays"),
    _row("a row, one buffer",          "rows", "one",     1,       0,     ONE_ROW,   # 120  185  128  187  226  386  353
         "a row is read once; in blocks of columns it is read twice"),
    _row("blocks of columns",          "wide", "one",     2,       0,     ALL,       # 131  221  254  345  267  674  339
         "a row does not fit whole, or, in a backward on an Ascend950, takes longer whole than in two passes"),
)
# fmt: on
_BY_WAY = {policy.way: policy for policy in POLICIES}
ONE_BUFFER, COLUMNS = _BY_WAY["a row, one buffer"], _BY_WAY["blocks of columns"]

# Bytes of one transfer. 8 KiB reach 76 % of the bandwidth and 16 KiB 94 %; a tile that fills the Unified Buffer leaves the
# compilers, which differ in what they need, no room. More blocks are alive at once in the passes over columns.
ROWS_BYTES, COLUMNS_BYTES = 12 * 1024, 8 * 1024


def tiles_of_rows(shape: Shape, device: Device, width: int, *, several: bool, buffers: int) -> list[Tile]:
    """What a "rows" kernel keeps on chip at once, as the compiler plans it."""
    forward, on_950 = not shape.backward, device.arch == "dav-c310"
    rounds, rounds_factors = shape.rounding.normalised != "fp32", shape.rounding.factors != "fp32"
    tile: tuple[str | int, ...] = ("ROWS", width)
    parameters: tuple[str | int, ...] = (1, width)
    # Beside the buffer that was loaded, arithmetic takes one tile where the result is fp32. A narrower result is cast from a
    # tile of its own.
    fp32_tiles = 2 if shape.narrow or on_950 else 1
    fp32_reads = sum(itemsize == FP32 for itemsize in shape.itemsizes)
    table = (
        # what                        shape        bytes                    copies            where
        *(("row read", tile, itemsize, buffers, True) for itemsize in shape.itemsizes),
        ("fp32 arithmetic", tile, FP32, fp32_tiles, True),
        ("copy of fp32 that was read", tile, FP32, fp32_reads, on_950 and fp32_reads > 0),
        ("result in another dtype", tile, HALF, 3, on_950 and shape.second_output),
        ("row reduction", tile, HALF, 1, True),
        ("result times 0", tile, FP32, 1, shape.quantised),
        ("sum stored", tile, shape.residual_itemsize, buffers, several and shape.residual_itemsize > 0),
        ("rounded product", tile, FP32, 1, several and forward and shape.biased and rounds),
        ("scale", parameters, FP32, 1, True),
        ("bias", parameters, FP32, 1, shape.biased),
        ("rstd, mean, rounded rstd", ("ROWS", 1), FP32, 3, True),
        ("sums of dw and db", tile, FP32, 1 + shape.biased, shape.backward),
        ("gate, slope, products", tile, FP32, 6, shape.backward and shape.gated),
        ("sum of dw over rows", tile, HALF, 1, shape.backward and several),
        ("rounded product", tile, HALF, 1, shape.backward and rounds_factors and buffers > 1 and not (several or on_950)),
    )
    return [Tile(what, size, itemsize, copies) for what, size, itemsize, copies, where in table if where]


def tiles_of_columns(shape: Shape) -> list[Tile]:
    """What a "wide" kernel keeps on chip at once, of one row."""
    tile: tuple[str | int, ...] = (1, "BLOCK_N")
    number: tuple[str | int, ...] = (1, 1)
    table = (
        # what                   shape   bytes  copies  where
        *(("row read", tile, itemsize, 2, True) for itemsize in shape.itemsizes),
        ("fp32 arithmetic", tile, FP32, 2, True),
        ("row reduction", tile, HALF, 1, True),
        ("result times 0", tile, FP32, 1, shape.quantised),
        ("weight read", tile, FP32, 2, True),
        ("scale", tile, FP32, 1, True),
        ("bias, read and added", tile, FP32, 3, shape.biased),
        ("rstd and mean", number, FP32, 2, True),
        ("sums", tile, FP32, 1 + (shape.biased and shape.backward), True),
        ("gate, slope, products", tile, FP32, 5, shape.gated and shape.backward),
    )
    return [Tile(what, size, itemsize, copies) for what, size, itemsize, copies, where in table if where]
