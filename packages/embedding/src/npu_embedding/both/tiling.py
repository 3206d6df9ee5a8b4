"""The records of both chips' tilings: ways to a gradient, and launches over numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import NamedTuple

from npu_tiling import Device, persistent_grid


class Way(Enum):
    """How the indices of one row of the table come together for its gradient."""

    SEARCHED = "every program looks through all indices"
    RANKED = "two kernels sort: groups of indices, then each in all groups"
    SORTED = "torch.sort sorts rows of the table"
    SORTED_AS_FP32 = "torch.sort sorts rows of the table, as fp32 numbers"

    def __str__(self) -> str:
        return self.value


class Rule(NamedTuple):
    """A row of the table of ways: what runs, for up to so many indices and rows of the table, why, and its file and line."""

    way: Way
    max_indices: float
    max_rows: float
    why: str
    decided_at: str


@dataclass(frozen=True, kw_only=True)
class IndexLaunch:
    """A launch over numbers: what it takes depends on the device alone.

    Attributes:
        device: the chip.
        blocks: the kernel's `tl.constexpr`, by name.
        per_program: how many numbers a program takes at a time.
        warps: warps of a program (CUDA).
        rule: why there is this launch.
    """

    device: Device = field(repr=False)
    blocks: tuple[tuple[str, int], ...]
    per_program: int
    warps: int = 4
    rule: Rule

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's `tl.constexpr` that follow from the tiling."""
        return dict(self.blocks)

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {"num_warps": self.warps} if self.device.kind == "cuda" else {}

    @property
    def way(self) -> Way:
        return self.rule.way

    @property
    def why(self) -> str:
        return self.rule.why

    @property
    def decided_at(self) -> str:
        return self.rule.decided_at

    def grid(self, count: int) -> int:
        """Programs for that many numbers; on CUDA as many as there are tiles."""
        tiles = ceil(count / self.per_program)
        return tiles if self.device.kind == "cuda" else persistent_grid(tiles, self.device)
