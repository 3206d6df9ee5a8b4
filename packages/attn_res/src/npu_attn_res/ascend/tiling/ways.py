"""The ways to run a kernel on Ascend, and the Unified Buffer that each takes in the compilers' plans."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from npu_tiling import Device, Tile
from npu_tiling.budget.arithmetic import FP32
from npu_tiling.places import here

from ...shape import Shape, Task


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


class Footprint(NamedTuple):
    """One way to run one kind of launch.

    Bytes are the larger total that CANN 8.5 or 9.0 prints when it refuses a tile; for _BACKWARD_BY_TOKEN more, see there.
    They are no sums over tiles: the compilers reuse buffers where they can. Tests compare.

    Attributes:
        way: how.
        dav_c220_16, dav_c220_32: bytes on a 910B, for elements of 16 and 32 bits.
        dav_c310_16, dav_c310_32: bytes on an Ascend950.
        floors: predicted time as a multiple of that of the bytes: 910B4, CANN about 9.1, 8 sources of 8192 tokens in bf16, a
            width that takes this way.
        decided_at: file and line of the row.
    """

    way: Way
    dav_c220_16: Bytes
    dav_c220_32: Bytes
    dav_c310_16: Bytes
    dav_c310_32: Bytes
    floors: float
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


def _row(way: Way, *sizes: tuple[int, int] | int, floors: float) -> Footprint:
    a16, a32, b16, b32 = (Bytes(*size) if isinstance(size, tuple) else Bytes(size) for size in sizes)
    return Footprint(way, a16, a32, b16, b32, floors, here(2))


# fmt: off
_FORWARD = (
    #                                910B, 16     910B, 32     950, 16      950, 32
    _row(Way.ROWS_AHEAD,             (20, 4),     (27, 8),     (22, 1),     (32, 1),    floors=1.76),
    # CANN 9.1 wants 4 bytes more than the others
    _row(Way.ROW_AHEAD_TWO_BUFFERS,  28,          36,          28,          30,         floors=1.96),
    _row(Way.ROW_AHEAD,              24,          32,          28,          26,         floors=1.70),
    _row(Way.ROW,                    20,          20,          16,          16,         floors=2.73),
)
_FORWARD_NORMALISED = (
    _row(Way.ROWS_AHEAD,             (22, 3),     (25, 8),     (22, 2),     (24, 4),    floors=1.74),
    _row(Way.ROW_AHEAD_TWO_BUFFERS,  28,          36,          28,          40,         floors=2.04),
    _row(Way.ROW_AHEAD,              26,          28,          26,          28,         floors=1.72),
    _row(Way.ROW,                    20,          20,          16,          16,         floors=2.63),
)
_FORWARD_PREFIX = (
    _row(Way.ROWS_AHEAD,             (20, 4),     (20, 8),     (22, 2),     (24, 2),    floors=1.85),
    _row(Way.ROW_AHEAD,              24,          24,          22,          24,         floors=1.78),
    _row(Way.ROW,                    20,          20,          16,          20,         floors=2.68),
)
_BACKWARD = (  # with a gradient of h in fp32, whatever the sources are
    _row(Way.ROWS,                   (28, 5),     (28, 9),     (21, 5),     (30, 15),   floors=1.93),
    _row(Way.ROW_TWO_BUFFERS,        36,          38,          30,          40,         floors=1.27),  # floors: in fp32
    _row(Way.ROW,                    26,          22,          24,          24,         floors=1.93),
)
_BACKWARD_PREFIX = (
    _row(Way.ROWS,                   (30, 4),     (32, 4),     (28, 4),     (40, 2),    floors=2.02),
    _row(Way.ROW_TWO_BUFFERS,        32,          38,          32,          40,         floors=2.06),
    _row(Way.ROW,                    26,          26,          22,          24,         floors=1.88),
)
# Bytes with which no load waits. A tile fits in fewer, but then compilers put a product where the next row is to go.
# `statistics_by_token` chooses these ways on a 910B alone, in 16 bits.
_BACKWARD_BY_TOKEN = (
    _row(Way.ROW_KEPT,               46,          46,          46,          46,         floors=1.57),
    _row(Way.HALVES_KEPT,            27,          27,          27,          27,         floors=1.49),
)
_MERGE = (
    _row(Way.ROWS,                   (20, 4),     (20, 4),     (18, 3),     (24, 8),    floors=1.43),
    _row(Way.ROW,                    16,          16,          16,          20,         floors=1.46),
)
_MERGE_BACKWARD = (
    _row(Way.ROWS,                   (28, 4),     (30, 3),     (33, 4),     (48, 0),    floors=1.23),
    _row(Way.ROW_TWO_BUFFERS,        32,          33,          37,          48,         floors=1.23),
    _row(Way.ROW,                    24,          22,          28,          28,         floors=1.23),
)
_NORM_BACKWARD = (
    _row(Way.ROWS,                   (24, 2),     (26, 4),     (23, 10),    (26, 15),   floors=1.26),
    _row(Way.ROW,                    22,          22,          28,          28,         floors=1.26),
)
_PRODUCTS = (_row(Way.COLUMNS,       (20, 8),     (22, 8),     (16, 8),     (16, 8),    floors=2.81),)
_WEIGHTED_SUM = (_row(Way.COLUMNS,   (17, 8),     (20, 8),     (16, 8),     (16, 8),    floors=1.13),)
_GRADIENT = (_row(Way.COLUMNS,       (36, 16),    (36, 16),    (26, 16),    (27, 20),   floors=1.28),)
# fmt: on

_TABLES = {
    Task.MERGE: _MERGE,
    Task.MERGE_BACKWARD: _MERGE_BACKWARD,
    Task.NORM_BACKWARD: _NORM_BACKWARD,
    Task.PRODUCTS: _PRODUCTS,
    Task.WEIGHTED_SUM: _WEIGHTED_SUM,
    Task.GRADIENT: _GRADIENT,
}


def ways(shape: Shape) -> tuple[Footprint, ...]:
    """The ways to run a launch, in the order in which they are tried."""
    if shape.task == Task.FORWARD:
        return _FORWARD_PREFIX if shape.prefix else _FORWARD_NORMALISED if shape.normalised else _FORWARD
    if shape.task != Task.BACKWARD:
        return _TABLES[shape.task]
    if shape.by_token:
        return _BACKWARD_BY_TOKEN
    return _BACKWARD_PREFIX if shape.prefix else _BACKWARD
