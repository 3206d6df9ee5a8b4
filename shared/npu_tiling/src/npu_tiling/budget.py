"""What fits: tiles and programs for the memory and the cores of a chip, and the places of the rules that decide it."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

from .chips import Device

FP32 = 4  # bytes of one number
INT32_END = 2**31  # one past the largest: offsets inside a tile are 32-bit


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def round_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least n."""
    return -(-n // unit) * unit


def equal_blocks(length: int, largest: int, unit: int) -> int:
    """The size of the fewest blocks of at most `largest` that cover `length`, so that the last one is not a short one."""
    return round_up(-(-length // -(-length // largest)), unit)


ALL_TILES = 2**16
"""`per_core` of a grid that is not persistent: one program for every tile."""


def persistent_grid(tiles: int, device: Device, *, per_core: int = 1) -> int:
    """Number of programs of a persistent 1-D grid: one per vector core, or one per tile where there are fewer tiles.

    Args:
        tiles: how many tiles the launch has; each program strides over them.
        device: the chip that the launch is for.
        per_core: programs resident on one core at once; more than 1 hides latency on CUDA and is of no use on Ascend.
    """
    return max(1, min(tiles, device.vector_cores * per_core, device.max_grid))


class TileTooLargeError(ValueError):
    """Not even the smallest tile fits the chip; the message says what exceeds what.

    Attributes:
        needed: bytes that the smallest tile takes; 0: not known.
    """

    def __init__(self, message: str = "", needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed


class UnifiedBufferError(TileTooLargeError):
    """Ascend: the smallest tile needs more Unified Buffer than a vector core has."""


class GPUResourcesError(TileTooLargeError):
    """CUDA: the smallest tile needs more shared memory, registers or resident programs than the GPU has."""


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
        multiple_of: the size is a multiple of this, or `largest` or `smallest` itself: a whole row may be no multiple.
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
class Candidate(Generic[ChoiceT]):
    """One of several tilings that a table offers for a launch, for `first_fit`.

    Attributes:
        choice: what tells it from the others, for the caller.
        tiles: what it keeps on chip.
        blocks: what may shrink, as `fit` takes them; none where all sizes are given.
    """

    choice: ChoiceT
    tiles: Sequence[Tile]
    blocks: Sequence[Block] = ()


def first_fit(candidates: Iterable[Candidate[ChoiceT]], device: Device) -> tuple[ChoiceT, dict[str, int]]:
    """The first of several candidates, the best one first, that fits the device's Unified Buffer, and its block sizes.

    Raises:
        TileTooLargeError: none fits; the error is that of the last one.
    """
    error = TileTooLargeError("There is no tiling for this kernel.")
    for candidate in candidates:
        try:
            return candidate.choice, fit(candidate.tiles, candidate.blocks, device)
        except TileTooLargeError as refused:
            error = refused
    raise error


def passed_over(candidates: Iterable[Candidate[ChoiceT]], choice: ChoiceT, device: Device) -> tuple[ChoiceT, int] | None:
    """The candidate before the one that `first_fit` chose, and the bytes that its smallest tile needs; None if none is."""
    found = None
    for candidate in candidates:
        if candidate.choice == choice:
            break
        least = {block.name: block.sizes()[0] for block in candidate.blocks}
        found = candidate.choice, footprint(candidate.tiles, least, device)
    return found


WARP = 32  # threads
CORE_WARPS = 64  # resident on one core (streaming multiprocessor) at most
CORE_REGISTERS = 65536  # 32-bit registers of one core
MAX_REGISTERS = 255  # of one thread
_REGISTER_UNIT = 8  # a thread's registers are allocated in multiples of this
_HALVINGS = 3  # of the padded row, to find chunks


def row_options(columns: int, warps: int) -> dict[str, int]:
    """Options for a kernel whose tiles have `columns` columns, a power of two, and which sums products along them.

    Where each thread has one element of a row, Triton sums a row by exchanges between threads alone, and fuses a thread's
    own product with the first addition: threads round differently, each has another sum of the row, and all store it.
    """
    fused = columns > WARP
    return {"num_warps": warps} if fused else {"num_warps": warps, "enable_fp_fusion": False}


def register_cap(warps: int, per_core: int) -> int:
    """The most registers a thread may have (`maxnreg`) so that `per_core` programs of `warps` warps are resident on a core.

    At least one thread's share of a core that is full of warps: a core holds no more programs than its 64 warps make.
    """
    resident = min(per_core, CORE_WARPS // warps)
    return min(MAX_REGISTERS, CORE_REGISTERS // (resident * warps * WARP) // _REGISTER_UNIT * _REGISTER_UNIT)


def equal_chunks(width: int, *, least: int) -> tuple[int, int]:
    """Columns of the equal chunks that a row is split in, and their number: least padding first, then the fewest chunks.

    There are at most eight.

    Args:
        width: columns of the row.
        least: columns of the smallest chunk. Chunks are powers of two.
    """
    padded_row = power_of_two(width)
    sizes = [padded_row >> halvings for halvings in range(_HALVINGS + 1)]
    sizes = [size for size in sizes if size >= least] or [padded_row]
    padded, _, chunk = min((ceil(width / size) * size, -size, size) for size in sizes)
    return chunk, padded // chunk


def place_of(frame: FrameType) -> str:
    """File and line of a frame, the file from its package's folder on: "npu_rms_norm/cuda.py:71"."""
    return place_in(frame.f_code.co_filename, frame.f_globals.get("__name__", ""), frame.f_lineno)


def place_in(file: str, module: str, line: int) -> str:
    """The same of a line of a module's file."""
    path = Path(file)
    folders = module.count(".") + (path.name == "__init__.py")
    return f"{'/'.join(path.parts[-folders - 1 :])}:{line}"


def here(depth: int = 1) -> str:
    """The place of the caller, or of the caller's caller (2): a rule, or a row of a table, that decides a launch."""
    return place_of(sys._getframe(depth))
