"""The tile of a launch on CUDA: a kernel, its sizes, and how many programs run it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import ceil
from typing import Any

from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.launching.cuda import WARP, register_cap, row_options

from ...both.tiling import KERNEL_OF_TASK, LAYER_CONSTANTS, Kernel, Tiling
from ...shape import Shape, Task
from .ways import Way

TURNS = 2  # as in cuda/cooperating.py
SCRATCH_BYTES = 1024  # of shared memory, that reductions over warps take at most
_COOPERATING_SCRATCH_BYTES = 8192  # the same where programs share a token: six sums, and numbers of the next token

_FORWARD = Kernel(
    "cuda.forward",
    "attn_res_forward_sources_kernel",
    ("D", "BLOCK_N", "BLOCK_D", "CHUNKS", "STAGES", "ALIGNED"),
)
_BACKWARD = Kernel(
    "cuda.backward",
    "attn_res_backward_sources_kernel",
    ("D", "BLOCK_N", "BLOCK_D", "STAGES", "HELD", "ALIGNED"),
)
_LAYERS = Kernel("cuda.layers", "attn_res_layers_kernel", LAYER_CONSTANTS)
_COOPERATING = Kernel(
    "cuda.cooperating",
    "attn_res_backward_shared_kernel",
    ("D", "PER_TILE", "TILES", "BLOCK_N", "BLOCK_D", "VECTOR", "STAGES", "SHARE", "SLOTS", "ALIGNED"),
)


@dataclass(frozen=True, kw_only=True, repr=False)
class CudaTiling(Tiling):
    """The tile of a launch on CUDA.

    Attributes:
        warps: of a program.
        stages: tiles under way in a loop.
        per_core: programs resident on a multiprocessor.
        block_n: sources of a tile; 0: a kernel has one source at a time.
        chunks: pieces of block_d columns that a row of a tile comes in.
        cooperating: programs that share a token; 0: none do.
        tiles: sets of sources; some of the programs that share a token have one set, block_d columns of it each.
    """

    way: Way
    warps: int = 4
    stages: int = 1
    per_core: int = 1
    block_n: int = 0
    chunks: int = 1
    cooperating: int = 0
    tiles: int = 1

    @functools.cached_property
    def kernel(self) -> Kernel:
        if self.way is Way.COOPERATING:
            return _COOPERATING
        kernels = {**KERNEL_OF_TASK, Task.FORWARD: _FORWARD, Task.BACKWARD: _BACKWARD, Task.LAYERS: _LAYERS}
        return kernels[self.shape.task]

    @property
    def sizes(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "BLOCK_N": self.block_n,
            "CHUNKS": self.chunks,
            "STAGES": self.stages,
            "HELD": self.way is Way.IN_REGISTERS,
            "SHARE": self.cooperating,
            "SLOTS": power_of_two(max(1, self.cooperating)),
            "TILES": self.tiles,
            "PER_TILE": ceil(shape.n_sources / self.tiles),
            "VECTOR": min(16 // shape.itemsize, max(1, self.block_d // (self.warps * WARP))),
        }

    @property
    def options(self) -> dict[str, int]:
        options = row_options(self.block_d, self.warps)
        if self.cooperating or (self.way is Way.IN_REGISTERS and self.per_core > 2):
            options["maxnreg"] = register_cap(self.warps, self.per_core)
        return options

    @property
    def programs_per_core(self) -> int:
        return self.per_core

    @property
    def row_columns(self) -> int:
        return self.block_d * self.chunks * max(1, self.cooperating // self.tiles)

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Shared memory that a program takes: the tiles that its loop has under way, but for the one in use."""
        rows, shape = self.block_n, self.shape
        if self.way in (Way.IN_REGISTERS, Way.COOPERATING):  # a loop over tokens: other rows than the sources' are under way
            rows += _other_rows(shape)
        row_bytes = self.block_d * self.chunks * shape.itemsize
        return (self.stages - 1) * rows * row_bytes + (_COOPERATING_SCRATCH_BYTES if self.cooperating else SCRATCH_BYTES)

    def grid(self, n_tokens: int) -> int:
        return self.groups(n_tokens) * self.cooperating if self.cooperating else super().grid(n_tokens)

    def groups(self, n_tokens: int) -> int:
        """Tokens that are shared at once."""
        return max(1, min(n_tokens, self.device.vector_cores * self.per_core // self.cooperating))

    def partials(self, n_tokens: int) -> int:
        return self.groups(n_tokens) * self.tiles if self.cooperating else self.grid(n_tokens)

    def words(self, n_tokens: int) -> int:
        """Words of 8 bytes, through which programs that share a token exchange their parts."""
        return self.groups(n_tokens) * TURNS * self.cooperating * (self.block_n + self.shape.prefix)


def _other_rows(shape: Shape) -> int:
    """Rows of a token beside its sources that a program of a backward loads: dh, or a prefix, its gradient and dh."""
    if shape.prefix:
        return 3
    return 2 if shape.fp32_dh else 1
