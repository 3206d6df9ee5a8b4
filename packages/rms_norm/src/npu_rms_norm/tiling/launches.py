"""The launches of RMSNorm's kernels: blocks, grid and compiler options."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from math import ceil, gcd

from npu_tiling import ALL_TILES, Device, footprint, persistent_grid
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.launching.cuda import row_options

from .footprint import column_tiles, row_tiles
from .problem import Problem

_REGISTERS, _WARP, _WARPS = 65536, 32, 64  # of a core of CUDA, threads of a warp, and most warps of a core


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
        block_g: groups of a tile; more than one only where block_m is all rows of a group. Below 0 (CUDA): a tile's rows are
            of whatever groups, of -block_g rows each, or, in the order of tokens, of the -block_g heads.
        warps: warps of a program (CUDA).
        per_core: programs resident on a core (CUDA).
        share: programs that share a row, block_n columns each, and are all resident; 0 where none do (CUDA).
        ahead: the next tile is loaded before this one is computed (CUDA, of several rows).
        held: the compiler is held to the registers that leave room for them (CUDA).
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
    share: int = 0
    held: bool = False
    ahead: bool = False

    @property
    def form(self) -> str:
        """Which kernels: of rows whole, in chunks of block_n columns that are held at once or shared, or wide."""
        if self.share:
            return "shared"
        return "wide" if self.wide else "chunks" if self.column_blocks > 1 else "rows"

    @property
    def row_tiles(self) -> int:
        if self.block_g < 0:
            return ceil(self.problem.n_outer * self.problem.n_inner / self.block_m)
        return ceil(self.problem.n_outer / self.block_g) * ceil(self.problem.n_inner / self.block_m)

    @property
    def contiguous_split(self) -> bool:
        """Whether every program takes as many rows as any other, one after the other, instead of tiles in turn (Ascend)."""
        one_group = self.problem.n_outer == 1 and not self.problem.per_head
        return self.device.kind != "cuda" and one_group and self.block_m > 1 and not self.wide

    @property
    def heads(self) -> int:
        """Weights, of which a program sees one; 1 too where a tile's rows are of several."""
        return self.problem.n_outer if self.problem.per_head and self.block_g > 0 else 1

    @functools.cached_property
    def grid(self) -> int:
        if self.share:
            return self.splits * self.share
        tiles = self.problem.n_inner if self.contiguous_split else self.row_tiles
        if self.heads == 1:
            return persistent_grid(tiles, self.device, per_core=self.per_core)
        return self.heads * max(1, min(tiles // self.heads, self._programs_of_a_head))

    @property
    def _programs_of_a_head(self) -> int:
        """As many as make rounds in which every core has a program (Ascend), or as are resident at once."""
        most = max(1, self.device.max_grid // self.heads)
        if self.device.kind == "cuda":
            return min(most, self.device.vector_cores * self.per_core // self.heads)
        return min(most, self.device.vector_cores // gcd(self.device.vector_cores, self.heads))

    @property
    def column_blocks(self) -> int:
        return ceil(self.problem.width / self.block_n)

    @functools.cached_property
    def splits(self) -> int:
        """Partial sums of a row of dw: one per program, or, where programs take columns, one per set of rows."""
        if self.share:
            return min(self.row_tiles, self.device.vector_cores * self.per_core // self.share)
        if not self.wide:
            return self.grid
        wanted = self.device.vector_cores * self.per_core // self.column_blocks // self.heads
        return self.heads * max(1, min(self.row_tiles // self.heads, wanted))

    @functools.cached_property
    def column_grid(self) -> int:
        """Programs of the kernel that takes columns."""
        return persistent_grid(self.column_blocks * self.splits, self.device, per_core=self.per_core)

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        if self.wide:
            return footprint(column_tiles(self.problem, self.backward), {"BLOCK_N": self.block_n}, self.device)
        tiles = row_tiles(
            self.problem, self.device, self.block_n, self.backward, self.double_buffered, self.block_g * self.block_m > 1
        )
        return footprint(tiles, {"ROWS": self.block_g * self.block_m}, self.device)

    @property
    def constants(self) -> dict[str, int]:
        own: dict[str, int] = {}
        if self.form == "shared":
            slots = power_of_two(self.share)
            return {"N": self.problem.width, "SHARE": self.share, "SLOTS": slots, "BLOCK_N": self.block_n, "STAGES": 2}
        if self.form == "rows":
            own = {"CONTIGUOUS_SPLIT": self.contiguous_split, **({"AHEAD": True} if self.ahead else {})}
        elif self.form == "chunks":
            own = {"CHUNKS": self.column_blocks}
        return {
            "N": self.problem.width,
            **own,
            "BLOCK_G": self.block_g,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
        }

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        if self.device.kind == "cuda":
            own = row_options(self.block_n, self.warps)
            if self.problem.biased and self.problem.rounded_factors:
                # A product and a bias that are both bf16 would be fused, and the product not rounded before the sum.
                own["enable_fp_fusion"] = False
            if self.held:
                resident = min(self.per_core, _WARPS // self.warps)
                own["maxnreg"] = _REGISTERS // (resident * self.warps * _WARP) // 8 * 8
            if self.share:  # programs wait for one another: the driver refuses a launch that is not resident whole
                own["launch_cooperative_grid"] = True
            return own
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
        return persistent_grid(ceil(self.width / self.block_n), self.device, per_core=ALL_TILES)

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
