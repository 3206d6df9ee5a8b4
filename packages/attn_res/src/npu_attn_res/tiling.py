"""From row widths, layers, element sizes and a device to block sizes and grid."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from npu_tiling import Block, Device, Tile, UnifiedBufferError, fit, footprint
from npu_tiling.budget.arithmetic import FP32, INT32_END, power_of_two

from .tiling_cuda import cuda_columns_launch, cuda_launch, cuda_smaller
from .tiling_launch import COLUMN_KERNELS, Launch, Problem

# Rows share a tile until one transfer has this many bytes: 8 KB reach 76 % of the bandwidth. 16 KB would reach 94 %, but
# where tiles fill the Unified Buffer the compilers put other values into the half of a double buffer that is not in use,
# and each load waits for the arithmetic before it: `npu-offline tune` predicts less time for the smaller tiles. A forward
# that loads ahead keeps its buffers; with more than nine rows, what it computes with single numbers of rows counts.
_TRANSFER_BYTES = 8 * 1024
_AHEAD_BYTES = 14 * 1024
_AHEAD_ROWS = 9
_COLUMN_BYTES = 8 * 1024  # of a transfer in the kernels that take columns
_MAX_SUM_ROWS = 64  # there are as many partial sums as vector cores, 72 at most

# Unified Buffer that a kernel takes: bytes for every element of its rows, and for every column once. What the compilers of
# CANN 8.5 and 9.0 ask for, the larger, when they refuse a tile and reuse whatever they can; tests hold these numbers
# against them. For each kernel: dav-c220 with bf16 or fp16, with fp32; dav-c310 with bf16 or fp16, with fp32.
_BYTES = {
    "forward": ((20, 4), (28, 8), (22, 1), (32, 1)),
    "forward, normalised": ((22, 4), (25, 8), (22, 2), (24, 4)),
    "phase 1": ((23, 4), (28, 8), (24, 4), (28, 4)),  # of one layer
    "forward of layers": ((24, 4), (24, 4), (20, 1), (20, 1)),
    "forward of layers, one buffer": ((20, 1), (20, 1), (16, 1), (16, 1)),
    "backward": ((24, 5), (28, 9), (21, 5), (28, 9)),
    "backward from fp32": ((28, 5), (28, 9), (21, 5), (30, 15)),  # dh in fp32, whatever the blocks are
    "products": ((20, 8), (22, 8), (16, 8), (16, 8)),
    "weighted sum": ((17, 8), (20, 8), (16, 8), (16, 8)),
    "gradient": ((36, 16), (36, 16), (26, 16), (27, 20)),
    "merge": ((20, 4), (20, 4), (18, 3), (24, 8)),
    "merge backward": ((28, 4), (30, 3), (33, 4), (48, 0)),
    "norm backward": ((20, 6), (26, 4), (23, 10), (26, 15)),
}
_AHEAD = ("forward", "forward, normalised", "phase 1")  # what loads ahead, with several rows


class _Row(NamedTuple):
    """A way to run a kernel on one row at a time, and the bytes an element that it takes, as above."""

    ahead: bool
    double_buffered: bool
    bytes: tuple[int, int, int, int]


# For each kernel the fastest way first.
_ROWS = {
    "forward": (
        _Row(True, True, (28, 36, 28, 40)),  # CANN 9.1 wants 4 more than the others to keep both buffers
        _Row(True, False, (24, 32, 28, 26)),
        _Row(False, False, (20, 20, 16, 16)),
    ),
    "forward, normalised": (
        _Row(True, True, (28, 36, 28, 40)),
        _Row(True, False, (26, 28, 26, 28)),
        _Row(False, False, (20, 20, 16, 16)),
    ),
    "phase 1": (
        _Row(True, True, (28, 36, 30, 40)),
        _Row(True, False, (28, 32, 30, 26)),
        _Row(False, False, (20, 20, 16, 16)),
    ),
    "backward": (
        _Row(True, True, (32, 44, 30, 40)),
        _Row(True, False, (28, 28, 26, 24)),
        _Row(False, False, (26, 22, 22, 24)),  # 24 in most compilations with CANN 8.5, whose plans differ
    ),
    "backward from fp32": (
        _Row(True, True, (36, 44, 30, 40)),
        _Row(True, False, (28, 28, 26, 24)),
        _Row(False, False, (26, 22, 24, 24)),
    ),
    "merge": (_Row(False, True, (24, 24, 21, 32)), _Row(False, False, (16, 16, 16, 20))),
    "merge backward": (_Row(False, True, (32, 33, 37, 48)), _Row(False, False, (24, 22, 28, 28))),
    "norm backward": (_Row(False, True, (26, 30, 33, 41)), _Row(False, False, (22, 22, 28, 28))),
}


@dataclass(frozen=True)
class TableLaunch:
    """The launch that fills a table of offsets: one program.

    Attributes:
        device: the chip.
    """

    device: Device = field(repr=False)

    @property
    def constants(self) -> dict[str, int]:
        return {}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 1} if self.device.kind == "cuda" else {}


@dataclass(frozen=True)
class WeightsLaunch:
    """The launch that adds partial sums [n, width] over n: programs take columns.

    Attributes:
        width: elements of a row.
        device: the chip.
        block_m, block_d: rows and columns of a tile.
    """

    width: int
    device: Device = field(repr=False)
    block_m: int
    block_d: int

    @property
    def grid(self) -> int:
        return min(ceil(self.width / self.block_d), self.device.max_grid)

    @property
    def constants(self) -> dict[str, int]:
        return {"D": self.width, "BLOCK_M": self.block_m, "BLOCK_D": self.block_d}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4} if self.device.kind == "cuda" else {}


def row_launch(problem: Problem, device: Device) -> Launch | None:
    """The launch of a kernel that takes whole rows; None where none fit on chip."""
    if device.kind == "cuda":
        return cuda_launch(problem, device)
    padded = _padded(problem, device)
    if problem.layers > 1:
        for double_buffered in (True, False):
            launch = Launch(problem, device, block_s=problem.layers, block_d=padded, double_buffered=double_buffered)
            if ub_bytes(launch) <= device.ub_bytes:
                return launch
        return None
    ahead = problem.kernel in _AHEAD  # with a buffer of the kernel's own: another of the compiler's would take too much
    row_bytes = padded * problem.itemsize
    shared = max(2, _TRANSFER_BYTES // row_bytes, min(_AHEAD_ROWS, _AHEAD_BYTES // row_bytes) if ahead else 0)
    # Two rows or more keep row reductions in the vector unit; the next tile under way is worth more than they are.
    rows = Block("ROWS", min(shared, _addressable(problem)))
    try:
        block_m = fit(_tiles(problem, device, padded), (rows,), device)["ROWS"]
    except UnifiedBufferError:
        block_m = 1
    if block_m > 1:
        return Launch(problem, device, block_m=block_m, block_d=padded, ahead=ahead, double_buffered=not ahead)
    ways = (_row_launch(Launch(problem, device, block_d=padded), way) for way in _ROWS[problem.kernel])
    return next((launch for launch in ways if ub_bytes(launch) <= device.ub_bytes), None)


def columns_launch(problem: Problem, device: Device) -> Launch:
    """The launch of a kernel that takes one block of columns. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    if device.kind == "cuda":
        return cuda_columns_launch(problem, device)
    unit = _unit(problem, device)
    padded = _padded(problem, device)
    # Two rows at least: one alone reduces through the scalar unit, and loses its double buffer to CANN 9.0 on dav-c310.
    block_m = min(2, _addressable(problem)) if problem.layers == 1 else 1
    columns = Block("COLUMNS", min(padded, _COLUMN_BYTES // problem.itemsize), unit, unit)
    largest = fit(_tiles(problem, device, "COLUMNS", problem.layers * block_m), (columns,), device)["COLUMNS"]
    # As few blocks as fit, of equal length, so that the last one is not a short one.
    block_d = ceil(padded / ceil(padded / largest) / unit) * unit
    return Launch(problem, device, block_m=block_m, block_s=problem.layers, block_d=block_d)


def weights_launch(width: int, device: Device) -> WeightsLaunch:
    """Blocks and grid of the kernel that adds the partial sums of dg."""
    if device.kind == "cuda":
        return WeightsLaunch(width, device, 32, min(64, power_of_two(width)))
    unit = device.ub_align // 2
    padded = ceil(width / unit) * unit
    tile = ("BLOCK_M", "BLOCK_D")
    tiles = [Tile("partial sums", tile, FP32, 2), Tile("sum", tile, FP32), Tile("sum over rows", tile, FP32)]
    tiles.append(Tile("weights and gradients", (1, "BLOCK_D"), FP32, 8))
    # Every core gets columns to add before a core gets more than it needs: rows fill what is left.
    columns = min(padded, max(unit, ceil(padded / device.vector_cores / unit) * unit))
    rows = fit(
        tiles, (Block("BLOCK_M", min(device.vector_cores, _MAX_SUM_ROWS)), Block("BLOCK_D", columns, unit, unit)), device
    )
    return WeightsLaunch(width, device, rows["BLOCK_M"], rows["BLOCK_D"])


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end.

    The last one of a kernel for whole rows has fewer columns than a row: none fits, and other kernels are to take columns.
    """
    if launch.device.kind == "cuda":
        return cuda_smaller(launch)
    ways = _ROWS.get(launch.problem.kernel, ())
    if launch.block_m > 1:
        fewer = dataclasses.replace(launch, block_m=launch.block_m // 2)
        return _row_launch(fewer, ways[0]) if ways and fewer.block_m == 1 else fewer
    unit = _unit(launch.problem, launch.device)
    if launch.block_s == 1 and ways:
        tried = ways.index(_way(launch)) + 1
        if tried < len(ways):
            return _row_launch(launch, ways[tried])
    if launch.block_d <= unit or launch.problem.kernel not in COLUMN_KERNELS and not launch.whole_rows:
        return None
    return dataclasses.replace(launch, block_d=ceil(launch.block_d / 2 / unit) * unit)


def ub_bytes(launch: Launch) -> int:
    """Unified Buffer that a launch on Ascend takes."""
    rows = launch.block_m * launch.block_s
    if rows == 1 and launch.problem.kernel in _ROWS:
        tiles = [Tile("row", (1, launch.block_d), _way(launch).bytes[_column(launch)]), _statistics(1)]
        return footprint(tiles, {}, launch.device)
    problem = launch.problem
    if problem.kernel == "forward of layers" and not launch.double_buffered:
        problem = dataclasses.replace(problem, kernel="forward of layers, one buffer")
    return footprint(_tiles(problem, launch.device, launch.block_d, rows), {}, launch.device)


def _tiles(problem: Problem, device: Device, columns: int | str, rows: int | str = "ROWS") -> list[Tile]:
    """What one pass keeps on chip at once."""
    per_element, per_column = _BYTES[problem.kernel][_column(Launch(problem, device))]
    return [
        Tile("rows", (rows, columns), per_element),
        Tile("weights", (1, columns), per_column),
        _statistics(rows),
    ]


def _way(launch: Launch) -> _Row:
    """How a launch runs its kernel on one row."""
    ways = _ROWS[launch.problem.kernel]
    return next(way for way in ways if (way.ahead, way.double_buffered) == (launch.ahead, launch.double_buffered))


def _row_launch(launch: Launch, way: _Row) -> Launch:
    return dataclasses.replace(launch, ahead=way.ahead, double_buffered=way.double_buffered)


def _statistics(rows: int | str) -> Tile:
    return Tile("statistics", (rows, 1), FP32, 26)


def _column(launch: Launch) -> int:
    """Of the tables of bytes."""
    return 2 * (launch.device.arch == "dav-c310") + (launch.problem.itemsize == FP32)


def _unit(problem: Problem, device: Device) -> int:
    """Columns that make up one aligned piece of a row in every tensor."""
    return device.ub_align // problem.itemsize


def _padded(problem: Problem, device: Device) -> int:
    unit = _unit(problem, device)
    return ceil(problem.width / unit) * unit


def _addressable(problem: Problem) -> int:
    """Rows that one tile may have: offsets inside a tile are 32-bit."""
    return max(1, (INT32_END - problem.width) // max(problem.row_stride, problem.width))
