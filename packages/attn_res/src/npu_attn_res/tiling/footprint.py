"""What each kernel keeps in the Unified Buffer at once, as the compilers plan it."""

from __future__ import annotations

from typing import NamedTuple

from npu_tiling import Device, Tile, footprint
from npu_tiling.budget.arithmetic import FP32

from .launches import Kind, Launch, Problem

# Unified Buffer that a kernel takes: bytes for every element of its rows, and for every column once. The compilers
# of CANN 8.5 and 9.0 reuse buffers where they can, so these are totals, no sums over tiles: what they ask for, the larger,
# when they refuse a tile. Tests compare. For each kind: dav-c220 with bf16 or fp16, with fp32; dav-c310 with the same.
_BYTES = {
    Kind.FORWARD: ((20, 4), (28, 8), (22, 1), (32, 1)),
    Kind.FORWARD_NORMALISED: ((22, 4), (25, 8), (22, 2), (24, 4)),
    Kind.PHASE1: ((23, 4), (28, 8), (24, 4), (28, 4)),  # of one layer
    Kind.LAYERS: ((24, 4), (24, 4), (20, 1), (20, 1)),
    Kind.BACKWARD: ((24, 5), (28, 9), (21, 5), (28, 9)),
    Kind.BACKWARD_FP32: ((28, 5), (28, 9), (21, 5), (30, 15)),  # dh in fp32, whatever the sources are
    Kind.BANK: ((20, 4), (20, 8), (22, 2), (24, 2)),
    Kind.BANK_BACKWARD: ((30, 4), (32, 4), (28, 4), (40, 2)),
    Kind.PRODUCTS: ((20, 8), (22, 8), (16, 8), (16, 8)),
    Kind.WEIGHTED_SUM: ((17, 8), (20, 8), (16, 8), (16, 8)),
    Kind.GRADIENT: ((36, 16), (36, 16), (26, 16), (27, 20)),
    Kind.MERGE: ((20, 4), (20, 4), (18, 3), (24, 8)),
    Kind.MERGE_BACKWARD: ((28, 4), (30, 3), (33, 4), (48, 0)),
    Kind.NORM_BACKWARD: ((24, 2), (26, 4), (23, 10), (26, 15)),
}
_LAYERS_ONE_BUFFER = ((20, 1), (20, 1), (16, 1), (16, 1))  # of Kind.LAYERS, not double-buffered
PREFETCHED = (Kind.FORWARD, Kind.FORWARD_NORMALISED, Kind.BANK, Kind.PHASE1)  # what loads prefetch, with several rows


class RowWay(NamedTuple):
    """A way to run a kernel on one row at a time, and the bytes an element that it takes, as above."""

    prefetch: bool
    double_buffered: bool
    bytes: tuple[int, int, int, int]


# For each kernel the fastest way first. A backward of a row takes a row as two halves where compilers do not double buffers;
# its bytes are what it needs for loads that do not wait, more than it needs to fit: with less, compilers put a product where
# the next row is to go.
ROW_WAYS = {
    Kind.FORWARD: (
        RowWay(True, True, (28, 36, 28, 40)),  # CANN 9.1 wants 4 more than the others to keep both buffers
        RowWay(True, False, (24, 32, 28, 26)),
        RowWay(False, False, (20, 20, 16, 16)),
    ),
    Kind.FORWARD_NORMALISED: (
        RowWay(True, True, (28, 36, 28, 40)),
        RowWay(True, False, (26, 28, 26, 28)),
        RowWay(False, False, (20, 20, 16, 16)),
    ),
    Kind.PHASE1: (
        RowWay(True, True, (28, 36, 30, 40)),
        RowWay(True, False, (28, 32, 30, 26)),
        RowWay(False, False, (20, 20, 16, 16)),
    ),
    Kind.BACKWARD: (
        RowWay(True, True, (32, 44, 30, 40)),
        RowWay(True, False, (28, 28, 26, 24)),
        RowWay(False, False, (26, 22, 22, 24)),  # 24 in most compilations with CANN 8.5, whose plans differ
    ),
    Kind.BACKWARD_FP32: (
        RowWay(True, True, (36, 44, 30, 40)),
        RowWay(True, False, (28, 28, 26, 24)),
        RowWay(False, False, (26, 22, 24, 24)),
    ),
    Kind.BANK: (
        RowWay(True, False, (24, 24, 22, 24)),
        RowWay(False, False, (20, 20, 16, 20)),
    ),
    Kind.BANK_BACKWARD: (RowWay(False, True, (32, 38, 28, 40)), RowWay(False, False, (26, 26, 22, 24))),
    Kind.MERGE: (RowWay(False, True, (24, 24, 21, 32)), RowWay(False, False, (16, 16, 16, 20))),
    Kind.MERGE_BACKWARD: (RowWay(False, True, (32, 33, 37, 48)), RowWay(False, False, (24, 22, 28, 28))),
    Kind.ROW_BACKWARD: (RowWay(True, True, (46,) * 4), RowWay(True, False, (27,) * 4)),
    Kind.BANK_ROW_BACKWARD: (RowWay(True, True, (46, 48, 46, 48)), RowWay(True, False, (27,) * 4)),  # dh in fp32: 48
    Kind.NORM_BACKWARD: (RowWay(False, True, (26, 30, 33, 41)), RowWay(False, False, (22, 22, 28, 28))),
}


def ub_bytes(launch: Launch) -> int:
    """Unified Buffer that a launch on Ascend takes."""
    return footprint(launch_tiles(launch), {}, launch.device)


def launch_tiles(launch: Launch) -> list[Tile]:
    """What a launch on Ascend keeps on chip at once."""
    rows = launch.block_m * launch.block_s
    if rows == 1 and launch.problem.kind in ROW_WAYS:
        per_element = row_way(launch).bytes[_column(launch.problem, launch.device)]
        return [Tile("row", (1, launch.block_d), per_element), _statistics(1)]
    return row_tiles(launch.problem, launch.device, launch.block_d, rows, launch.double_buffered)


def row_tiles(
    problem: Problem, device: Device, columns: int | str, rows: int | str = "ROWS", double_buffered: bool = True
) -> list[Tile]:
    """What one pass keeps on chip at once."""
    one_buffer = problem.kind == Kind.LAYERS and not double_buffered
    table = _LAYERS_ONE_BUFFER if one_buffer else _BYTES[problem.kind]
    per_element, per_column = table[_column(problem, device)]
    return [
        Tile("rows", (rows, columns), per_element),
        Tile("weights", (1, columns), per_column),
        _statistics(rows),
    ]


def row_way(launch: Launch) -> RowWay:
    """How a launch runs its kernel on one row."""
    ways = ROW_WAYS[launch.problem.kind]
    return next(way for way in ways if (way.prefetch, way.double_buffered) == (launch.prefetch, launch.double_buffered))


def _statistics(rows: int | str) -> Tile:
    return Tile("statistics", (rows, 1), FP32, 26)


def _column(problem: Problem, device: Device) -> int:
    """Of the tables of bytes."""
    return 2 * (device.arch == "dav-c310") + (problem.itemsize == FP32)
