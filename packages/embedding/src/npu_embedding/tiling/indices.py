"""Blocks and grids of the launches that go over indices or offsets alone, which depend on nothing but the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from npu_tiling import Device, persistent_grid


@dataclass(frozen=True)
class IndexLaunch:
    """One launch over numbers.

    Attributes:
        device: the chip.
        blocks: name and value of the kernel's blocks; the first is how many numbers a program takes at a time.
    """

    device: Device = field(repr=False)
    blocks: tuple[tuple[str, int], ...]

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's `tl.constexpr` that follow from the tiling."""
        return dict(self.blocks)

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return {"num_warps": 4} if self.device.kind == "cuda" else {}

    def grid(self, count: int) -> int:
        """Programs for that many numbers; on CUDA as many as there are tiles."""
        tiles = ceil(count / self.blocks[0][1])
        return tiles if self.device.kind == "cuda" else persistent_grid(tiles, self.device)


def keys_launch(device: Device) -> IndexLaunch:
    """The launch that makes keys of indices (Ascend)."""
    return IndexLaunch(device, (("BLOCK_M", 256),))


def offsets_launch(device: Device) -> IndexLaunch:
    """The launch that finds where the indices of each row begin (Ascend)."""
    return IndexLaunch(device, (("BLOCK_R", 256), ("BLOCK_I", 32)))  # a search for each tile is little of the work


@dataclass(frozen=True)
class SortLaunch(IndexLaunch):
    """A launch of those that sort (CUDA): groups, then all.

    Attributes:
        group: indices of a group.
        block_m: indices that a program takes.
        warps: warps of a program.
    """

    group: int = 1024
    block_m: int = 32
    warps: int = 8

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps}

    def grid(self, count: int) -> int:
        """Programs for that many groups."""
        return count * self.group // self.block_m


def sort_launch(device: Device) -> SortLaunch:
    """The launch that sorts groups of indices (CUDA)."""
    blocks = (("GROUP", SortLaunch.group), ("BLOCK_M", SortLaunch.block_m), ("BLOCK_Z", 4096))
    return SortLaunch(device, blocks, warps=8)


def rank_launch(device: Device) -> SortLaunch:
    """The launch that looks up the keys of each sorted group in the others (CUDA)."""
    steps = SortLaunch.group.bit_length() - 1
    blocks = (("GROUP", SortLaunch.group), ("STEPS", steps), ("BLOCK_M", SortLaunch.block_m), ("BLOCK_G", 16))
    return SortLaunch(device, blocks, warps=4)


def mark_launch(device: Device) -> IndexLaunch:
    """The launch that marks rows (CUDA)."""
    return IndexLaunch(device, (("BLOCK_M", 512),))
