"""Which kernel runs on Ascend, with which tile and grid: the first way of a table that fits the Unified Buffer."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from math import ceil, gcd
from typing import Any, NamedTuple

from npu_tiling import Block, Device, Tile, Way, first_fit, footprint, persistent_grid
from npu_tiling.budget.arithmetic import FP32, equal_blocks, round_up
from npu_tiling.places import here

from ..shape import Shape

HALF = FP32 // 2


class Policy(NamedTuple):
    """A row of the table of ways to hold rows on chip.

    Attributes:
        way: its name.
        kernel: "rows" holds a tile of whole rows, "wide" reads a row twice, in blocks of columns.
        rows: of a tile: "several", as many as fill a transfer, or "one".
        buffers: 2: the next tile is loaded while this one is computed.
        spare: part of the Unified Buffer that stays free.
        launches: which may take it: "forward" and "backward" on a 910B, the same "of fp32" where rows of fp32 are read, and
            "forward 950" and "backward 950" on an Ascend950.
        why: for people.
        decided_at: file and line of the row.
    """

    way: str
    kernel: str
    rows: str
    buffers: int
    spare: float
    launches: frozenset[str]
    why: str
    decided_at: str


def _row(*columns: Any) -> Policy:
    return Policy._make((*columns, here(2)))


ALL = frozenset({"forward", "backward", "forward 950", "backward 950"})
# A forward of an Ascend950 in tiles that leave no room: twice the time with CANN 9.1 (bf16 with a bias, 6144, predicted).
NO_ROOM = ALL - {"forward 950"}
# Rows of 16 bits are cast as soon as they are loaded: their buffer is free for the next row. fp32 rows are computed on
# in the load's buffer, so a second buffer pays. So it does in a forward on an Ascend950, whatever the dtype.
FP32_ROWS = frozenset({"forward of fp32", "backward of fp32", "forward 950"})
# An Ascend950 sums a single row of a backward anew for every 64 columns that use the sum: two passes are faster there.
ONE_ROW = ALL - {"backward 950"}

# The first way that fits is taken. The comments are microseconds that the time model predicts (Ascend910B4, CANN 9.1, 4096
# rows): of bf16, for forward 2048, forward 5760, backward 2048, backward 3584, forward 8192 and backward 8192, without the
# sum of dw's parts; of fp32, for a gated forward of 4096. -: it does not fit. CANN 8.5 and 9.0 agree about which is faster:
# a forward in several rows without room takes 20 to 36 % less time than one in single rows (bf16, widths from 4096 with a
# bias, 3072 with a sum to int8, 5504 plain); a row of bf16 takes with two buffers as long as with one, or 3 to 11 % longer,
# on CANN 8.5 up to 34 % longer (forward 10240: 395 and 294); a row of fp32 takes up to 12 % longer with one buffer than with
# two. No chip has shown any of it.
# fmt: off
POLICIES = (
    #                                                                                   f.   f.   b.   b.   f.   b.   f.
    #                                                                                 2048 5760 2048 3584 8192 8192 4096
    #    way                           kernel  rows       buffers  spare  launches     bf16                           fp32
    _row("several rows",               "rows", "several", 2,       1 / 8, ALL,       #  57    -   80    -    -    -    -
         "a transfer of several rows is fast, and their sums stay in the vector unit"),
    _row("several rows, no room left", "rows", "several", 2,       0,     NO_ROOM,   #  57  169   80  184    -    -    -
         "rows that fill the Unified Buffer are no slower than one"),
    _row("a row, two buffers",         "rows", "one",     2,       0,     FP32_ROWS, # 129  194  141  201  236    -  339
         "one row fits beside the next one, and a second buffer pays"),
    _row("a row, one buffer",          "rows", "one",     1,       0,     ONE_ROW,   # 120  185  128  187  226  386  353
         "a row is read once; in blocks of columns it is read twice"),
    _row("blocks of columns",          "wide", "one",     2,       0,     ALL,       # 131  221  254  345  267  674  339
         "a row does not fit whole, or, in a backward on an Ascend950, takes longer whole than in two passes"),
)
# fmt: on
_BY_WAY = {policy.way: policy for policy in POLICIES}
ONE_BUFFER, COLUMNS = _BY_WAY["a row, one buffer"], _BY_WAY["blocks of columns"]

# Bytes of one transfer. 8 KiB reach 76 % of the bandwidth and 16 KiB 94 %; a tile that fills the Unified Buffer leaves the
# compilers, which differ in what they need, no room. More blocks are alive at once in the passes over columns.
ROWS_BYTES, COLUMNS_BYTES = 12 * 1024, 8 * 1024


def tiles_of_rows(shape: Shape, device: Device, width: int, *, several: bool, buffers: int) -> list[Tile]:
    """What a "rows" kernel keeps on chip at once, as the compiler plans it."""
    forward, on_950 = not shape.backward, device.arch == "dav-c310"
    rounds, rounds_factors = shape.rounding.normalised != "fp32", shape.rounding.factors != "fp32"
    tile: tuple[str | int, ...] = ("ROWS", width)
    parameters: tuple[str | int, ...] = (1, width)
    # Beside the buffer that was loaded, arithmetic takes one tile where the result is fp32. A narrower result is cast from a
    # tile of its own.
    fp32_tiles = 2 if shape.narrow or on_950 else 1
    fp32_reads = sum(itemsize == FP32 for itemsize in shape.itemsizes)
    table = (
        # what                        shape        bytes                    copies            where
        *(("row read", tile, itemsize, buffers, True) for itemsize in shape.itemsizes),
        ("fp32 arithmetic", tile, FP32, fp32_tiles, True),
        ("copy of fp32 that was read", tile, FP32, fp32_reads, on_950 and fp32_reads > 0),
        ("result in another dtype", tile, HALF, 3, on_950 and shape.second_output),
        ("row reduction", tile, HALF, 1, True),
        ("result times 0", tile, FP32, 1, shape.quantised),
        ("sum stored", tile, shape.residual_itemsize, buffers, several and shape.residual_itemsize > 0),
        ("rounded product", tile, FP32, 1, several and forward and shape.biased and rounds),
        ("scale", parameters, FP32, 1, True),
        ("bias", parameters, FP32, 1, shape.biased),
        ("rstd, mean, rounded rstd", ("ROWS", 1), FP32, 3, True),
        ("sums of dw and db", tile, FP32, 1 + shape.biased, shape.backward),
        ("gate, slope, products", tile, FP32, 6, shape.backward and shape.gated),
        ("sum of dw over rows", tile, HALF, 1, shape.backward and several),
        ("rounded product", tile, HALF, 1, shape.backward and rounds_factors and buffers > 1 and not (several or on_950)),
    )
    return [Tile(what, size, itemsize, copies) for what, size, itemsize, copies, where in table if where]


def tiles_of_columns(shape: Shape) -> list[Tile]:
    """What a "wide" kernel keeps on chip at once, of one row."""
    tile: tuple[str | int, ...] = (1, "BLOCK_N")
    number: tuple[str | int, ...] = (1, 1)
    table = (
        # what                   shape   bytes  copies  where
        *(("row read", tile, itemsize, 2, True) for itemsize in shape.itemsizes),
        ("fp32 arithmetic", tile, FP32, 2, True),
        ("row reduction", tile, HALF, 1, True),
        ("result times 0", tile, FP32, 1, shape.quantised),
        ("weight read", tile, FP32, 2, True),
        ("scale", tile, FP32, 1, True),
        ("bias, read and added", tile, FP32, 3, shape.biased),
        ("rstd and mean", number, FP32, 2, True),
        ("sums", tile, FP32, 1 + (shape.biased and shape.backward), True),
        ("gate, slope, products", tile, FP32, 5, shape.gated and shape.backward),
    )
    return [Tile(what, size, itemsize, copies) for what, size, itemsize, copies, where in table if where]


@dataclass(frozen=True, kw_only=True)
class AscendTiling:
    """How one direction runs on Ascend.

    Attributes:
        shape, device: what it was made for.
        policy: the row of the table.
        groups, rows, columns: of a tile. More than one group only with all rows of each.
    """

    shape: Shape
    device: Device = field(repr=False)
    policy: Policy
    groups: int = 1
    rows: int
    columns: int

    @property
    def way(self) -> str:
        return self.policy.way

    @property
    def why(self) -> str:
        return self.policy.why

    @property
    def decided_at(self) -> str:
        return self.policy.decided_at

    @property
    def kernel(self) -> str:
        return self.policy.kernel

    @property
    def split(self) -> str:
        """How programs share the rows: SPLIT of kernels.py."""
        if self.shape.per_head:
            return "heads"
        return "rows" if self.shape.n_outer == 1 and self.rows > 1 else "tiles"

    @property
    def heads(self) -> int:
        """Sets of parameters, of which a program sees one."""
        return self.shape.n_outer if self.shape.per_head else 1

    @property
    def row_tiles(self) -> int:
        return ceil(self.shape.n_outer / self.groups) * ceil(self.shape.n_inner / self.rows)

    @functools.cached_property
    def grid(self) -> int:
        """Programs of every kernel that takes rows."""
        if self.heads == 1:
            rows_are_split = self.kernel == "rows" and self.split == "rows"
            return persistent_grid(self.shape.n_inner if rows_are_split else self.row_tiles, self.device)
        # As many of each head as make rounds in which every core has a program.
        cores = self.device.vector_cores
        limit = min(max(1, self.device.max_grid // self.heads), cores // gcd(cores, self.heads))
        return self.heads * max(1, min(self.row_tiles // self.heads, limit))

    @functools.cached_property
    def splits(self) -> int:
        """Partial sums of a row of dw: one a program or, where programs take columns, one for each set of rows."""
        if self.kernel == "rows":
            return self.grid
        wanted = self.device.vector_cores // ceil(self.shape.width / self.columns) // self.heads
        return self.heads * max(1, min(self.row_tiles // self.heads, wanted))

    @functools.cached_property
    def column_grid(self) -> int:
        """Programs of the kernel that takes columns."""
        return persistent_grid(ceil(self.shape.width / self.columns) * self.splits, self.device)

    @property
    def stores_sums(self) -> bool:
        """Whether the kernel stores gradients of parameters in place of partial sums."""
        return False

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared buffers take."""
        if self.kernel == "wide":
            return footprint(tiles_of_columns(self.shape), {"BLOCK_N": self.columns}, self.device)
        rows = self.groups * self.rows
        tiles = tiles_of_rows(self.shape, self.device, self.columns, several=rows > 1, buffers=self.policy.buffers)
        return footprint(tiles, {"ROWS": rows}, self.device)

    @property
    def constants(self) -> dict[str, object]:
        """`tl.constexpr` parameters."""
        sizes: dict[str, object] = {"N": self.shape.width, "BLOCK_N": self.columns}
        if self.kernel == "rows":
            sizes |= {"G": self.groups, "M": self.rows, "SPLIT": self.split}
        else:
            sizes |= {"ORDER": self.shape.order}
        return {**sizes, **self.shape.formula_constants}

    @property
    def options(self) -> dict[str, bool]:
        """Compiler options."""
        return {"multibuffer": self.policy.buffers > 1}


def choose(shape: Shape, device: Device) -> AscendTiling:
    """The first way that fits. Raises `npu_tiling.UnifiedBufferError` where none does."""
    unit, itemsize = _unit(shape, device), min(shape.itemsizes)
    padded = round_up(shape.width, unit)
    rows_block = _rows_block(shape, max(2, ROWS_BYTES // (padded * itemsize)))
    columns_block = Block("BLOCK_N", min(padded, COLUMNS_BYTES // itemsize), unit, unit)
    launch = _kinds(shape, device)
    ways = []
    for policy in POLICIES:
        if not policy.launches & launch:
            continue
        if policy.kernel == "wide":
            ways.append(Way(policy, tiles_of_columns(shape), (columns_block,)))
            continue
        # A several-row tile cut to one row compiles as a one-row tile.
        several = policy.rows == "several" and rows_block.largest > 1
        tiles = tiles_of_rows(shape, device, padded, several=several, buffers=policy.buffers)
        if policy.spare:
            tiles.append(Tile("room to spare", (1, int(device.ub_bytes * policy.spare)), 1))
            if rows_block.multiple_of > 1:  # a tile of groups is moved through another one
                tiles.append(Tile("rows of groups", ("ROWS", padded), FP32))
        ways.append(Way(policy, tiles, (rows_block if policy.rows == "several" else Block("ROWS", 1),)))
    policy, blocks = first_fit(ways, device)
    if policy.kernel == "wide":
        columns = equal_blocks(padded, blocks["BLOCK_N"], unit)
        return AscendTiling(shape=shape, device=device, policy=policy, rows=1, columns=columns)
    rows, groups = blocks["ROWS"], 1
    if rows > 1 and rows_block.multiple_of > 1:
        rows, groups = shape.n_inner, rows // shape.n_inner
    elif shape.n_outer > 1:  # equal tiles: no short one at the end of every group
        rows = ceil(shape.n_inner / ceil(shape.n_inner / rows))
    return AscendTiling(shape=shape, device=device, policy=policy, groups=groups, rows=rows, columns=padded)


def smaller(tiling: AscendTiling) -> AscendTiling | None:
    """The next smaller tiling for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if tiling.groups > 1:
        return dataclasses.replace(tiling, groups=tiling.groups // 2)
    if tiling.rows > 1:
        return dataclasses.replace(tiling, rows=tiling.rows // 2)
    if tiling.policy.buffers > 1 and tiling.kernel == "rows":
        # `launches` says where a way is fast. To fit is all that counts here: on an Ascend950 a backward may take it too.
        return dataclasses.replace(tiling, policy=ONE_BUFFER)
    unit = _unit(tiling.shape, tiling.device)
    if tiling.columns <= unit:
        return None
    return dataclasses.replace(tiling, policy=COLUMNS, columns=round_up(ceil(tiling.columns / 2), unit))


def _kinds(shape: Shape, device: Device) -> set[str]:
    """What `Policy.launches` calls a launch."""
    direction = "backward" if shape.backward else "forward"
    if device.arch == "dav-c310":
        return {f"{direction} 950"}
    return {direction, f"{direction} of fp32"} if FP32 in shape.itemsizes else {direction}


def _unit(shape: Shape, device: Device) -> int:
    """Columns that make up an aligned piece of a row in every tensor."""
    return device.ub_align // (1 if shape.quantised else min(shape.itemsizes))


def _rows_block(shape: Shape, wanted: int) -> Block:
    """How many rows may share a tile: rows of one group or, where a group has fewer than wanted, whole groups."""
    rows, groups = min(wanted, shape.max_rows), min(wanted // shape.n_inner, shape.max_groups)
    if shape.per_head or shape.n_outer == 1 or rows < shape.n_inner or groups < 2:
        return Block("ROWS", rows, min(2, rows))
    return Block("ROWS", groups * shape.n_inner, 2 * shape.n_inner, shape.n_inner)
