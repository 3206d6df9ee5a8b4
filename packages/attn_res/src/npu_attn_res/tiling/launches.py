"""What a launch is for, which kernel runs it, and what a tiling chooses for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import NamedTuple

from npu_tiling import Device, persistent_grid
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.launching.cuda import row_options


class Kind(str, Enum):  # noqa: UP042 (StrEnum is Python 3.11's)
    """What a launch computes, as warnings name it."""

    FORWARD = "forward"
    FORWARD_NORMALISED = "forward, normalised"
    PHASE1 = "phase 1"  # of one layer
    LAYERS = "forward of layers"
    BANK = "forward beside a prefix"
    BANK_BACKWARD = "backward beside a prefix"
    BACKWARD = "backward"
    BACKWARD_FP32 = "backward from fp32"  # dh in fp32, whatever the sources are
    PRODUCTS = "products"
    WEIGHTED_SUM = "weighted sum"
    GRADIENT = "gradient"
    MERGE = "merge"
    MERGE_BACKWARD = "merge backward"
    NORM_BACKWARD = "norm backward"
    ROW_BACKWARD = "backward of a row"
    BANK_ROW_BACKWARD = "backward of a row beside a prefix"


FORWARDS = (Kind.FORWARD, Kind.FORWARD_NORMALISED, Kind.BANK)
BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_FP32, Kind.BANK_BACKWARD)
ROW_BACKWARDS = (Kind.ROW_BACKWARD, Kind.BANK_ROW_BACKWARD)  # of statistics by token
BESIDE_PREFIX = (Kind.BANK, Kind.BANK_BACKWARD, Kind.BANK_ROW_BACKWARD)  # tensors of several dtypes
COLUMN_KINDS = (Kind.PRODUCTS, Kind.WEIGHTED_SUM, Kind.GRADIENT)  # the others take whole rows


class Kernel(NamedTuple):
    """Module and name of a kernel, and the `tl.constexpr` parameters that a tiling chooses, in the kernel's order."""

    module: str
    name: str
    constants: tuple[str, ...]


_ROWS = ("D", "BLOCK_M", "BLOCK_D")
_LAYERS = ("D", "S", "BLOCK_M", "BLOCK_S", "BLOCK_D")
_FORWARD = Kernel("ascend.forward", "attn_res_forward_kernel", _ROWS)
_FORWARD_PREFETCH = Kernel("ascend.prefetch", "attn_res_forward_prefetch_kernel", _ROWS)
_BACKWARD = Kernel("ascend.backward", "attn_res_backward_kernel", (*_ROWS, "PREFETCH"))
_ROW_BACKWARD = Kernel("ascend.backward_row", "attn_res_backward_row_kernel", ("D", "BLOCK_D", "HALVES"))
KERNELS = {
    Kind.FORWARD: _FORWARD,
    Kind.FORWARD_NORMALISED: _FORWARD,
    Kind.PHASE1: _FORWARD,
    Kind.BANK: _FORWARD,
    Kind.BANK_BACKWARD: _BACKWARD,
    Kind.LAYERS: Kernel("both.layers", "attn_res_layers_kernel", _LAYERS),
    Kind.BACKWARD: _BACKWARD,
    Kind.BACKWARD_FP32: _BACKWARD,
    Kind.PRODUCTS: Kernel("both.columns", "attn_res_products_kernel", _LAYERS),
    Kind.WEIGHTED_SUM: Kernel("both.columns", "attn_res_weighted_sum_kernel", _LAYERS),
    Kind.GRADIENT: Kernel("both.columns", "attn_res_gradient_kernel", _LAYERS),
    Kind.MERGE: Kernel("both.merge", "attn_res_merge_kernel", _ROWS),
    Kind.MERGE_BACKWARD: Kernel("both.merge", "attn_res_merge_backward_kernel", _ROWS),
    **dict.fromkeys(ROW_BACKWARDS, _ROW_BACKWARD),
    Kind.NORM_BACKWARD: Kernel("both.merge", "attn_res_norm_backward_kernel", _ROWS),
}
PREFETCH_KERNELS = KERNELS | dict.fromkeys((*FORWARDS, Kind.PHASE1), _FORWARD_PREFETCH)
_CHUNKS = ("D", "BLOCK_N", "BLOCK_D", "CHUNKS", "STAGES", "HELD")
_SOURCES = ("D", "BLOCK_N", "BLOCK_D", "STAGES", "HELD")
SOURCES_KERNELS = {  # a tile has several sources
    **dict.fromkeys(FORWARDS, Kernel("cuda.forward", "attn_res_forward_sources_kernel", _CHUNKS)),
    **dict.fromkeys(BACKWARDS, Kernel("cuda.backward", "attn_res_backward_sources_kernel", _SOURCES)),
}
_SHARED = ("D", "PER_TILE", "TILES", "BLOCK_N", "BLOCK_D", "VECTOR", "STAGES", "SHARE", "SLOTS")
SHARED_KERNEL = Kernel("cuda.cooperating", "attn_res_backward_shared_kernel", _SHARED)  # of BACKWARDS
TURNS = 2  # as in cuda/cooperating.py
_WARP, _REGISTERS = 32, 65536  # threads; registers of a core


@dataclass(frozen=True)
class Problem:
    """What a launch is for.

    Attributes:
        kind: what is computed.
        width: elements of a row.
        itemsize: bytes of an element of the sources.
        layers: how many layers' rows there are for one token.
        row_stride: the largest distance, in elements, between two rows of a tile in any tensor.
        n_sources: how many there are, rounded up a little; 0 where the tiling does not depend on it (Ascend).
    """

    kind: Kind
    width: int
    itemsize: int
    layers: int = 1
    row_stride: int = 0
    n_sources: int = 0


@dataclass(frozen=True)
class Launch:
    """One launch: its blocks and the compiler's options.

    Attributes:
        problem: what it was made for.
        device: the chip.
        block_m, block_s, block_d: tokens, layers and columns of a tile; block_m or block_s is 1.
        prefetch: the kernel itself asks for the next source while it computes with one (Ascend).
        double_buffered: the compiler is to let the next tile be loaded while one is computed with (Ascend).
        block_n: sources of a tile; 0: they are run through one by one (Ascend, and layers).
        warps: warps of a program (CUDA).
        stages: tiles under way in a loop (CUDA).
        per_core: programs resident on a core (CUDA).
        held: a tile has all sources of a token, which stay in registers (CUDA).
        chunks: pieces of block_d columns that a row of a tile comes in (CUDA).
        share: programs that share a token, and are all resident; 0: none do (CUDA).
        tiles: sets of sources, each of which some programs of a token have, block_d columns of it each.
    """

    problem: Problem
    device: Device = field(repr=False)
    block_m: int = 1
    block_s: int = 1
    block_d: int = 1
    prefetch: bool = False
    double_buffered: bool = True
    block_n: int = 0
    warps: int = 4
    stages: int = 1
    per_core: int = 1
    held: bool = False
    chunks: int = 1
    share: int = 0
    tiles: int = 1

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The kernel that runs it."""
        if self.share:
            return SHARED_KERNEL
        table = SOURCES_KERNELS if self.block_n else PREFETCH_KERNELS if self.prefetch else KERNELS
        return table[self.problem.kind]

    @functools.cached_property
    def whole_rows(self) -> bool:
        return self.block_d * self.chunks * max(1, self.share // self.tiles) >= self.problem.width

    @functools.cached_property
    def column_blocks(self) -> int:
        return ceil(self.problem.width / self.block_d)

    def grid(self, n_tokens: int) -> int:
        """Programs, for so many tokens."""
        if self.share:
            return self.groups(n_tokens) * self.share
        return persistent_grid(ceil(n_tokens / self.block_m) * self.column_blocks, self.device, per_core=self.per_core)

    def groups(self, n_tokens: int) -> int:
        """Tokens that are shared at once."""
        return max(1, min(n_tokens, self.device.vector_cores * self.per_core // self.share))

    def partials(self, n_tokens: int) -> int:
        """Partial sums of dg of a kernel for whole rows."""
        return self.groups(n_tokens) * self.tiles if self.share else self.grid(n_tokens)

    def words(self, n_tokens: int) -> int:
        """Numbers of 8 bytes through which programs that share a token exchange their parts."""
        beside = self.problem.kind in BESIDE_PREFIX
        return self.groups(n_tokens) * TURNS * self.share * (self.block_n + beside)

    def splits(self, n_tokens: int) -> int:
        """Partial sums of dg of a kernel whose programs keep to a block of columns: one per set of tokens."""
        programs = self.device.vector_cores * self.per_core
        return max(1, min(ceil(n_tokens / self.block_m), programs // self.column_blocks))

    @property
    def constants(self) -> dict[str, int]:
        problem = self.problem
        chosen = {
            "D": problem.width,
            "S": problem.layers,
            "BLOCK_N": self.block_n,
            "BLOCK_M": self.block_m,
            "BLOCK_S": self.block_s,
            "BLOCK_D": self.block_d,
            "STAGES": self.stages,
            "PREFETCH": self.prefetch,
            "HALVES": not self.double_buffered,
            "HELD": self.held,
            "CHUNKS": self.chunks,
            "SHARE": self.share,
            "SLOTS": power_of_two(max(1, self.share)),
            "TILES": self.tiles,
            "PER_TILE": ceil(self.problem.n_sources / self.tiles),
            "VECTOR": min(16 // self.problem.itemsize, max(1, self.block_d // (self.warps * _WARP))),
        }
        return {name: chosen[name] for name in self.kernel.constants}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        if self.device.kind != "cuda":
            return {"multibuffer": self.double_buffered}
        own = row_options(self.block_d, self.warps)
        if self.share or (self.held and self.problem.kind in BACKWARDS and self.per_core > 2):
            registers = _REGISTERS // (self.per_core * self.warps * _WARP) // 8 * 8
            own["maxnreg"] = min(255, registers)  # that leave room for as many programs
        if self.share:  # programs wait for one another: the driver refuses a launch that is not resident whole
            own["launch_cooperative_grid"] = True
        return own


@dataclass(frozen=True)
class TableLaunch:
    """The launch that fills a table of offsets: one program."""

    device: Device = field(repr=False)

    @property
    def constants(self) -> dict[str, int]:
        return {}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 1} if self.device.kind == "cuda" else {}


@dataclass(frozen=True)
class WeightsLaunch:
    """The launch that adds partial sums [n, width] over n: programs take columns.

    Attributes:
        width: elements of a row.
        device: the chip.
        block_m, block_d: rows and columns of a tile.
    """

    width: int
    device: Device = field(repr=False)
    block_m: int
    block_d: int

    @functools.cached_property
    def grid(self) -> int:
        return min(ceil(self.width / self.block_d), self.device.max_grid)

    @property
    def constants(self) -> dict[str, int]:
        return {"D": self.width, "BLOCK_M": self.block_m, "BLOCK_D": self.block_d}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4} if self.device.kind == "cuda" else {}
