"""From row counts, widths, element sizes and a device to block sizes and grid."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from math import ceil

from npu_tiling import Block, Device, Tile, UnifiedBufferError, fit, footprint, persistent_grid
from npu_tiling.cuda import row_options

from .tiles import FP32, Problem, column_tiles, row_tiles

# Rows share a tile until one transfer has this many bytes: 8 KB reach 76 % of the bandwidth and 16 KB 94 %, and a tile that
# fills the Unified Buffer leaves the compilers, which differ in what they need, no room.
_TRANSFER_BYTES = 12 * 1024
_WIDE_TRANSFER_BYTES = 8 * 1024  # more is alive at once in the passes over column blocks
_INT32_END = 2**31
_ALL_TILES = 2**16  # programs of a core: as many as there are tiles
_SUM_BYTES = 12 * 1024  # of a tile of partial sums: the next one is on its way while one is added
_MAX_SUM_ROWS = 64  # there are as many partial sums as vector cores, 72 at most


@dataclass(frozen=True)
class Launch:
    """One launch: the programs of its grid, its blocks and the compiler's options.

    Attributes:
        problem: what it was made for.
        device: the chip.
        backward: whether tiles of dw are kept too.
        wide: rows are split in column blocks and read twice.
        double_buffered: the next tile is loaded while this one is computed (Ascend).
        block_m, block_n: rows and columns of a tile.
        block_g: groups of a tile; more than one only where block_m is all rows of a group.
        warps: warps of a program (CUDA).
        per_core: programs resident on a core (CUDA).
    """

    problem: Problem
    device: Device = field(repr=False)
    backward: bool
    wide: bool
    double_buffered: bool
    block_m: int
    block_n: int
    block_g: int = 1
    warps: int = 4
    per_core: int = 1

    @property
    def row_tiles(self) -> int:
        return ceil(self.problem.n_outer / self.block_g) * ceil(self.problem.n_inner / self.block_m)

    @property
    def even(self) -> bool:
        """Whether every program takes as many rows as any other, one after the other, instead of tiles in turn (Ascend)."""
        return self.device.kind != "cuda" and self.problem.n_outer == 1 and self.block_m > 1 and not self.wide

    @functools.cached_property
    def grid(self) -> int:
        tiles = self.problem.n_inner if self.even else self.row_tiles
        return persistent_grid(tiles, self.device, per_core=self.per_core)

    @property
    def column_blocks(self) -> int:
        return ceil(self.problem.width / self.block_n)

    @functools.cached_property
    def splits(self) -> int:
        """Partial sums of dw: one per program, or, where programs take columns, one per set of rows."""
        if not self.wide:
            return self.grid
        return max(1, min(self.row_tiles, self.device.vector_cores * self.per_core // self.column_blocks))

    @functools.cached_property
    def column_grid(self) -> int:
        """Programs of the kernel that takes columns."""
        return persistent_grid(self.column_blocks * self.splits, self.device, per_core=self.per_core)

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        if self.wide:
            return footprint(column_tiles(self.problem), {"BLOCK_N": self.block_n}, self.device)
        tiles = row_tiles(
            self.problem, self.device, self.block_n, self.backward, self.double_buffered, self.block_g * self.block_m > 1
        )
        return footprint(tiles, {"ROWS": self.block_g * self.block_m}, self.device)

    @property
    def constants(self) -> dict[str, int]:
        even = {} if self.wide else {"EVEN": self.even}
        return {
            "N": self.problem.width,
            **even,
            "BLOCK_G": self.block_g,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
        }

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        if self.device.kind == "cuda":
            return row_options(self.block_n, self.warps)
        return {"multibuffer": self.double_buffered}


@dataclass(frozen=True)
class SumLaunch:
    """The launch that adds partial sums [n, width] over n: programs take columns.

    Attributes:
        width: elements of a row.
        device: the chip.
        block_m, block_n: rows and columns of a tile.
    """

    width: int
    device: Device = field(repr=False)
    block_m: int
    block_n: int

    @functools.cached_property
    def grid(self) -> int:
        return persistent_grid(ceil(self.width / self.block_n), self.device, per_core=_ALL_TILES)

    @property
    def constants(self) -> dict[str, int]:
        return {"N": self.width, "BLOCK_M": self.block_m, "BLOCK_N": self.block_n}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        if self.device.kind == "cuda":
            return {"num_warps": 4}
        # Between additions to a row that has two buffers and is stored as it is, CANN 9.0 and 9.1 put no barrier.
        return {} if self.block_m > 1 else {"multibuffer": False}


def forward_launch(problem: Problem, device: Device) -> Launch:
    """Blocks and grid of the forward. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _launch(problem, device, backward=False)


def backward_launch(problem: Problem, device: Device) -> Launch:
    """Blocks and grid of the backward. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return _launch(problem, device, backward=True)


def sum_launch(width: int, device: Device) -> SumLaunch:
    """Blocks and grid of the kernel that adds the partial sums of dw."""
    if device.kind == "cuda":
        return SumLaunch(width, device, 32, min(64, _power_of_two(width)))
    unit = device.ub_align // FP32
    padded = ceil(width / unit) * unit
    tile = ("BLOCK_M", "BLOCK_N")
    tiles = [Tile("partial sums", tile, FP32, 2), Tile("sum", tile, FP32), Tile("sum over rows", tile, FP32)]
    # Every core gets columns to add before a core gets more than it needs.
    columns = min(padded, max(unit, ceil(padded / device.vector_cores / unit) * unit))
    rows = min(device.vector_cores, _MAX_SUM_ROWS, max(1, _SUM_BYTES // (columns * FP32)))
    blocks = fit(tiles, (Block("BLOCK_M", rows), Block("BLOCK_N", columns, unit, unit)), device)
    return SumLaunch(width, device, blocks["BLOCK_M"], blocks["BLOCK_N"])


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if launch.device.kind == "cuda":
        return None
    if launch.block_g > 1:
        return dataclasses.replace(launch, block_g=launch.block_g // 2)
    if launch.block_m > 1:
        return dataclasses.replace(launch, block_m=launch.block_m // 2)
    if launch.double_buffered and not launch.wide:
        return dataclasses.replace(launch, double_buffered=False)
    unit = _unit(launch.problem, launch.device)
    if launch.block_n <= unit:
        return None
    half = ceil(launch.block_n / 2 / unit) * unit
    return dataclasses.replace(launch, wide=True, double_buffered=True, block_n=half)


def _launch(problem: Problem, device: Device, *, backward: bool) -> Launch:
    if device.kind == "cuda":
        return _cuda_launch(problem, device, backward)
    unit = _unit(problem, device)
    padded = ceil(problem.width / unit) * unit
    itemsize = min(problem.itemsizes)
    shared = max(2, _TRANSFER_BYTES // (padded * itemsize))
    # Two rows or more keep row reductions in the vector unit. One pass over memory with the next tile under way is best; one
    # pass without it still moves a third less than two passes.
    ways = [(_shared_rows(problem, shared), True), (Block("ROWS", 1), True), (Block("ROWS", 1), False)]
    if backward and device.arch == "dav-c310":
        # Compilers for it sum a single row up anew for every 64 columns that use the sum: two passes are faster by far.
        ways = ways[:1]
    for rows, double_buffered in ways:
        tiles = row_tiles(problem, device, padded, backward, double_buffered, rows.largest > 1)
        try:
            chosen = fit(tiles, (rows,), device)["ROWS"]
        except UnifiedBufferError:
            continue
        groups = chosen // problem.n_inner if rows.multiple_of > 1 else 1
        return Launch(problem, device, backward, False, double_buffered, chosen // groups, padded, groups)
    columns = Block("BLOCK_N", min(padded, _WIDE_TRANSFER_BYTES // itemsize), unit, unit)
    largest = fit(column_tiles(problem), (columns,), device)["BLOCK_N"]
    # As few blocks as fit, of equal length, so that the last one is not a short one.
    block_n = ceil(padded / ceil(padded / largest) / unit) * unit
    return Launch(problem, device, backward, True, True, 1, block_n)


def _unit(problem: Problem, device: Device) -> int:
    """Columns that make up one aligned piece of a row in every tensor."""
    return device.ub_align // min(problem.itemsizes)


def _max_rows(problem: Problem) -> int:
    """Rows of one group that one tile may have: offsets inside a tile are 32-bit."""
    addressable = max(1, (_INT32_END - problem.width) // max(problem.inner_stride, problem.width, 1))
    return min(addressable, problem.n_inner) if problem.n_outer > 1 else addressable


def _shared_rows(problem: Problem, wanted: int) -> Block:
    """How many rows a tile may share: rows of one group or, where a group has fewer than wanted, whole groups."""
    rows = min(wanted, _max_rows(problem))
    groups = min(
        wanted // problem.n_inner, _INT32_END // max(problem.outer_stride + problem.inner_stride * problem.n_inner, 1)
    )
    if problem.n_outer == 1 or rows < problem.n_inner or groups < 2:
        return Block("ROWS", rows, min(2, rows))
    return Block("ROWS", groups * problem.n_inner, 2 * problem.n_inner, problem.n_inner)


def _cuda_launch(problem: Problem, device: Device, backward: bool) -> Launch:
    """Measured on an H200 with the shapes of the README's table; powers of two, as stock Triton asks for."""
    block_n = _power_of_two(problem.width)
    if not backward:
        if block_n <= 1024:
            block_m = _cuda_rows(problem, 4096 // block_n)
            return Launch(problem, device, False, False, True, block_m, block_n, warps=4, per_core=_ALL_TILES)
        # Two column blocks or more: the second read finds the row in a cache, and fewer registers mean more rows at once.
        warps = 4 if block_n <= 2048 else 8 if block_n <= 8192 else 16 if block_n <= 16384 else 32
        per_core = _ALL_TILES if block_n <= 16384 else 2
        return Launch(problem, device, False, True, True, 1, min(block_n // 2, 256 * max(16, warps)), 1, warps, per_core)
    if block_n > 16384:
        return Launch(problem, device, True, True, True, 1, 2048, warps=8, per_core=4)
    # As many resident programs as leave each the registers for its partial sum of dw.
    block_m = _cuda_rows(problem, 4096 // block_n)
    per_core = 3 if block_n <= 4096 else 1
    return Launch(problem, device, True, False, True, block_m, block_n, warps=8, per_core=per_core)


def _cuda_rows(problem: Problem, wanted: int) -> int:
    """A power of two up to `wanted` that the problem allows."""
    return 1 << (max(1, min(_max_rows(problem), wanted)).bit_length() - 1)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
