"""The records of both chips' tilings: ways to a gradient, and launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import NamedTuple

from npu_tiling import Device, persistent_grid

MIN_CHUNK = 8  # sorted positions: a shorter chunk costs more in partial sums than it spreads work


class Way(Enum):
    """How the indices of one row of the table come together for its gradient. torch.sort sorts row numbers."""

    SEARCHED = "one kernel sums, each program of which looks through all indices"
    RANKED = "two kernels sort: groups of indices, then each index in the other groups"
    MERGED = "two kernels sort: runs of indices, then four sorted runs to one until one is left"
    SORTED = "torch.sort sorts rows of the table"

    def __str__(self) -> str:
        return self.value


class Rule(NamedTuple):
    """A row of the table of ways: what runs, why, and its file and line.

    Attributes:
        way: what runs.
        max_indices: how many there may be.
        max_elements: of dy, [indices, width].
        max_rows: of the table.
        why: the reason.
        decided_at: file and line.
    """

    way: Way
    max_indices: float
    max_elements: float
    max_rows: float
    why: str
    decided_at: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch. No number of indices or rows changes it.

    Attributes:
        device: the chip.
        blocks: the kernel's `tl.constexpr` that follow from the tiling, by name.
        per_program: how many rows or numbers a program takes at a time, of one block of columns.
        column_blocks: how many blocks of columns a row has.
        warps: warps of a program (CUDA).
        way: the way to a gradient that it belongs to; empty: to none, or to several.
        why: the reason for the tile, or for the way.
        decided_at: file and line.
    """

    device: Device = field(repr=False)
    blocks: tuple[tuple[str, int], ...]
    per_program: int = 1
    column_blocks: int = 1
    warps: int = 4
    way: Way | str = ""
    why: str
    decided_at: str

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's `tl.constexpr` that follow from the tiling."""
        return dict(self.blocks)

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {"num_warps": self.warps} if self.device.kind == "cuda" else {}

    def grid(self, count: int) -> int:
        """Programs for so many rows or numbers; on CUDA one for each tile."""
        tiles = ceil(count / self.per_program) * self.column_blocks
        return min(tiles, self.device.max_grid) if self.device.kind == "cuda" else persistent_grid(tiles, self.device)


def way_launch(rule: Rule, device: Device, blocks: dict[str, int], per_program: int, warps: int = 4) -> Launch:
    """A launch over numbers, which belongs to one way."""
    return Launch(
        device=device,
        blocks=tuple(blocks.items()),
        per_program=per_program,
        warps=warps,
        way=rule.way,
        why=rule.why,
        decided_at=rule.decided_at,
    )
