"""Tiles on Ascend: the ways to run a kernel with the Unified Buffer that each takes, and the first that fits a `Shape`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import Any, NamedTuple

from npu_tiling import Block, Device, Tile, TileTooLargeError, UnifiedBufferError, fit, footprint
from npu_tiling.budget import FP32, INT32_END, equal_blocks, here, round_up

from ..shape import Shape, Task, TokenTiling


class Way(Enum):
    """How many rows a tile has, and who loads the next rows while a kernel computes.

    Attributes:
        ahead: the kernel loads the next source itself.
        two_buffers: the compiler gives each load in a loop two buffers (the option multibuffer).
    """

    def __init__(self, text: str, ahead: bool, two_buffers: bool) -> None:
        self.ahead, self.two_buffers = ahead, two_buffers

    ROWS_AHEAD = ("rows share a tile; the kernel loads the next source ahead", True, False)
    ROWS = ("rows share a tile; loads have two buffers", False, True)
    ROW_AHEAD_TWO_BUFFERS = ("one row a tile; the kernel loads ahead into two buffers", True, True)
    ROW_AHEAD = ("one row a tile; the kernel loads ahead", True, False)
    ROW_TWO_BUFFERS = ("one row a tile; loads have two buffers", False, True)
    ROW = ("one row a tile; loads wait", False, False)
    ROW_KEPT = ("one row a tile; the first sweep keeps every <dh, v_i>", True, True)
    HALVES_KEPT = ("a row as two halves; the first sweep keeps every <dh, v_i>", True, False)
    COLUMNS = ("blocks of columns", False, True)

    def __str__(self) -> str:
        return str(self.value[0])

    @property
    def has_one_row(self) -> bool:
        return self not in (Way.ROWS_AHEAD, Way.ROWS, Way.COLUMNS)


class Bytes(NamedTuple):
    """Bytes of Unified Buffer: for every element of a tile's rows, and for every column once."""

    element: int
    column: int = 0


class Rule(NamedTuple):
    """A row of a table: a way to run one kind of launch, and its bytes.

    Bytes are the larger total that CANN 8.5 or 9.0 prints when it refuses a tile. Two cases have more, see there: the way
    that CANN 9.1 wants more for, and _BACKWARD_BY_TOKEN. They are no sums over tiles: the compilers reuse buffers where they
    can. Tests compile tiles that fit by them.

    Attributes:
        way: how.
        dav_c220_16, dav_c220_32: bytes on a 910B, for elements of 16 and 32 bits.
        dav_c310_16, dav_c310_32: bytes on an Ascend950.
        decided_at: file and line of the row.
    """

    way: Way
    dav_c220_16: Bytes
    dav_c220_32: Bytes
    dav_c310_16: Bytes
    dav_c310_32: Bytes
    decided_at: str

    def bytes(self, shape: Shape, device: Device) -> Bytes:
        """Those of a launch."""
        if device.arch == "dav-c310":
            return self.dav_c310_32 if shape.itemsize == FP32 else self.dav_c310_16
        return self.dav_c220_32 if shape.itemsize == FP32 else self.dav_c220_16

    def tiles(self, shape: Shape, device: Device, columns: int | str, rows: int | str) -> list[Tile]:
        """What is on chip at once."""
        element, column = self.bytes(shape, device)
        tiles = [Tile("rows", (rows, columns), element), Tile("statistics", (rows, 1), FP32, 26)]
        return [*tiles, Tile("weights", (1, columns), column)] if column else tiles


def _row(way: Way, *sizes: tuple[int, int] | int) -> Rule:
    a16, a32, b16, b32 = (Bytes(*size) if isinstance(size, tuple) else Bytes(size) for size in sizes)
    return Rule(way, a16, a32, b16, b32, here(2))


# At the end of a row: predicted time over the time that the bytes take, on a 910B4 with CANN about 9.1, for 8 sources of
# 8192 tokens in bf16 and a width that takes this way.
# fmt: off
_FORWARD = (
    #                                910B, 16     910B, 32     950, 16      950, 32
    _row(Way.ROWS_AHEAD,             (20, 4),     (27, 8),     (22, 1),     (32, 1)),    # 1.76
    # For an element of this way CANN 9.1 wants 4 bytes more than CANN 8.5 and 9.0.
    _row(Way.ROW_AHEAD_TWO_BUFFERS,  28,          36,          28,          30),         # 1.96
    _row(Way.ROW_AHEAD,              24,          32,          28,          26),         # 1.70
    _row(Way.ROW,                    20,          20,          16,          16),         # 2.73
)
_FORWARD_NORMALISED = (
    _row(Way.ROWS_AHEAD,             (22, 3),     (25, 8),     (22, 2),     (24, 4)),    # 1.74
    _row(Way.ROW_AHEAD_TWO_BUFFERS,  28,          36,          28,          40),         # 2.04
    _row(Way.ROW_AHEAD,              26,          28,          26,          28),         # 1.72
    _row(Way.ROW,                    20,          20,          16,          16),         # 2.63
)
_FORWARD_PREFIX = (
    _row(Way.ROWS_AHEAD,             (20, 4),     (20, 8),     (22, 2),     (24, 2)),    # 1.85
    _row(Way.ROW_AHEAD,              24,          24,          22,          24),         # 1.78
    _row(Way.ROW,                    20,          20,          16,          20),         # 2.68
)
_BACKWARD = (  # with a gradient of h in fp32, whatever the sources are
    _row(Way.ROWS,                   (28, 5),     (28, 9),     (21, 5),     (30, 15)),   # 1.93
    _row(Way.ROW_TWO_BUFFERS,        36,          38,          30,          40),         # 1.27; of fp32
    _row(Way.ROW,                    26,          22,          24,          24),         # 1.93
)
_BACKWARD_PREFIX = (
    _row(Way.ROWS,                   (30, 4),     (32, 4),     (28, 4),     (40, 2)),    # 2.02
    _row(Way.ROW_TWO_BUFFERS,        32,          38,          32,          40),         # 2.06
    _row(Way.ROW,                    26,          26,          22,          24),         # 1.88
)
# Bytes of a tile with which no load waits. With fewer it fits too, but then compilers put a product where the next row is to
# go. <dh, v_i> is kept, each source is read twice. `statistics_by_token` chooses these ways on a 910B alone, in 16 bits.
_BACKWARD_BY_TOKEN = (
    _row(Way.ROW_KEPT,               46,          46,          46,          46),         # 1.57
    _row(Way.HALVES_KEPT,            27,          27,          27,          27),         # 1.49
)
_MERGE = (
    _row(Way.ROWS,                   (20, 4),     (20, 4),     (18, 3),     (24, 8)),    # 1.43
    _row(Way.ROW,                    16,          16,          16,          20),         # 1.46
)
_MERGE_BACKWARD = (
    _row(Way.ROWS,                   (28, 4),     (30, 3),     (33, 4),     (48, 0)),    # 1.23
    _row(Way.ROW_TWO_BUFFERS,        32,          33,          37,          48),         # 1.23
    _row(Way.ROW,                    24,          22,          28,          28),         # 1.23
)
_NORM_BACKWARD = (
    _row(Way.ROWS,                   (24, 2),     (26, 4),     (23, 10),    (26, 15)),   # 1.26
    _row(Way.ROW,                    22,          22,          28,          28),         # 1.26
)
_PRODUCTS = (_row(Way.COLUMNS,       (20, 8),     (22, 8),     (16, 8),     (16, 8)),)  # 2.81
_WEIGHTED_SUM = (_row(Way.COLUMNS,   (17, 8),     (20, 8),     (16, 8),     (16, 8)),)  # 1.13
_GRADIENT = (_row(Way.COLUMNS,       (36, 16),    (36, 16),    (26, 16),    (27, 20)),)  # 1.28
# fmt: on

_TABLES = {
    Task.MERGE: _MERGE,
    Task.MERGE_BACKWARD: _MERGE_BACKWARD,
    Task.NORM_BACKWARD: _NORM_BACKWARD,
    Task.PRODUCTS: _PRODUCTS,
    Task.WEIGHTED_SUM: _WEIGHTED_SUM,
    Task.GRADIENT: _GRADIENT,
}


def rules(shape: Shape) -> tuple[Rule, ...]:
    """The rules of a launch, in the order in which they are tried."""
    if shape.task == Task.FORWARD:
        return _FORWARD_PREFIX if shape.prefix else _FORWARD_NORMALISED if shape.normalised else _FORWARD
    if shape.task != Task.BACKWARD:
        return _TABLES[shape.task]
    if shape.by_token:
        return _BACKWARD_BY_TOKEN
    return _BACKWARD_PREFIX if shape.prefix else _BACKWARD


# Rows share a tile until one transfer has this many bytes: 8 KB reach 76 % of the bandwidth. 16 KB would reach 94 %, but
# when tiles fill the Unified Buffer the compilers reuse the idle half of a double buffer, and each load then waits for the
# arithmetic before it: `npu-offline tune` predicts less time for the smaller tiles. A forward that loads ahead keeps its
# buffers; with more than nine rows the time of its arithmetic on one number a row shows.
_TRANSFER_BYTES = 8 * 1024
_AHEAD_BYTES = 14 * 1024
_MAX_AHEAD_ROWS = 9
_COLUMN_BYTES = 8 * 1024  # of a transfer in the kernels that take columns
# Columns from which on a backward keeps <dh, v_i>. Predicted times over that of the bytes, of the kernel that keeps them and
# of tiles of rows, on CANN 8.5 and about 9.1: 1536 columns 2.18 : 3.26 and 2.36 : 2.16, 2048 1.86 : 2.96 and 2.02 : 1.98,
# 3072 1.70 : 2.65 and 1.80 : 1.99; 4096 beside a prefix, where one row is a tile, 1.65 : 2.25 and 1.62 : 2.10.
_MIN_KEPT_WIDTH = 2048
MAX_KEPT_SOURCES = 64  # for which the kernel has places


@dataclass(frozen=True, kw_only=True, repr=False)
class AscendTiling(TokenTiling):
    """The tile of a launch on Ascend; a program for each vector core."""

    way: Way

    @functools.cached_property
    def kernel(self) -> str:
        if self.shape.task == Task.FORWARD and self.way.ahead:
            return "attn_res_forward_prefetch_kernel"
        if self.shape.task == Task.BACKWARD and self.shape.by_token:
            return "attn_res_backward_row_kernel"
        return super().kernel

    @property
    def sizes(self) -> dict[str, Any]:
        return {"HALVES": self.way is Way.HALVES_KEPT, "BY_TOKEN": self.shape.by_token}

    @property
    def options(self) -> dict[str, int]:
        return {"multibuffer": self.way.two_buffers}

    @property
    def ub_bytes(self) -> int:
        """Declared bytes of Unified Buffer."""
        row = next(row for row in rules(self.shape) if row.way is self.way)
        tiles = row.tiles(self.shape, self.device, self.block_d, self.block_m * self.block_s)
        return footprint(tiles, {}, self.device)

    def _smaller(self) -> AscendTiling | None:
        """The next smaller tiling for a compiler that needs more Unified Buffer than was declared; None at the end.

        The last one for whole rows has block_d < D: `has_whole_rows` is then False, and the caller takes another way.
        """
        shape = self.shape
        single = [row for row in rules(shape) if row.way.has_one_row]
        if self.block_m > 1:
            rows = self.block_m // 2
            if rows == 1 and single:
                return dataclasses.replace(self, block_m=1, way=single[0].way, decided_at=single[0].decided_at)
            return dataclasses.replace(self, block_m=rows)
        if single:
            tried = [row.way for row in single].index(self.way) + 1
            if tried < len(single):
                return dataclasses.replace(self, way=single[tried].way, decided_at=single[tried].decided_at)
        unit = _unit(shape, self.device)
        if self.block_d <= unit or not (shape.takes_columns or self.has_whole_rows):
            return None
        return dataclasses.replace(self, block_d=round_up(ceil(self.block_d / 2), unit))


def choose(shape: Shape, device: Device) -> AscendTiling | None:
    """The fastest way that fits; None where no whole rows do.

    Raises:
        UnifiedBufferError: not even the smallest block of columns fits.
    """
    error, refusals = None, []
    for row in rules(shape):
        try:
            blocks = _blocks(row, shape, device)
        except UnifiedBufferError as refused:
            error = refused
            refusals.append(f"{row.way}: {refused.needed:,} bytes")
            continue
        if blocks is not None:
            chosen = AscendTiling(shape=shape, device=device, way=row.way)
            why = f"faster ways cannot run ({', '.join(refusals)})" if refusals else "the fastest way of the table fits"
            return dataclasses.replace(chosen, **blocks, why=why, decided_at=row.decided_at)  # type: ignore[arg-type]
        refusals.append(f"{row.way}: two rows are further apart than 32-bit offsets reach")
    if shape.takes_columns and isinstance(error, TileTooLargeError):
        raise error
    return None


def _blocks(row: Rule, shape: Shape, device: Device) -> dict[str, int] | None:
    """The largest tile of a way; None where rows cannot share one. Raises `UnifiedBufferError` where none fits."""
    padded = round_up(shape.width, _unit(shape, device))
    if shape.takes_columns:
        # Two rows at least: one alone reduces through the scalar unit, and loses its double buffer to CANN 9.0 on dav-c310.
        block_m = min(2, _addressable(shape)) if shape.layers == 1 else 1
        unit = _unit(shape, device)
        columns = Block("COLUMNS", min(padded, _COLUMN_BYTES // shape.itemsize), unit, unit)
        largest = fit(row.tiles(shape, device, "COLUMNS", shape.layers * block_m), (columns,), device)["COLUMNS"]
        return {"block_m": block_m, "block_s": shape.layers, "block_d": equal_blocks(padded, largest, unit)}
    if row.way.has_one_row:
        fit(row.tiles(shape, device, padded, 1), (), device)
        return {"block_d": padded}
    rows = _rows(row.way, padded * shape.itemsize, _addressable(shape))
    if rows < 2:  # one row alone has ways of its own
        return None
    return {
        "block_m": fit(row.tiles(shape, device, padded, "ROWS"), (Block("ROWS", rows, 2),), device)["ROWS"],
        "block_d": padded,
    }


def _rows(way: Way, row_bytes: int, addressable: int) -> int:
    """Rows that a tile should have: two or more keep row reductions in the vector unit."""
    ahead = min(_MAX_AHEAD_ROWS, _AHEAD_BYTES // row_bytes) if way.ahead else 0
    return min(max(2, _TRANSFER_BYTES // row_bytes, ahead), addressable)


def statistics_by_token(width: int, itemsize: int, n_sources: int, device: Device) -> bool:
    """Whether the statistics that a forward keeps are [tokens, sources], for a backward that keeps <dh, v_i>.

    An Ascend950 never has such a backward: nothing predicts its time there. Sources in fp32 have h, and one sweep.
    """
    if device.arch != "dav-c220" or itemsize > 2 or width < _MIN_KEPT_WIDTH or n_sources > MAX_KEPT_SOURCES:
        return False
    return _can_keep(width, itemsize, device)


@functools.lru_cache(maxsize=256)
def _can_keep(width: int, itemsize: int, device: Device) -> bool:
    return choose(Shape(task=Task.BACKWARD, width=width, itemsize=itemsize, by_token=True), device) is not None


def _unit(shape: Shape, device: Device) -> int:
    """Columns that make up one aligned piece of a row in every tensor."""
    return device.ub_align // (2 if shape.prefix else shape.itemsize)


def _addressable(shape: Shape) -> int:
    """Rows that one tile may have: offsets inside a tile are 32-bit."""
    return max(1, (INT32_END - shape.width) // max(shape.row_stride, shape.width))
