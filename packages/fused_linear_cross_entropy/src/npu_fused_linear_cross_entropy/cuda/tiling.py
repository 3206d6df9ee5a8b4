"""Blocks on CUDA: of chunks of logits, powers of two, whole rows on chip where they are not too long; and of the product.

The product stores exponentials in its epilogue (sm_90). H200, ms of this kernel, of cuBLAS into bf16 alone, and of a sweep
over fp32 logits at the memory's rate:

    tokens x H x V           tiles of 128 x 256    128 x 128    cuBLAS    sweep
    4096 x 1024 x 151936     2.25                  2.06         1.96      .87
    2048 x 2880 x 201088     3.72                  3.80         3.53      .58
    3072 x 4096 x 128256     4.96                  5.22         4.83      .55

Two programs of a multiprocessor with tiles of 128 x 128 hide one's exponentials behind the other's products; the larger tile
reads less. Tiles of 64 x 256 and 256 x 128, four stages, and quarters of a tile instead of halves were slower everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from npu_tiling import ALL_TILES, Device, persistent_grid
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.launching.cuda import row_options
from npu_tiling.places import here

from ..both.tiling.chunks import ChunkKernel, ChunkLaunch, ChunkShape

_ROW = 8192  # columns up to which whole rows are on chip
_BLOCK = 8192  # columns of a block beyond
_TILE = 4096  # elements of a tile of several short rows
_ELEMENTS_PER_WARP = 512  # of a tile
# The same of exponentials. H200, 1024 rows of 128256 and 50257 fp32 logits: .204 and .098 ms. With 512: .291 and .094.
# With 512 and blocks of 4096: .202 and .103.
_EXPONENTIALS_PER_WARP = 1024
_MIN_WARPS, _MAX_WARPS = 4, 16
_PRODUCT_M, _PRODUCT_H, _STAGES = 128, 64, 3
_WIDE, _NARROW = 256, 128  # columns of a tile: with the stages and half a tile of exponentials 180 and 115 KB on chip
_NARROW_TERMS = 2048  # terms of a sum below which tiles are narrow
_ARCH = "sm_90"  # on other GPUs it was not measured
_ROWS_IN_CACHE = 24 * 2**20  # bytes of x that programs that run together read, of 50 MB of level 2 cache
_MIN_OPERATIONS = 2e11  # about .3 ms: a shorter product saves less than its launches cost on the host
_SUM_ROWS, _SUM_TILES = 32, 32


@dataclass(frozen=True, kw_only=True)
class CudaLaunch(ChunkLaunch):
    """A launch of a program for each tile of rows.

    Attributes:
        warps: warps of a program.
    """

    warps: int

    def grid(self, rows: int) -> int:
        return persistent_grid(ceil(rows / self.block_m), self.device, per_core=ALL_TILES)

    @property
    def constants(self) -> dict[str, int | bool]:
        return {**self.blocks, **self.flags(is_padded=False, barrier=True, tiles=power_of_two(self.tiles))}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return row_options(min(self.block_n, self.tail_n or self.block_n), self.warps)


def chunk_launch(shape: ChunkShape, device: Device) -> CudaLaunch:
    """Blocks for a chunk of logits."""
    width, exponentials = power_of_two(shape.width), shape.kernel is ChunkKernel.EXPONENTIALS
    if width <= _ROW:
        rows, block, tail = max(1, _TILE // width), 2 * width, width
    else:
        rows, block, rest = 1, _BLOCK, shape.width % _BLOCK
        tail = power_of_two(rest) if rest else 0
    elements = rows * min(block, width)
    warps = elements // (_EXPONENTIALS_PER_WARP if exponentials else _ELEMENTS_PER_WARP)
    warps = min(max(warps, _MIN_WARPS), _MAX_WARPS)
    blocks = {"block_m": rows, "block_n": block, "tail_n": tail}
    return CudaLaunch(shape=shape, device=device, **blocks, warps=warps, decided_at=here())


def is_worth_it(tokens: int, width: int, vocabulary: int, device: Device) -> bool:
    """Whether the product with exponentials is faster than PyTorch's and a sweep, for sizes whose rows TMA can read."""
    return device.arch == _ARCH and width % 8 == 0 and 2 * tokens * width * vocabulary >= _MIN_OPERATIONS


@dataclass(frozen=True, kw_only=True)
class ProductLaunch:
    """Tiles of 128 x 256, or of 128 x 128 where a sum has few terms: the table at the top of cuda/tiling.py."""

    width: int
    device: Device = field(repr=False)

    @property
    def blocks(self) -> tuple[int, int, int]:
        """Rows of x and of the weight in a tile, and terms that are multiplied at a time."""
        return _PRODUCT_M, _NARROW if self.width < _NARROW_TERMS else _WIDE, _PRODUCT_H

    def column_tiles(self, columns: int) -> int:
        return ceil(columns / self.blocks[1])

    def grid(self, rows: int, columns: int) -> int:
        """Programs: as many as are on chip at a time."""
        per_core = 2 if self.blocks[1] == _NARROW else 1
        return min(ceil(rows / _PRODUCT_M) * self.column_tiles(columns), per_core * self.device.vector_cores)

    @property
    def constants(self) -> dict[str, int]:
        block_m, block_n, block_h = self.blocks
        group = max(1, _ROWS_IN_CACHE // (2 * block_m * self.width))
        return {"H": self.width, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_H": block_h, "GROUP": group}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4 if self.blocks[1] == _NARROW else 8, "num_stages": _STAGES}


@dataclass(frozen=True, kw_only=True)
class ReferencesLaunch:
    """A program multiplies one row of x by its target's row of the weight."""

    vocabulary: int
    width: int

    @property
    def constants(self) -> dict[str, int]:
        return {"N": self.vocabulary, "H": self.width, "BLOCK_H": 1024}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4}


@dataclass(frozen=True, kw_only=True)
class SumsLaunch:
    """A program adds the sums of 32 rows over all tiles of columns."""

    def grid(self, rows: int) -> int:
        return ceil(rows / _SUM_ROWS)

    @property
    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": _SUM_ROWS, "BLOCK_T": _SUM_TILES}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4}
