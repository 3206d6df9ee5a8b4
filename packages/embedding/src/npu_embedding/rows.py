"""What modules of kernels share: rows as kernels read them in a plan, and tiles of rows on both chips.

Ascend: a table declares what a kernel keeps in the Unified Buffer (`RowKernel`), and the largest tile that fits is taken.
CUDA: a block of columns is a power of two, and a table bounds it (`BlockRule`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from npu_tiling import Block, Device, Tile, fit, footprint
from npu_tiling.budget import equal_blocks, here, power_of_two
from npu_tiling.calls import Empty
from npu_tiling.launch import CountTiling
from npu_tiling.plans import Plan, Slot

FLOAT, INT8, INT32, INT64 = torch.float32, torch.int8, torch.int32, torch.int64  # modules of kernels import no torch
NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
MIN_CHUNK = 8  # sorted positions: a shorter chunk costs more in partial sums than it spreads work


def as_bits(p: Plan, slot: Slot) -> Slot:
    """The elements as integers of their size, for kernels that copy them."""
    dtype = torch.int16 if slot.dtype.itemsize == 2 else torch.int32
    view: Slot = p.view(slot, slot.shape, slot.strides, dtype=dtype)
    return view


def dense_rows(p: Plan, rows: Any) -> Any:
    """The slot [..., D], copied only if the elements of a row are not next to each other; None for None."""
    if rows is None or rows.strides[-1] == 1 or rows.shape[-1] == 1:
        return rows
    return p.contiguous(rows)


def fill(p: Plan, slot: Slot, value: float) -> Slot:
    """Adds the step that fills memory with a value."""
    if value == 0:
        p.torch(torch.Tensor.zero_, slot, writes=[slot])
    else:
        p.torch(torch.Tensor.fill_, slot, value, writes=[slot])
    return slot


def sorted_numbers(p: Plan, numbers: Slot) -> tuple[Slot, Slot]:
    """Adds torch.sort: numbers [n] in ascending order, and where each stood; equal ones keep their order."""
    made = [Empty(numbers.shape, dtype) for dtype in (numbers.dtype, INT64)]
    values, order = p.torch(partial(torch.sort, stable=True), numbers, makes=made)
    return values, order


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """Rows that a kernel moves or adds.

    Attributes:
        width: elements of a row.
        itemsize: bytes of an element.
        device: whose kernels run.
    """

    width: int
    itemsize: int
    device: Device = field(repr=False)


class Way(Enum):
    """How equal indices are brought next to each other for the gradient."""

    SEARCHED = "one kernel sums, each program of which looks through all indices"
    RANKED = "two kernels sort: groups of indices, then each index in the other groups"
    REPEATED = "two kernels sort, and find where each row's indices begin: each row sums its bag of rows of dy"
    MERGED = "two kernels sort: runs of indices, then four sorted runs to one until one is left"
    SORTED = "torch.sort sorts rows of the table"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, eq=False)
class RowKernel:
    """What the tables of Ascend's tiles know of a kernel over rows.

    Attributes:
        name: the kernel's, and what it does where several entries are of one kernel.
        tiles: the tiles that it keeps in the Unified Buffer at once, as the compilers of CANN 8.5, 9.0 and 9.1 plan it, for
            a shape; and whether rows of a tile move at once, which takes other buffers.
        flag: its constant that says whether rows of a tile move at once; empty: it has none.
        unit: rows of a tile are a multiple of it.
        one_by_one: a program takes single rows where those of a tile do not move at once.
        row_by_row: tiles have whole rows; this takes single rows, for where they do not fit.
    """

    name: str
    tiles: Callable[[RowShape, bool], list[Tile]]
    flag: str = ""
    unit: int = 1
    one_by_one: bool = False
    row_by_row: RowKernel | None = None

    def __repr__(self) -> str:
        return self.name

    def tiling(self, shape: RowShape) -> RowTiling:
        """Blocks of columns of single rows. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
        return largest_tile(self, shape, None, why="rows are taken one by one", decided_at=here())


@dataclass(frozen=True, kw_only=True)
class RowTiling(CountTiling):
    """That of a kernel over rows on Ascend.

    Attributes:
        kernel: which one.
        shape: of the rows.
        block_m: rows of a tile; 1 where rows are taken one by one.
        block_n: columns of a tile.
    """

    kernel: RowKernel
    shape: RowShape
    block_m: int
    block_n: int

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        tiles = self.kernel.tiles(self.shape, fills_units(self.block_n, self.shape))
        return footprint(tiles, {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}, self.device)

    def smaller(self) -> RowTiling | None:
        """Fewer rows, then fewer columns."""
        kernel, shape, block_m, block_n = self.kernel, self.shape, self.block_m, self.block_n
        least = max(kernel.unit, 2)
        if block_m > least:
            block_m = max(least, block_m // 2 // kernel.unit * kernel.unit)
        elif kernel.row_by_row is not None:
            return kernel.row_by_row.tiling(shape)
        else:
            block_n = _equal_columns(shape, ceil(block_n / 2))
            if block_n >= self.block_n:  # no whole unit is left
                return None
        return row_tiling(kernel, shape, block_m, block_n, why=self.why, decided_at=self.decided_at)


def row_tiling(kernel: RowKernel, shape: RowShape, block_m: int, block_n: int, *, why: str, decided_at: str) -> RowTiling:
    """That of a tile of so many rows and columns."""
    blocks: dict[str, int] = {"N": shape.width, "BLOCK_N": block_n, "BLOCK_M": block_m}
    moves_tiles = block_m > 1 and fills_units(block_n, shape)
    if kernel.flag:
        blocks[kernel.flag] = moves_tiles
    return RowTiling(
        device=shape.device,
        blocks=tuple(blocks.items()),
        per_program=1 if kernel.one_by_one and not moves_tiles else block_m,
        column_blocks=ceil(shape.width / block_n),
        why=why,
        decided_at=decided_at,
        kernel=kernel,
        shape=shape,
        block_m=block_m,
        block_n=block_n,
    )


def largest_tile(
    kernel: RowKernel, shape: RowShape, rows: Block | None, *, why: str, decided_at: str, moves_tiles: bool = True
) -> RowTiling:
    """The largest tile that fits: fewer rows, then fewer columns. Raises `npu_tiling.UnifiedBufferError` where none does."""
    unit = shape.device.ub_align // shape.itemsize
    columns = Block("BLOCK_N", shape.width, min(shape.width, unit), unit)
    blocks = fit(kernel.tiles(shape, moves_tiles), (columns,) if rows is None else (rows, columns), shape.device)
    block_n = _equal_columns(shape, blocks["BLOCK_N"])
    return row_tiling(kernel, shape, blocks.get("BLOCK_M", 1), block_n, why=why, decided_at=decided_at)


# A store of 32 KB is past the point where its length matters (16 KB reach 94 % of the bandwidth).
TILE_BYTES = 32768
# Rows of a tile, however narrow: few enough that a few thousand indices divide evenly over the cores of an Ascend chip.
_MAX_TILE_ROWS = 32


def tile_rows(shape: RowShape, tile_bytes: int = TILE_BYTES) -> Block:
    """Rows of a tile of so many bytes, at least 2."""
    return Block("BLOCK_M", max(2, min(_MAX_TILE_ROWS, tile_bytes // (shape.width * shape.itemsize))), 2)


def fills_units(columns: int, shape: RowShape) -> bool:
    """Whether so many columns are whole units of what the device transfers."""
    return columns * shape.itemsize % shape.device.ub_align == 0


def _equal_columns(shape: RowShape, largest: int) -> int:
    """Columns of as few blocks as fit, of equal length; whole units, if several."""
    if largest >= shape.width:
        return shape.width
    return equal_blocks(shape.width, largest, shape.device.ub_align // shape.itemsize)


class BlockRule(NamedTuple):
    """A row of a table of CUDA's blocks.

    Attributes:
        max_columns: columns of a block at most.
        warp_bytes: bytes of a tile for each warp.
        max_warps: warps of a program at most.
        why: the reason.
        decided_at: file and line.
    """

    max_columns: int
    warp_bytes: int
    max_warps: int
    why: str
    decided_at: str

    def columns(self, shape: RowShape) -> int:
        """A power of two that divides the width, or one that takes a mask where that would be a short one."""
        divisor = min(shape.width & -shape.width, self.max_columns)
        return divisor if divisor >= 128 else min(power_of_two(shape.width), self.max_columns)

    def rows(self, row_bytes: int) -> int:
        """Rows of a tile of all warps."""
        return max(1, min(_MAX_TILE_ROWS, self.max_warps * self.warp_bytes // row_bytes))

    def tiling(self, shape: RowShape, blocks: Mapping[str, int], *, per_program: int = 1, warps: int = 0) -> CountTiling:
        """That of these constants beside the width and the block's columns; `warps`: 0 stands for the most."""
        columns = self.columns(shape)
        return CountTiling(
            device=shape.device,
            blocks=tuple({"N": shape.width, "BLOCK_N": columns, **blocks}.items()),
            per_program=per_program,
            column_blocks=ceil(shape.width / columns),
            warps=warps or self.max_warps,
            why=self.why,
            decided_at=self.decided_at,
        )


COPIES = BlockRule(1024, 4096, 1, "copies share nothing: a warp is a program", here())  # the fastest on an H200


class Rule(NamedTuple):
    """A row of a table of ways: what runs, why, and its file and line.

    Attributes:
        way: what runs.
        max_indices: how many there may be.
        max_elements: of dy, [indices, width].
        max_rows: of the table.
        repeats: indices for each row of the table, at least.
        why: the reason.
        decided_at: file and line.
    """

    way: Way
    max_indices: float
    max_elements: float
    max_rows: float
    repeats: float
    why: str
    decided_at: str

    def tiling(self, device: Device, blocks: dict[str, int], per_program: int, warps: int = 4) -> CountTiling:
        """That of a launch over numbers, which belongs to this way."""
        return CountTiling(
            device=device,
            blocks=tuple(blocks.items()),
            per_program=per_program,
            warps=warps,
            way=self.way,
            why=self.why,
            decided_at=self.decided_at,
        )


class Gradient(NamedTuple):
    """A gradient that is asked for.

    Attributes:
        dy: [n, D], or [P, n / P, D] where rows lie in P parts; the elements of a row next to each other.
        indices: [n], contiguous.
        n_rows: of the table at hand.
        padding: the row that gets no gradient, NO_ROW for none.
        scale_by_count: whether the gradient of a row is divided by how many indices name it.
        first_row: the row of the whole table that the table at hand begins with.
    """

    dy: Slot
    indices: Slot
    n_rows: int
    padding: int
    scale_by_count: bool
    first_row: int

    @property
    def flags(self) -> dict[str, bool]:
        """Constants of kernels that sum rows of dy."""
        return {"SCALE_BY_COUNT": self.scale_by_count, "IN_PARTS": self.dy.dim() == 3}

    @property
    def dy_sizes(self) -> dict[str, int]:
        """What such kernels ask for: rows of a part of dy, from a part to the next, and from a row to the next."""
        s_part = self.dy.strides[0] if self.dy.dim() == 3 else 0
        return {"n_part": self.dy.shape[-2], "s_part": s_part, "s_dy": self.dy.strides[-2]}

    @property
    def sizes(self) -> dict[str, int]:
        """What kernels that read indices ask for."""
        n = self.indices.numel()
        return {"n": n, "n_rows": self.n_rows, "first_row": self.first_row, "i_padding": self.padding}

    def shape(self, chip: Device) -> RowShape:
        """What tables of tiles decide from."""
        return RowShape(width=self.dy.shape[-1], itemsize=self.dy.dtype.itemsize, device=chip)
