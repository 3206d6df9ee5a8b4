"""Unified Buffer budgeting: from the tiles that a kernel keeps alive to the largest blocks that fit together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

from ..chips.devices import Device
from ..errors import GPUResourcesError, TileTooLargeError, UnifiedBufferError

ChoiceT = TypeVar("ChoiceT")


@dataclass(frozen=True)
class Tile:
    """One on-chip buffer of a kernel.

    Attributes:
        name: what it holds; error messages show it.
        shape: the tile's dimensions, each a number or the name of a block, e.g. ("BLOCK_M", "BLOCK_N").
        itemsize: bytes of one element.
        buffers: how many copies the compiler keeps: 2 where a tile inside a loop is the local side of a global-memory
            load or store (double buffering), 1 for one that is loaded once per launch or never leaves the chip.
    """

    name: str
    shape: tuple[str | int, ...]
    itemsize: int
    buffers: int = 1

    def nbytes(self, blocks: Mapping[str, int], align: int) -> int:
        """Bytes that the tile takes with these block sizes: the last dimension is padded to `align` bytes."""
        *outer, last = (blocks[n] if isinstance(n, str) else n for n in self.shape)
        row = -(-last * self.itemsize // align) * align
        return prod(outer) * row * self.buffers


@dataclass(frozen=True)
class Block:
    """A block size that tiling may choose.

    Attributes:
        name: the symbol that `Tile.shape` uses.
        largest: the size wanted if it fits.
        smallest: the size below which the kernel makes no sense.
        multiple_of: the size is a multiple of this, except that `largest` and `smallest` themselves are allowed.
    """

    name: str
    largest: int
    smallest: int = 1
    multiple_of: int = 1

    def sizes(self) -> list[int]:
        """Every allowed size, ascending."""
        first = -(-self.smallest // self.multiple_of) * self.multiple_of
        sizes = {min(self.smallest, self.largest), *range(first, self.largest + 1, self.multiple_of), self.largest}
        return sorted(sizes)


def footprint(tiles: Sequence[Tile], blocks: Mapping[str, int], device: Device) -> int:
    """Bytes of Unified Buffer that all tiles take together with these block sizes."""
    return sum(tile.nbytes(blocks, device.ub_align) for tile in tiles)


def fit(tiles: Sequence[Tile], blocks: Sequence[Block], device: Device) -> dict[str, int]:
    """The largest block sizes whose joint footprint fits the device's Unified Buffer.

    The first block of the list shrinks first, and only as far as needed; the next one shrinks only when the first is at its
    smallest, and so on.

    Args:
        tiles: everything that is alive at once, over the whole launch.
        blocks: what may shrink, in order of preference.
        device: whose Unified Buffer has to hold it.

    Returns:
        The size of every block by name.

    Raises:
        UnifiedBufferError: not even the smallest sizes fit; on CUDA, whose programs have shared memory, `GPUResourcesError`.
    """
    chosen = {block.name: block.largest for block in blocks}
    for block in blocks:
        if footprint(tiles, chosen, device) <= device.ub_bytes:
            return chosen

        def taken(size: int, name: str = block.name) -> int:
            return footprint(tiles, {**chosen, name: size}, device)

        sizes = block.sizes()
        fitting = bisect_right(sizes, device.ub_bytes, key=taken)  # a larger block never takes less
        chosen[block.name] = sizes[max(0, fitting - 1)]
    used = footprint(tiles, chosen, device)
    if used <= device.ub_bytes:
        return chosen
    parts = ", ".join(f"{tile.name} {tile.nbytes(chosen, device.ub_align)}" for tile in tiles)
    kind, memory = (GPUResourcesError, "shared memory") if device.kind == "cuda" else (UnifiedBufferError, "Unified Buffer")
    raise kind(
        f"The smallest tile ({', '.join(f'{name}={size}' for name, size in chosen.items())}) needs {used} bytes of {memory} "
        f"and {device.name} has {device.ub_bytes}: {parts}.",
        used,
    )


@dataclass(frozen=True)
class Way(Generic[ChoiceT]):
    """One way to run a kernel.

    Attributes:
        choice: what tells it from the other ways, for the caller.
        tiles: what it keeps on chip.
        blocks: what may shrink, as `fit` takes them; none where all sizes are given.
    """

    choice: ChoiceT
    tiles: Sequence[Tile]
    blocks: Sequence[Block] = ()


def first_fit(ways: Iterable[Way[ChoiceT]], device: Device) -> tuple[ChoiceT, dict[str, int]]:
    """The first of several ways, the best one first, that fits the device's Unified Buffer, and its block sizes.

    Raises:
        TileTooLargeError: none fits; the error is that of the last way.
    """
    error = TileTooLargeError("There is no way to run this kernel.")
    for way in ways:
        try:
            return way.choice, fit(way.tiles, way.blocks, device)
        except TileTooLargeError as refused:
            error = refused
    raise error
