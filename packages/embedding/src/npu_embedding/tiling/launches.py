"""The launches of the embedding's kernels: blocks, grid and compiler options."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from npu_tiling import ALL_TILES, Device, Tile, persistent_grid

from .footprint import finish_tiles, forward_tiles, runs_tiles

# A chunk shorter than this costs more in partial sums than it spreads work.
_MIN_CHUNK = 8
_CUDA_WARPS = 32  # resident on a multiprocessor
_WAVES = 4  # of programs that sum, so that the last ones end together


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
        return fills_units(self.block_n, self.itemsize, self.device)

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
        """Pieces that n sorted positions are cut in: as many as run at once, each through one block of columns (Ascend)."""
        return max(1, min(self.device.vector_cores // self.column_blocks, ceil(n / _MIN_CHUNK)))

    @property
    def tiles(self) -> list[Tile]:
        """What is on chip at once, for the compiler's plan."""
        return runs_tiles(self.block_n, self.itemsize)


@dataclass(frozen=True)
class SumsLaunch(RunsLaunch):
    """The launch that sums runs and stores zeros (CUDA).

    Attributes:
        zero_n: columns of a tile of zeros, which has `block_m` rows.
    """

    zero_n: int = 0

    @property
    def constants(self) -> dict[str, int | bool]:
        return {**super().constants, "ZERO_M": self.block_m, "ZERO_N": self.zero_n}

    def chunks(self, n: int) -> int:
        """Pieces that n sorted positions are cut in, each through one block of columns."""
        resident = self.device.vector_cores * _CUDA_WARPS // self.warps // self.column_blocks
        return max(1, min(_WAVES * resident, ceil(n / _MIN_CHUNK)))

    def zeros(self, rows: int, sums: int) -> int:
        """Programs that store zeros in a table of `rows` rows, for each of `sums` programs that sum."""
        return ceil(rows / self.block_m / sums)


@dataclass(frozen=True)
class PartialsLaunch(Launch):
    """The launch that adds partial sums (CUDA).

    Attributes:
        borders: borders between chunks that a program looks at.
    """

    borders: int = 16

    @property
    def constants(self) -> dict[str, int | bool]:
        columns = {"BLOCK_N": self.block_n, "MASK_COLUMNS": self.masks_columns}
        return {"N": self.width, "BLOCK_C": self.borders, "BLOCK_P": self.block_p, **columns}

    def grid(self, chunks: int) -> int:
        """Programs for `chunks` chunks."""
        return ceil((chunks - 1) / self.borders) * self.column_blocks


@dataclass(frozen=True)
class FinishLaunch(Launch):
    """The launch that stores zeros and adds partial sums (Ascend)."""

    @property
    def constants(self) -> dict[str, int | bool]:
        columns = {"BLOCK_N": self.block_n, "MASK_COLUMNS": self.masks_columns}
        return {"N": self.width, "BLOCK_M": self.block_m, **columns}

    def grid(self, rows: int) -> int:
        """Programs for a table of `rows` rows, which are more than a program for each partial sum."""
        return persistent_grid(ceil(rows / self.block_m) * self.column_blocks, self.device)

    @property
    def tiles(self) -> list[Tile]:
        """What is on chip at once, for the compiler's plan."""
        return finish_tiles(self.block_n, self.block_m, self.itemsize)


def fills_units(columns: int, itemsize: int, device: Device) -> bool:
    """Whether so many columns are whole units of what the device transfers."""
    return columns * itemsize % device.ub_align == 0


def _per_core(device: Device) -> int:
    return ALL_TILES if device.kind == "cuda" else 1
