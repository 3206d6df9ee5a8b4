"""Which kernel runs on Ascend, with which tile and grid."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from math import ceil, gcd

from npu_tiling import Block, Device, Tile, Way, first_fit, footprint, persistent_grid
from npu_tiling.budget.arithmetic import FP32, equal_blocks, round_up

from ...shape import Shape
from .policies import COLUMNS, COLUMNS_BYTES, ONE_BUFFER, POLICIES, ROWS_BYTES, Policy, tiles_of_columns, tiles_of_rows


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
        """How programs share the rows: SPLIT of rows.py."""
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
