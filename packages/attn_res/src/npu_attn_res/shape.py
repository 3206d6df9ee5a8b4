"""What a launch depends on, `Shape`, and what tilings of both chips have: sizes and options, no tensor."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil
from typing import Any

from npu_tiling import Device, persistent_grid
from npu_tiling.launch import Tiling


class Task(str, Enum):  # noqa: UP042 (StrEnum is Python 3.11's)
    """What a launch computes."""

    FORWARD = "forward"
    LAYERS = "forward of layers"  # on CUDA
    BACKWARD = "backward"
    MERGE = "merge"
    MERGE_BACKWARD = "merge backward"
    NORM_BACKWARD = "norm backward"
    PRODUCTS = "products"
    WEIGHTED_SUM = "weighted sum"
    GRADIENT = "gradient"


COLUMN_TASKS = (Task.PRODUCTS, Task.WEIGHTED_SUM, Task.GRADIENT)  # their programs take blocks of columns, the others' rows


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One launch.

    Attributes:
        task: what is computed.
        width: elements of a row.
        itemsize: bytes of an element: of the tensor with the widest elements that a tile has rows of.
        layers: rows of one token that are computed at once.
        row_stride: the largest distance, in elements, from one row to the next in the tensors that are given.
        n_sources: see `rounded_up_sources` in sources.py; 0 where the tiling does not depend on it.
        prefix: whether a prefix is one more source, of any dtype.
        normalised: forward: whether the RMSNorm of h is stored too.
        fp32_dh: backward: whether the gradient of h is fp32, whatever the sources are; tilings for CUDA depend on it.
        by_token: whether statistics are [tokens, sources] instead of [sources, tokens].
        aligned: on CUDA, whether every entry of a table is a multiple of 16; True too where tensors are arguments.
    """

    task: Task
    width: int
    itemsize: int
    layers: int = 1
    row_stride: int = 0
    n_sources: int = 0
    prefix: bool = False
    normalised: bool = False
    fp32_dh: bool = False
    by_token: bool = False
    aligned: bool = False

    @property
    def takes_columns(self) -> bool:
        return self.task in COLUMN_TASKS

    def __str__(self) -> str:
        """The name that warnings have for it."""
        return f"attn_res {self.task.value}{', with a prefix' if self.prefix else ''}"


@dataclass(frozen=True, kw_only=True, repr=False)
class TokenTiling(Tiling):
    """How a launch is tiled.

    Attributes:
        shape: what it was made for.
        device: the chip.
        way: which of the chip's ways.
        block_m, block_s, block_d: tokens, layers and columns of a tile; block_m or block_s is 1.
        why: why this way.
        decided_at: file and line of the rule, or of the table's row.
    """

    shape: Shape
    device: Device
    way: Enum
    block_m: int = 1
    block_s: int = 1
    block_d: int = 1
    why: str = field(default="", compare=False)
    decided_at: str = field(default="", compare=False)

    def __repr__(self) -> str:
        """As warnings name it."""
        return f"kernel={self.kernel}, way={self.way}, tile={self.block_m} x {self.block_s} x {self.block_d}"

    @functools.cached_property
    def kernel(self) -> str:
        """The name of the kernel that runs it."""
        return f"attn_res_{self.shape.task.value.replace(' ', '_')}_kernel"

    @property
    def sizes(self) -> dict[str, Any]:
        """`tl.constexpr` parameters that kernels of this chip alone have."""
        return {}

    @property
    def constants(self) -> dict[str, Any]:
        """`tl.constexpr` parameters of all kernels of this chip."""
        shape = self.shape
        blocks = {"BLOCK_M": self.block_m, "BLOCK_S": self.block_s, "BLOCK_D": self.block_d}
        return {"D": shape.width, "S": shape.layers, **blocks, "ALIGNED": shape.aligned, **self.sizes}

    def smaller(self) -> TokenTiling | None:
        """See `Tiling`. The last one of a kernel for whole rows has fewer columns than a row: others are to take columns."""
        found = self._smaller()
        return None if found is None else replace(found, why="the compiler refused a larger tile")

    def _smaller(self) -> TokenTiling | None:
        """The next smaller tiling of this chip."""
        raise NotImplementedError

    @property
    def programs_per_core(self) -> int:
        return 1

    @property
    def row_columns(self) -> int:
        """Columns of a row that the programs of a tile have."""
        return self.block_d

    @functools.cached_property
    def has_whole_rows(self) -> bool:
        return self.row_columns >= self.shape.width

    @functools.cached_property
    def column_blocks(self) -> int:
        return ceil(self.shape.width / self.row_columns)

    def grid(self, n_tokens: int) -> int:
        """Programs, for so many tokens."""
        return max(1, min(ceil(n_tokens / self.block_m) * self.column_blocks, self._most_programs))

    @functools.cached_property
    def _most_programs(self) -> int:  # of however many tiles
        return persistent_grid(self.device.max_grid, self.device, per_core=self.programs_per_core)

    def partials(self, n_tokens: int) -> int:
        """Partial sums of dg of a kernel for whole rows."""
        return self.grid(n_tokens)

    def splits(self, n_tokens: int) -> int:
        """Partial sums of dg of a kernel whose programs keep to a block of columns: one for each set of tokens."""
        programs = self.device.vector_cores * self.programs_per_core
        return max(1, min(ceil(n_tokens / self.block_m), programs // self.column_blocks))
