"""Tiles of the kernels over chunks of logits, on Ascend and on CUDA, and of the product whose epilogue stores exponentials.

Ascend: blocks as large as the Unified Buffer allows, of a length that leaves the shortest tail. CUDA: powers of two, whole
rows on chip where they are not too long. This module imports no Triton: decide.py reads it on every machine.

The product stores exponentials in its epilogue (sm_90). H200, ms of this kernel, of cuBLAS into bf16 alone, and of a sweep
over fp32 logits at the memory's rate (2026-12-01, the GPU at rest between calls; the sweep 2026-11-29):

    tokens x H x V           tiles of 128 x 256    128 x 128    cuBLAS    sweep
    4096 x 768 x 128256      1.22                  1.22         1.10      -
    4096 x 1024 x 151936     1.80                  1.94         1.67      .87
    2048 x 2880 x 201088     3.00                  3.73         2.98      .58
    3072 x 4096 x 128256     4.06                  5.03         3.90      .55

Tiles of 64 x 256 and 256 x 128, four stages, and quarters of a tile instead of halves were slower everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import Any, ClassVar

from npu_tiling import ALL_TILES, Block, Candidate, Device, Tile, first_fit, footprint, persistent_grid
from npu_tiling.budget import FP32, equal_blocks, here, power_of_two, row_options
from npu_tiling.chips import dry_runs
from npu_tiling.direct import ALIGNMENT
from npu_tiling.launch import Tiling, descriptor_type
from npu_tiling.plans import Plan

ROWS = 2  # of a tile of a part of a row on Ascend: fewer would not keep row reductions in the vector unit


class ChunkKernel(Enum):
    """The kernels over chunks of logits."""

    STATISTICS = "cross_entropy_statistics_kernel"
    GRADIENT = "cross_entropy_gradient_kernel"
    BOTH = "cross_entropy_kernel"
    EXPONENTIALS = "cross_entropy_exponentials_kernel"
    DISTRIBUTIONS = "distribution_statistics_kernel"
    DISTRIBUTION_GRADIENT = "distribution_gradient_kernel"
    DISTILLATION = "distillation_kernel"


@dataclass(frozen=True, kw_only=True)
class ChunkShape:
    """The sizes and options that decide a launch over a chunk of logits.

    Attributes:
        kernel: which one.
        width: columns of the chunk.
        itemsize: bytes of a logit.
        written_itemsize: bytes of the gradient, exponential or copy that is written for a logit; 0 for none.
        smoothed, entropy, argmax: whether sums of z, sums of exp times z, and the places of maxima are kept.
        weighted: whether the sums of z have weights of the columns.
        transformed: whether logits are biased, scaled or softcapped.
    """

    kernel: ChunkKernel
    width: int
    itemsize: int
    written_itemsize: int = 0
    smoothed: bool = False
    weighted: bool = False
    entropy: bool = False
    argmax: bool = False
    transformed: bool = False


@dataclass(frozen=True, kw_only=True)
class ChunkTiling(Tiling):
    """Blocks for any number of rows, and compiler options. Each chip has a class of its own.

    Attributes:
        shape: the launch's.
        device: the chip.
        block_m, block_n: rows and columns of a tile; block_n is above the width where a row is one tile.
        tail_n: columns of the last tile of a row, 0 for none.
        decided_at: file and line of the rule.
    """

    shape: ChunkShape
    device: Device = field(repr=False)
    block_m: int
    block_n: int
    tail_n: int
    decided_at: str = field(default="", repr=False, compare=False)

    @property
    def way(self) -> str:
        return "blocks of columns" if self.streams else "whole rows"

    @property
    def why(self) -> str:
        return f"a row of {self.shape.width} columns is {'longer than' * self.streams or 'within'} one tile"

    @property
    def streams(self) -> bool:
        """Whether a row is more than one tile."""
        return self.block_n <= self.shape.width

    @property
    def blocks(self) -> dict[str, int | bool]:
        """The constants that follow from the blocks, of kernels over chunks."""
        return {"N": self.shape.width, "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "TAIL_N": self.tail_n}

    @property
    def tiles(self) -> int:
        """Whole blocks of a row."""
        return max(1, self.shape.width // self.block_n)


def chunk_tiling(shape: ChunkShape, device: Device) -> CudaTiling | AscendTiling:
    """Blocks of a launch over a chunk of logits. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return cuda_tiling(shape, device) if device.kind == "cuda" else ascend_tiling(shape, device)


def row_block(width: int, longest: Mapping[str, int], device: Device) -> int:
    """Columns of a block of a row; `longest`: by kind of device."""
    most = longest[device.kind]
    return min(most, power_of_two(width)) if device.kind == "cuda" else equal_blocks(width, most, _UNIT)


# Ascend.

# Bytes that one transfer should have: 8 KB reach 76 % of the bandwidth, 16 KB 94 %, and more leaves no room for the rest.
_TRANSFER_BYTES = 16 * 1024
_MAX_ROWS = 64
_UNIT = 16  # columns that make up one aligned piece of a row, of logits and of gradients
_MIN_SHARE = 0.75  # of the longest block: a block may be this short where it leaves a shorter tail
_MIN_SHARE_EXACT = 0.5  # and this short where it leaves none, of a row of few blocks
_FEW_BLOCKS = 8
_NUMBERS = 8  # fp32 numbers of 32 bytes, which the numbers of a row's tiles are padded to
# Unified Buffer, for an element of a tile, that a kernel of statistics and gradient needs for its loads to overlap
# arithmetic. Below that it still compiles, but CANN 9.0 and later put temporaries where the next block is being loaded.
_OVERLAPPING_BYTES = {ChunkKernel.BOTH: 53, ChunkKernel.EXPONENTIALS: 28}
_ROW_VALUES = 6  # padded to 32 bytes each
_WEIGHT_TILES = 3  # fp32: weights of columns, of those before, and what one of them is multiplied by
_ROW_TILES = 7  # fp32, of a tile that is a whole row
_DISTILLATION_TILES = 14  # fp32, of whole rows of a student's logits and a teacher's
_DISTILLATION_SUMS = 3  # more of them where running sums are kept from tile to tile
# More of them: CANN 8.5 sets flags twice where the tiles fill the Unified Buffer, compiler fault 6.
_DISTILLATION_ROOM = 4
_EXPONENTIAL_TILES = {"dav-c220": 3, "dav-c310": 4}  # fp32, of a tile of exponentials
_REFERENCES = 3  # fp32, of each tile of a row
_SHORT_BLOCK = 1024  # columns of a block of exponentials; shorter ones leave room enough


@dataclass(frozen=True, kw_only=True)
class AscendTiling(ChunkTiling):
    """That of the vector cores of an Ascend chip."""

    def grid(self, rows: int) -> int:
        return persistent_grid(ceil(rows / self.block_m), self.device)

    @property
    def why(self) -> str:
        shape, device = self.shape, self.device
        if not self.streams:
            return super().why
        needed = footprint(tiles(shape, device, shape.width, streams=False), {"BLOCK_M": ROWS}, device)
        return f"{ROWS} whole rows of {shape.width} columns would need {needed:,} of {device.ub_bytes:,} bytes"

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return footprint(tiles(self.shape, self.device, self.tail_n, streams=self.streams), blocks, self.device)

    @property
    def constants(self) -> dict[str, int | bool]:
        padded = ceil(self.tiles / _NUMBERS) * _NUMBERS
        return {**self.blocks, "TILES": padded, "PADDED": self.block_m <= ROWS, "BARRIER": False}

    def smaller(self) -> AscendTiling | None:
        """Fewer rows, then blocks of fewer columns."""
        if self.streams:
            block = self.block_n // 2 // _UNIT * _UNIT
        elif self.block_m > ROWS:
            return dataclasses.replace(self, block_m=max(ROWS, self.block_m // 2))
        else:
            block = self.shape.width // 2 // _UNIT * _UNIT
        return _streaming(self.shape, self.device, block) if block else None


def ascend_tiling(shape: ChunkShape, device: Device) -> AscendTiling:
    """Blocks for a chunk of logits. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    # Whole rows, as many as make one good transfer, where two fit.
    wanted = min(_MAX_ROWS, max(ROWS, _TRANSFER_BYTES // (shape.width * shape.itemsize)))
    whole_rows = Candidate(False, tiles(shape, device, shape.width, streams=False), (Block("BLOCK_M", wanted, ROWS),))
    largest = min(shape.width, _TRANSFER_BYTES // shape.itemsize)
    if shape.kernel in _OVERLAPPING_BYTES:
        largest = min(largest, device.ub_bytes // (ROWS * _OVERLAPPING_BYTES[shape.kernel]))
    largest = largest // _UNIT * _UNIT
    columns = Block("BLOCK_N", largest, _UNIT, _UNIT), Block("BLOCK_M", ROWS, ROWS)
    streams, blocks = first_fit([whole_rows, Candidate(True, tiles(shape, device, 0, streams=True), columns)], device)
    if streams:
        return _streaming(shape, device, blocks["BLOCK_N"])
    return AscendTiling(
        shape=shape,
        device=device,
        block_m=blocks["BLOCK_M"],
        block_n=shape.width + _UNIT,
        tail_n=shape.width,
        decided_at=here(),
    )


def _streaming(shape: ChunkShape, device: Device, largest: int) -> AscendTiling:
    """Blocks of at most `largest` columns, and not much less, of a length that leaves no tail or the shortest one."""

    def launch(columns: int) -> AscendTiling:
        tail = shape.width % columns
        return AscendTiling(shape=shape, device=device, block_m=ROWS, block_n=columns, tail_n=tail, decided_at=here())

    shortest = int(largest * _MIN_SHARE_EXACT) if shape.width < _FEW_BLOCKS * largest else largest
    for columns in range(largest, shortest, -_UNIT):
        if shape.width % columns == 0 and launch(columns).ub_bytes <= device.ub_bytes:
            return launch(columns)
    while True:
        shortest = max(_UNIT, int(largest * _MIN_SHARE) // _UNIT * _UNIT)
        lengths = range(shortest, largest + 1, _UNIT)
        for columns in sorted(lengths, key=lambda columns: (shape.width % columns, -columns)):
            if launch(columns).ub_bytes <= device.ub_bytes or columns == _UNIT:
                return launch(columns)
        largest = shortest


def tiles(shape: ChunkShape, device: Device, tail: int, *, streams: bool) -> list[Tile]:
    """The tiles that a kernel keeps on chip at once, as the compiler of CANN 8.5 and 9.0 plans them on a 910B.

    A value that a loop carries takes two buffers. The statistics of single rows are small, but every one is padded.
    """
    found = [Tile("statistics of rows", ("BLOCK_M", 1), FP32, _ROW_VALUES)]
    if shape.kernel is ChunkKernel.EXPONENTIALS:
        exponentials = _EXPONENTIAL_TILES[device.arch] + shape.transformed
        if not streams:
            found.append(Tile("statistics of the rows before", ("BLOCK_M", 1), FP32, _ROW_VALUES))
        if tail:
            found.append(Tile("tail of a row", ("BLOCK_M", tail), FP32, exponentials))
        if streams:
            references = ceil(shape.width / _SHORT_BLOCK)
            found.append(Tile("references of tiles", ("BLOCK_M", references), FP32, _REFERENCES))
            block = ("BLOCK_M", "BLOCK_N")
            found.append(Tile("exponentials", block, FP32, exponentials))
        return found
    if shape.kernel is ChunkKernel.DISTILLATION:
        arithmetic = _DISTILLATION_TILES + 2 * shape.transformed
        if streams:
            arithmetic += _DISTILLATION_SUMS + _DISTILLATION_ROOM
        length: str | int = "BLOCK_N" if streams else tail
        found.append(Tile("numbers of rows", ("BLOCK_M", 1), FP32, 2 * _ROW_VALUES))
        return [*found, Tile("arithmetic on both rows", ("BLOCK_M", length), FP32, arithmetic)]
    if not streams:
        arithmetic = _ROW_TILES + 2 * shape.transformed + shape.argmax
        return [*found, Tile("row", ("BLOCK_M", tail), FP32, arithmetic)]
    block = ("BLOCK_M", "BLOCK_N")
    computes_statistics = shape.kernel not in (ChunkKernel.GRADIENT, ChunkKernel.DISTRIBUTION_GRADIENT)
    found.append(Tile("logits read", block, shape.itemsize, 2))
    if shape.written_itemsize:
        found.append(Tile("gradient, fp32", block, FP32, 1 if computes_statistics else 2))
    found.append(Tile("fp32 arithmetic", block, FP32, 3))
    if computes_statistics:
        found.append(Tile("running maxima and sums", block, FP32, 4))
        if shape.smoothed:
            of_z = 1 if shape.kernel is ChunkKernel.DISTRIBUTIONS else 3  # whose other sums leave it memory
            found.append(Tile("running sums of z", block, FP32, of_z + _WEIGHT_TILES * shape.weighted))
            found.append(Tile("where maxima rise, a bit of each element", (1, "BLOCK_N"), 1))
        if shape.argmax:
            found.append(Tile("places of maxima", block, FP32 + FP32 // 2, 2))
        if shape.entropy:
            found.append(Tile("running sums of exp times z", block, FP32, 4))
        if shape.kernel is ChunkKernel.DISTRIBUTIONS:
            found.append(Tile("running sums of exp squared", block, FP32, 2))
    elif shape.smoothed or shape.entropy or shape.transformed:
        found.append(Tile("further arithmetic", block, FP32))
    if tail:
        found.append(Tile("tail of a row", ("BLOCK_M", tail), FP32, _ROW_TILES))
    return found


# CUDA.

_ROW = 8192  # columns up to which whole rows are on chip
_BLOCK = 8192  # columns of a block beyond
_TILE = 4096  # elements of a tile of several short rows
_ELEMENTS_PER_WARP = 512  # of a tile
# The same of exponentials. H200, 1024 rows of 128256 and 50257 fp32 logits: .204 and .098 ms. With 512: .291 and .094.
# With 512 and blocks of 4096: .202 and .103.
_EXPONENTIALS_PER_WARP = 1024
_MIN_WARPS, _MAX_WARPS = 4, 16
_ARCH = "sm_90"  # on other GPUs it was not measured
_ROWS_IN_CACHE = 24 * 2**20  # bytes of x that programs that run together read, of 50 MB of level 2 cache
_MIN_OPERATIONS = 2e11  # about .3 ms: a shorter product saves less than its launches cost on the host


@dataclass(frozen=True, kw_only=True)
class CudaTiling(ChunkTiling):
    """That of a program for each tile of rows.

    Attributes:
        warps: warps of a program.
    """

    warps: int

    def grid(self, rows: int) -> int:
        return persistent_grid(ceil(rows / self.block_m), self.device, per_core=ALL_TILES)

    @property
    def constants(self) -> dict[str, int | bool]:
        shape = self.shape
        # Where narrower elements are written over the logits, the threads of a program meet before one overwrites what
        # another may have to read; and where E is written, which is scaled later.
        meets = shape.kernel is ChunkKernel.EXPONENTIALS or 0 < shape.written_itemsize < shape.itemsize
        return {**self.blocks, "TILES": power_of_two(self.tiles), "PADDED": False, "BARRIER": meets}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return row_options(min(self.block_n, self.tail_n or self.block_n), self.warps)


def cuda_tiling(shape: ChunkShape, device: Device) -> CudaTiling:
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
    return CudaTiling(shape=shape, device=device, **blocks, warps=warps, decided_at=here())


def is_worth_it(tokens: int, width: int, vocabulary: int, device: Device) -> bool:
    """Whether the product with exponentials is faster than PyTorch's and a sweep, for sizes whose rows TMA can read."""
    return device.arch == _ARCH and width % 8 == 0 and 2 * tokens * width * vocabulary >= _MIN_OPERATIONS


@dataclass(frozen=True, kw_only=True)
class ProductTiling(Tiling):
    """Tiles of 128 rows of x and 256 of the weight, of which 64 terms are multiplied at a time."""

    why: ClassVar[str] = "tiles of 128 x 256: the table at the top of npu_fused_linear_cross_entropy/tiling.py"
    decided_at: ClassVar[str] = here()
    blocks: ClassVar[tuple[int, int, int]] = (128, 256, 64)

    width: int
    device: Device = field(repr=False)

    def column_tiles(self, columns: int) -> int:
        return ceil(columns / self.blocks[1])

    def grid(self, rows: int, columns: int) -> int:
        """Programs: as many as are on chip at a time."""
        return min(ceil(rows / self.blocks[0]) * self.column_tiles(columns), self.device.vector_cores)

    @property
    def constants(self) -> dict[str, int]:
        block_m, block_n, block_h = self.blocks
        group = max(1, _ROWS_IN_CACHE // (2 * block_m * self.width))
        return {"H": self.width, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_H": block_h, "GROUP": group}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 8, "num_stages": 3}  # 180 KB on chip, with half a tile of exponentials


def is_possible(p: Plan, x: Any, weight: Any, weight_grad: Any) -> bool:
    """Whether TMA can read x and the weight, and the installed Triton (3.4 and later) takes descriptors from the host.

    What is added to `weight_grad` for targets is added to rows whose columns are adjacent.
    """
    on_cuda = p.chip is not None and p.chip.kind == "cuda" and (weight_grad is None or weight_grad.strides[1] == 1)
    is_readable = on_cuda and all(p.is_aligned(each) and _is_readable(each) for each in (x, weight))
    return is_readable and (bool(dry_runs) or descriptor_type() is not None)


def _is_readable(matrix: Any) -> bool:
    step, next_element = matrix.strides
    apart = next_element == 1 and step >= matrix.shape[1]  # TMA cannot address rows that overlap, as expanded ones do
    return apart and all(count * matrix.dtype.itemsize % ALIGNMENT == 0 for count in (step, matrix.start))
