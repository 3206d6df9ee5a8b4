"""What a launch is for, and what a tiling chooses for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from npu_tiling import Device, persistent_grid
from npu_tiling.launching.cuda import row_options

COLUMN_KERNELS = ("products", "weighted sum", "gradient")  # the others take whole rows


@dataclass(frozen=True)
class Problem:
    """What a launch is for.

    Attributes:
        kernel: which one, as the table of footprint.py names them.
        width: elements of a row.
        itemsize: bytes of an element of the blocks.
        layers: how many layers' rows there are for one token.
        row_stride: the largest distance, in elements, between two rows of a tile in any tensor.
        n_blocks: how many there are, rounded up to a power of two; 0 where the tiling does not depend on it (Ascend).
        listed: they are tensors of their own; False where the tiling does not depend on it.
    """

    kernel: str
    width: int
    itemsize: int
    layers: int = 1
    row_stride: int = 0
    n_blocks: int = 0
    listed: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch: its blocks and the compiler's options.

    Attributes:
        problem: what it was made for.
        device: the chip.
        block_m, block_s, block_d: tokens, layers and columns of a tile; block_m or block_s is 1.
        prefetch: the kernel itself asks for the next block while it computes with one (Ascend).
        double_buffered: the compiler is to let the next tile be loaded while one is computed with (Ascend).
        block_n: blocks of a tile; 0: they are run through one by one (Ascend, and layers).
        warps: warps of a program (CUDA).
        stages: tiles under way in a loop (CUDA).
        per_core: programs resident on a core (CUDA).
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

    @property
    def forward_kernel(self) -> tuple[str, str]:
        """Module and name of the forward's kernel that it is for."""
        if self.prefetch:
            return "kernels.forward_prefetch", "attn_res_forward_prefetch_kernel"
        return "kernels.forward", "attn_res_forward_kernel"

    @property
    def whole_rows(self) -> bool:
        return self.block_d >= self.problem.width

    @property
    def column_blocks(self) -> int:
        return ceil(self.problem.width / self.block_d)

    def grid(self, n_tokens: int) -> int:
        """Programs, for so many tokens."""
        return persistent_grid(ceil(n_tokens / self.block_m) * self.column_blocks, self.device, per_core=self.per_core)

    def splits(self, n_tokens: int) -> int:
        """Partial sums of dg of a kernel whose programs keep to a block of columns: one per set of tokens."""
        programs = self.device.vector_cores * self.per_core
        return max(1, min(ceil(n_tokens / self.block_m), programs // self.column_blocks))

    @property
    def constants(self) -> dict[str, int]:
        if self.block_n:
            constants = {"D": self.problem.width, "BLOCK_N": self.block_n, "BLOCK_D": self.block_d, "STAGES": self.stages}
            held = {"SINGLE_PASS": self.problem.n_blocks <= self.block_n}
            return constants | held if self.problem.kernel.startswith("backward") else constants
        constants = {"D": self.problem.width, "BLOCK_M": self.block_m, "BLOCK_D": self.block_d}
        if self.problem.kernel.startswith("backward"):
            return {**constants, "PREFETCH": self.prefetch}
        if self.prefetch or "merge" in self.problem.kernel or self.problem.kernel == "norm backward":
            return constants
        return {**constants, "S": self.problem.layers, "BLOCK_S": self.block_s}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        if self.device.kind == "cuda":
            return row_options(self.block_d, self.warps)
        return {"multibuffer": self.double_buffered}


@dataclass(frozen=True)
class TableLaunch:
    """The launch that fills a table of offsets: one program.

    Attributes:
        device: the chip.
    """

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

    @property
    def grid(self) -> int:
        return min(ceil(self.width / self.block_d), self.device.max_grid)

    @property
    def constants(self) -> dict[str, int]:
        return {"D": self.width, "BLOCK_M": self.block_m, "BLOCK_D": self.block_d}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4} if self.device.kind == "cuda" else {}
