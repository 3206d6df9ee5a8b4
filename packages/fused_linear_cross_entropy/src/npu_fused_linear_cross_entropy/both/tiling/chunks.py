"""Launches over chunks of logits: the shape that decides them, and the blocks that a chip's tiling chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import NamedTuple

from npu_tiling import Device

ROWS = 2  # of a tile of a part of a row on Ascend: fewer would not keep row reductions in the vector unit


class _Kernel(NamedTuple):
    function: str
    module: str
    computes_statistics: bool
    writes_in_place: bool  # over the logits


class ChunkKernel(Enum):
    """The kernels over chunks of logits."""

    STATISTICS = _Kernel("cross_entropy_statistics_kernel", "both.two_sweeps", True, False)
    GRADIENT = _Kernel("cross_entropy_gradient_kernel", "both.two_sweeps", False, True)
    BOTH = _Kernel("cross_entropy_kernel", "both.two_sweeps", True, True)
    KEEP = _Kernel("cross_entropy_keep_kernel", "both.keep", True, False)
    EXPONENTIALS = _Kernel("cross_entropy_exponentials_kernel", "both.one_sweep", True, True)
    DISTRIBUTIONS = _Kernel("distribution_statistics_kernel", "both.distributions", True, False)
    DISTRIBUTION_GRADIENT = _Kernel("distribution_gradient_kernel", "both.distributions", False, True)
    DISTILLATION = _Kernel("distillation_kernel", "both.distillation", True, True)


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
class ChunkLaunch:
    """One launch but for its number of rows: blocks and compiler options. Each chip has a class of its own.

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
        """The constants of every kernel over chunks."""
        return {"N": self.shape.width, "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "TAIL_N": self.tail_n}

    def flags(self, *, is_padded: bool, barrier: bool, tiles: int) -> dict[str, int | bool]:
        """The other constants that follow from the tiling.

        Args:
            is_padded: the logits' memory has whole tiles of rows.
            barrier: the threads of a program meet before one overwrites elements that another may have to read.
            tiles: the padded number of a row's tiles.
        """
        kernel = self.shape.kernel
        if kernel is ChunkKernel.EXPONENTIALS:
            return {"TILES": tiles, "PADDED": is_padded, "BARRIER": barrier}
        found: dict[str, int | bool] = {}
        if kernel in (ChunkKernel.STATISTICS, ChunkKernel.BOTH, ChunkKernel.DISTRIBUTIONS, ChunkKernel.DISTILLATION):
            found["PADDED"] = is_padded
        if kernel.value.writes_in_place:
            found["BARRIER"] = barrier and self.shape.written_itemsize < self.shape.itemsize
        return found

    @property
    def tiles(self) -> int:
        """Whole blocks of a row."""
        return max(1, self.shape.width // self.block_n)


def equal_units(columns: int, longest: int, unit: int) -> int:
    """The length of blocks of nearly one length."""
    return ceil(columns / ceil(columns / longest) / unit) * unit
