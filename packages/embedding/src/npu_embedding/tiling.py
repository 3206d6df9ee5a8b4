"""From table widths, element sizes and a device to block sizes and grids."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import ceil

from npu_tiling import Block, Device, Tile, fit, footprint, persistent_grid

from .tiles import finish_tiles, forward_tiles, runs_tiles

# A store of 32 KB is past the point where its length matters (16 KB reach 94 % of the bandwidth).
_TILE_BYTES = 32768
# Zeros are stored without a load beside them, so that the start of each store shows: half as many starts.
_ZEROS_BYTES = 2 * _TILE_BYTES
# Rows of a tile, however narrow: few enough that a few thousand indices divide evenly over the cores.
_MAX_ROWS = 32
# A chunk shorter than this costs more in partial sums than it spreads work.
_MIN_CHUNK = 8
_ALL_TILES = 2**16  # programs of a core: as many as there are tiles
# CUDA: bytes of a tile for each warp, from 16-byte vectors for each thread: what was fastest on an H200.
_ZEROS_COLUMNS = 4096  # of a tile (CUDA)
_WARP_BYTES_BACKWARD = 1024
_WARP_BYTES_FORWARD = 4096
_CUDA_WARPS = 32  # resident on a multiprocessor


@dataclass(frozen=True)
class Launch:
    """One launch: its blocks, how they follow the columns, and the compiler's options. No number of rows changes it.

    Attributes:
        device: the chip.
        width: elements of a row.
        itemsize: bytes of an element of the table.
        block_n: columns of a tile.
        block_m: rows of a tile; 1 where rows are taken one by one.
        block_p: partial sums added at once.
        warps: warps of a program (CUDA).
    """

    device: Device = field(repr=False)
    width: int
    itemsize: int
    block_n: int
    block_m: int = 1
    block_p: int = 1
    warps: int = 4

    @property
    def column_blocks(self) -> int:
        return ceil(self.width / self.block_n)

    @property
    def masks_columns(self) -> bool:
        return self.device.kind == "cuda" and self.width % self.block_n != 0

    @property
    def constants(self) -> dict[str, int | bool]:
        """The kernel's `tl.constexpr` that follow from the tiling, in the kernel's order."""
        return {"N": self.width, "BLOCK_N": self.block_n, "MASK_COLUMNS": self.masks_columns}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {"num_warps": self.warps} if self.device.kind == "cuda" else {}


@dataclass(frozen=True)
class ForwardLaunch(Launch):
    """The launch that copies rows."""

    @property
    def gathers(self) -> bool:
        """A tile is fetched and stored at once: the compiler does that with whole rows where they fill 32-byte units."""
        return _aligned(self.block_n, self.itemsize, self.device)

    @property
    def constants(self) -> dict[str, int | bool]:
        return {
            "N": self.width,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "MASK_COLUMNS": self.masks_columns,
            "MASK_ROWS": self.device.kind == "cuda",
            "GATHER": self.device.kind != "cuda" and self.gathers,
        }

    def grid(self, n: int) -> int:
        """Programs for n indices."""
        tiles = ceil(n / self.block_m) * self.column_blocks
        return persistent_grid(tiles, self.device, per_core=_per_core(self.device))

    @property
    def tiles(self) -> list[Tile]:
        """What is on chip at once, for the compiler's plan."""
        return forward_tiles(self.block_n, self.block_m, self.itemsize, self.gathers)


@dataclass(frozen=True)
class RunsLaunch(Launch):
    """The launch that sums runs of equal indices, one chunk of sorted positions for a program."""

    def chunks(self, n: int) -> int:
        """Pieces that n sorted positions are cut in: as many as run at once, each through one block of columns."""
        resident = self.device.vector_cores
        if self.device.kind == "cuda":
            resident *= _CUDA_WARPS // self.warps
        return max(1, min(resident // self.column_blocks, ceil(n / _MIN_CHUNK)))

    @property
    def tiles(self) -> list[Tile]:
        """What is on chip at once, for the compiler's plan."""
        return runs_tiles(self.block_n, self.itemsize)


@dataclass(frozen=True)
class PartialsLaunch(Launch):
    """The launch that adds partial sums (CUDA)."""

    @property
    def constants(self) -> dict[str, int | bool]:
        columns = {"BLOCK_N": self.block_n, "MASK_COLUMNS": self.masks_columns}
        return {"N": self.width, "BLOCK_P": self.block_p, **columns}

    def grid(self, chunks: int) -> int:
        """Programs for the borders of `chunks` chunks."""
        return persistent_grid(max(1, chunks - 1) * self.column_blocks, self.device, per_core=_per_core(self.device))


@dataclass(frozen=True)
class ZerosLaunch(Launch):
    """The launch that stores zeros (CUDA)."""

    @property
    def constants(self) -> dict[str, int | bool]:
        columns = {"BLOCK_N": self.block_n, "MASK_COLUMNS": self.masks_columns}
        return {"N": self.width, "BLOCK_M": self.block_m, **columns, "MARKED": True}

    def grid(self, rows: int) -> int:
        """Programs for a table of `rows` rows."""
        tiles = ceil(rows / self.block_m) * self.column_blocks
        return persistent_grid(tiles, self.device, per_core=_per_core(self.device))


@dataclass(frozen=True)
class FinishLaunch(Launch):
    """The launch that stores zeros and adds partial sums (Ascend)."""

    @property
    def constants(self) -> dict[str, int | bool]:
        columns = {"BLOCK_N": self.block_n, "MASK_COLUMNS": self.masks_columns}
        return {"N": self.width, "BLOCK_P": self.block_p, "BLOCK_M": self.block_m, **columns}

    def grid(self, rows: int) -> int:
        """Programs for a table of `rows` rows, which are more than a program for each partial sum."""
        return persistent_grid(ceil(rows / self.block_m) * self.column_blocks, self.device)

    @property
    def tiles(self) -> list[Tile]:
        """What is on chip at once, for the compiler's plan."""
        return finish_tiles(self.block_n, self.block_m, self.itemsize)


def forward_launch(width: int, itemsize: int, device: Device) -> ForwardLaunch:
    """Blocks of the forward. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    if device.kind == "cuda":
        block_n = _cuda_columns(width, 512)
        block_m = max(1, min(_MAX_ROWS, _WARP_BYTES_FORWARD // (block_n * itemsize)))
        return ForwardLaunch(device, width, itemsize, block_n, block_m, warps=1)
    rows = Block("BLOCK_M", max(2, min(_MAX_ROWS, _TILE_BYTES // (width * itemsize))), 2)
    gathers = _aligned(width, itemsize, device)
    if not gathers and footprint(forward_tiles(width, 2, itemsize, gathers), {}, device) > device.ub_bytes:
        gathers = True  # several blocks, which are whole units
    blocks = fit(forward_tiles("BLOCK_N", "BLOCK_M", itemsize, gathers), (rows, _columns(width, itemsize, device)), device)
    return ForwardLaunch(device, width, itemsize, _even(width, blocks["BLOCK_N"], itemsize, device), blocks["BLOCK_M"])


def runs_launch(width: int, itemsize: int, device: Device) -> RunsLaunch:
    """Blocks of the backward's sums. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    if device.kind == "cuda":
        block_n = _cuda_columns(width, 2048)
        warps = max(1, min(8, block_n * itemsize // _WARP_BYTES_BACKWARD))
        return RunsLaunch(device, width, itemsize, block_n, warps=warps)
    blocks = fit(runs_tiles("BLOCK_N", itemsize), (_columns(width, itemsize, device),), device)
    return RunsLaunch(device, width, itemsize, _even(width, blocks["BLOCK_N"], itemsize, device))


def partials_launch(width: int, itemsize: int, device: Device) -> PartialsLaunch:
    """Blocks of the backward's partial sums on CUDA."""
    # Many partial sums of a few columns, so that a run of thousands of them is added by several programs.
    block_n = _cuda_columns(width, 1024)
    return PartialsLaunch(device, width, itemsize, block_n, block_p=max(1, min(16, 8192 // block_n)), warps=8)


def zeros_launch(width: int, itemsize: int, device: Device) -> ZerosLaunch:
    """Blocks of the backward's zeros on CUDA."""
    # Small tiles, which soon leave room for the sort and the sums beside them; of whole rows:
    # blocks as narrow as the largest power of two in 896 took 3.7 times as long. Warps: what was faster, masked or not.
    block_n = min(_power_of_two(width), _ZEROS_COLUMNS)
    warps = 4 if width % block_n else 8
    return ZerosLaunch(device, width, itemsize, block_n, max(2, min(8, 2048 // block_n)), warps=warps)


def finish_launch(width: int, itemsize: int, device: Device) -> FinishLaunch:
    """Blocks of the backward's zeros, partial sums (Ascend). Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    rows = Block("BLOCK_M", max(1, min(_MAX_ROWS, _ZEROS_BYTES // (width * itemsize))))
    blocks = fit(finish_tiles("BLOCK_N", "BLOCK_M", itemsize), (rows, _columns(width, itemsize, device)), device)
    return FinishLaunch(device, width, itemsize, _even(width, blocks["BLOCK_N"], itemsize, device), blocks["BLOCK_M"])


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if launch.device.kind == "cuda":
        return None
    if launch.block_m > 2:
        return dataclasses.replace(launch, block_m=launch.block_m // 2)
    half = _even(launch.width, ceil(launch.block_n / 2), launch.itemsize, launch.device)
    return dataclasses.replace(launch, block_n=half) if half < launch.block_n else None


def _columns(width: int, itemsize: int, device: Device) -> Block:
    unit = device.ub_align // itemsize
    return Block("BLOCK_N", width, min(width, unit), unit)


def _even(width: int, largest: int, itemsize: int, device: Device) -> int:
    """Columns of as few blocks as fit, of equal length, so that the last one is not a short one; whole units, if several."""
    blocks = ceil(width / largest)
    unit = device.ub_align // itemsize
    return width if blocks == 1 else ceil(ceil(width / blocks) / unit) * unit


def _aligned(columns: int, itemsize: int, device: Device) -> bool:
    return columns * itemsize % device.ub_align == 0


def _cuda_columns(width: int, most: int) -> int:
    """A power of two that divides the width, or one that takes a mask where that would be a short one."""
    divisor = min(width & -width, most)
    return divisor if divisor >= 128 else min(_power_of_two(width), most)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _per_core(device: Device) -> int:
    return _ALL_TILES if device.kind == "cuda" else 1
