"""Which kernel runs on Ascend, with which tile and grid: the first row of POLICIES that fits the Unified Buffer."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from math import ceil, gcd
from typing import Any, NamedTuple

from npu_tiling import Block, Device, Tile, Way, first_fit, footprint, persistent_grid
from npu_tiling.budget import FP32, equal_blocks, here, round_up

from ..shape import Shape

HALF = FP32 // 2


class Policy(NamedTuple):
    """A row of the table POLICIES: one way to hold rows on chip.

    Attributes:
        way: its name.
        kernel: "rows" holds a tile of whole rows; "wide" reads a row twice (three times where y is quantised), in blocks of
            columns.
        rows: rows of a tile: "several", as many as one transfer moves (ROWS_BYTES), or "one".
        buffers: 2: the next tile is loaded while this one is computed; 1: it is not.
        spare: the part of the Unified Buffer that the declared buffers must leave free.
        launches: the launches that may take this way, as `_kinds` names them: "forward" and "backward" on a 910B, also
            "forward of fp32" and "backward of fp32" where it reads fp32 rows, "forward 950" and "backward 950" on an
            Ascend950.
        why: the reason, which explanations print.
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
# Not a forward on an Ascend950: tiles that leave no room take twice the time (predicted, CANN 9.1, bf16, 6144, a bias).
NO_ROOM = ALL - {"forward 950"}
# A 16-bit row is cast as soon as it is loaded, and its buffer is free for the next row. An fp32 row stays in the buffer it
# was loaded to, so a second buffer pays. In a forward on an Ascend950 it pays for every dtype.
FP32_ROWS = frozenset({"forward of fp32", "backward of fp32", "forward 950"})
# Not a backward on an Ascend950, which sums a single row again for every 64 columns that use the sum: "wide" is faster.
ONE_ROW = ALL - {"backward 950"}

# The first row that fits is taken. The numbers beside the rows are microseconds that the time model predicts, for 4096 rows
# on an Ascend910B4 with CANN 9.1: bf16 forwards (f.) and backwards (b.) of these widths, without the launch that adds
# partial sums, and in the last column a gated forward of fp32. -: it does not fit. None of it was measured on a chip.
# For CANN 8.5 and 9.0 the model ranks the ways alike:
#   - A forward with several rows and no room left takes 20 to 36 % less time than one with single rows (bf16, widths from
#     4096 with a bias, 3072 with a residual and int8, 5504 plain).
#   - A bf16 row takes as long with two buffers as with one, or 3 to 11 % longer, on CANN 8.5 up to 34 % longer (forward
#     10240: 395 against 294).
#   - An fp32 row takes up to 12 % longer with one buffer than with two.
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

# The bytes of a tile or block that one transfer moves. 8 KiB reach 76 % of the bandwidth, 16 KiB 94 %. Larger ones would
# fill the Unified Buffer and leave no room for the compilers, which differ in what they need. A "wide" kernel keeps more
# blocks at once, so its blocks are smaller.
ROWS_BYTES, COLUMNS_BYTES = 12 * 1024, 8 * 1024


def tiles_of_rows(shape: Shape, device: Device, width: int, *, several: bool, buffers: int) -> list[Tile]:
    """The buffers that a "rows" kernel has at once, as the compiler plans them. `several`: a tile has more than one row.

    A test holds the sums against the widest tiles that all compilers place.
    """
    forward, on_950 = not shape.backward, device.arch == "dav-c310"
    rounds, rounds_factors = shape.rounding.normalised != "fp32", shape.rounding.factors != "fp32"
    tile: tuple[str | int, ...] = ("ROWS", width)
    parameters: tuple[str | int, ...] = (1, width)
    # dsum is added last, in a buffer that nothing else needs any more. So is a residual where several rows are a tile: its
    # buffer holds the sum, too.
    read = shape.itemsizes_but_second if shape.backward or several else shape.itemsizes
    # Arithmetic takes one tile beside the row that was loaded. It takes a second one where a tensor is narrower than fp32,
    # and always on an Ascend950; half of it where another row is fp32 and nothing waits for a second buffer or a rounding.
    fp32_reads = sum(itemsize == FP32 for itemsize in read)
    is_mixed = (
        shape.backward and not (shape.gated or several or on_950 or rounds_factors) and buffers == 1 and fp32_reads > 0
    )
    fp32_halves = 3 if is_mixed and shape.narrow else 4 if shape.narrow or on_950 else 2
    gate_halves = 12 if on_950 else 10 if several else 11 if buffers > 1 else 9
    table = (
        # what                        shape        bytes                    copies            where
        *(("row read", tile, itemsize, buffers, True) for itemsize in read),
        ("fp32 arithmetic", tile, HALF, fp32_halves, True),
        ("copy of fp32 that was read", tile, FP32, fp32_reads, on_950 and fp32_reads > 0),
        ("result in another dtype", tile, HALF, 3, on_950 and shape.second_output),
        ("row reduction", tile, HALF, 1, True),
        ("result times 0", tile, FP32, 1, shape.quantised),
        ("residual, sum stored", tile, shape.residual_itemsize, 1, several and shape.residual_itemsize > 0),
        ("rounded product", tile, FP32, 1, several and forward and shape.biased and rounds),
        ("scale", parameters, FP32, 1, True),
        ("bias", parameters, FP32, 1, shape.biased and (forward or shape.gated)),
        ("rstd, mean, rounded rstd", ("ROWS", 1), FP32, 3, True),
        ("sums of dw and db", tile, FP32, 1 + shape.biased, shape.backward),
        ("gate, slope, products", tile, HALF, gate_halves, shape.backward and shape.gated),
        ("sum of dw over rows", tile, HALF, 1, shape.backward and several),
        ("rounded product", tile, HALF, 1, shape.backward and rounds_factors and buffers > 1 and not (several or on_950)),
    )
    return [Tile(what, size, itemsize, copies) for what, size, itemsize, copies, where in table if where]


def tiles_of_columns(shape: Shape) -> list[Tile]:
    """The buffers that a "wide" kernel has at once, for a block of columns of one row."""
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
        groups, rows, columns: of a tile. A tile with more than one group has all rows of each.
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
        """Heads with parameters of their own, of which a program sees one; else 1."""
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
        # As many of each head as fill whole rounds: every core then has a program in each of them.
        cores = self.device.vector_cores
        limit = min(max(1, self.device.max_grid // self.heads), cores // gcd(cores, self.heads))
        return self.heads * max(1, min(self.row_tiles // self.heads, limit))

    @functools.cached_property
    def splits(self) -> int:
        """Rows of partial sums of dw, of all heads: one for each program or, of "wide", for each set of rows."""
        if self.kernel == "rows":
            return self.grid
        wanted = self.device.vector_cores // ceil(self.shape.width / self.columns) // self.heads
        return self.heads * max(1, min(self.row_tiles // self.heads, wanted))

    @functools.cached_property
    def column_grid(self) -> int:
        """Programs of `backward_wide_kernel`, which take blocks of columns."""
        return persistent_grid(ceil(self.shape.width / self.columns) * self.splits, self.device)

    @property
    def stores_sums(self) -> bool:
        """Whether the kernel stores the gradients of parameters in place of partial sums: never on Ascend."""
        return False

    @property
    def ub_bytes(self) -> int:
        """Bytes of the Unified Buffer that the declared buffers take."""
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
    """The tiling of the first policy that fits. Raises `npu_tiling.UnifiedBufferError` where none does."""
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
        # A tile of "several" rows that has room for one alone compiles as a tile of one row.
        several = policy.rows == "several" and rows_block.largest > 1
        tiles = tiles_of_rows(shape, device, padded, several=several, buffers=policy.buffers)
        if policy.spare:
            tiles.append(Tile("room to spare", (1, int(device.ub_bytes * policy.spare)), 1))
            if rows_block.multiple_of > 1:  # a tile of several groups is loaded and stored through a second one
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
        # Not only where `launches` of this way allows it: it says where the way is fast, and here the tile has to fit.
        return dataclasses.replace(tiling, policy=ONE_BUFFER)
    unit = _unit(tiling.shape, tiling.device)
    if tiling.columns <= unit:
        return None
    return dataclasses.replace(tiling, policy=COLUMNS, columns=round_up(ceil(tiling.columns / 2), unit))


def _kinds(shape: Shape, device: Device) -> set[str]:
    """The names of a launch in `Policy.launches`."""
    direction = "backward" if shape.backward else "forward"
    if device.arch == "dav-c310":
        return {f"{direction} 950"}
    return {direction, f"{direction} of fp32"} if FP32 in shape.itemsizes else {direction}


def _unit(shape: Shape, device: Device) -> int:
    """The fewest columns that are a multiple of `ub_align` bytes in every tensor that is read, and in a quantised y."""
    return device.ub_align // (1 if shape.quantised else min(shape.itemsizes))


def _rows_block(shape: Shape, wanted: int) -> Block:
    """The rows that a tile may have: of one group or, where `wanted` rows are two groups or more, of whole groups."""
    rows, groups = min(wanted, shape.max_rows), min(wanted // shape.n_inner, shape.max_groups)
    if shape.per_head or shape.n_outer == 1 or rows < shape.n_inner or groups < 2:
        return Block("ROWS", rows, min(2, rows))
    return Block("ROWS", groups * shape.n_inner, 2 * shape.n_inner, shape.n_inner)
