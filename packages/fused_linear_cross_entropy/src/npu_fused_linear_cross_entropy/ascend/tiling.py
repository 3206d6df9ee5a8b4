"""Blocks of chunks of logits on Ascend: as large as the Unified Buffer allows, of a length that leaves the shortest tail."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import ceil

from npu_tiling import Block, Device, Tile, Way, first_fit, footprint, persistent_grid
from npu_tiling.budget.arithmetic import FP32
from npu_tiling.places import here

from ..both.tiling.chunks import ROWS, ChunkKernel, ChunkLaunch, ChunkShape

# Bytes that one transfer should have: 8 KB reach 76 % of the bandwidth, 16 KB 94 %, and more leaves no room for the rest.
_TRANSFER_BYTES = 16 * 1024
_MAX_ROWS = 64
_UNIT = 16  # columns that make up one aligned piece of a row, of logits and of gradients
_MIN_SHARE = 0.75  # of the longest block: a block may be this short where it leaves a shorter tail
_MIN_SHARE_EXACT = 0.5  # and this short where it leaves none, of a row of few blocks
_FEW_BLOCKS = 8
_NUMBERS = 8  # fp32 numbers of 32 bytes, which the numbers of a row's tiles are padded to
# Unified Buffer, for an element of a tile, that a kernel of statistics and gradient needs for its loads to overlap
# arithmetic. Below that it still compiles, but CANN 9.0 and later put temporaries where the next block is being loaded.
_OVERLAPPING_BYTES = {ChunkKernel.BOTH: 53, ChunkKernel.KEEP: 53, ChunkKernel.EXPONENTIALS: 28}
_ROW_VALUES = 6  # padded to 32 bytes each
_WEIGHT_TILES = 3  # fp32: weights of columns, of those before, and what one of them is multiplied by
_ROW_TILES = 7  # fp32, of a tile that is a whole row
_DISTILLATION_TILES = 14  # fp32, of whole rows of a student's logits and a teacher's
_DISTILLATION_SUMS = 3  # more of them where running sums are kept from tile to tile
# More of them: CANN 8.5 sets flags twice where the tiles fill the Unified Buffer, compiler fault 6.
_DISTILLATION_ROOM = 4
_EXPONENTIAL_TILES = {"dav-c220": 3, "dav-c310": 4}  # fp32, of a tile of exponentials
_REFERENCES = 3  # fp32, of each tile of a row
_SHORT_BLOCK = 1024  # columns of a block of exponentials; shorter ones leave room enough


@dataclass(frozen=True, kw_only=True)
class AscendLaunch(ChunkLaunch):
    """A launch on the vector cores of an Ascend chip."""

    def grid(self, rows: int) -> int:
        return persistent_grid(ceil(rows / self.block_m), self.device)

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return footprint(tiles(self.shape, self.device, self.tail_n, streams=self.streams), blocks, self.device)

    @property
    def constants(self) -> dict[str, int | bool]:
        padded = ceil(self.tiles / _NUMBERS) * _NUMBERS
        return {**self.blocks, **self.flags(is_padded=self.block_m <= ROWS, barrier=False, tiles=padded)}

    @property
    def options(self) -> dict[str, int]:
        return {}


def chunk_launch(shape: ChunkShape, device: Device) -> AscendLaunch:
    """Blocks for a chunk of logits. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    # Whole rows, as many as make one good transfer, where two fit.
    wanted = min(_MAX_ROWS, max(ROWS, _TRANSFER_BYTES // (shape.width * shape.itemsize)))
    whole_rows = Way(False, tiles(shape, device, shape.width, streams=False), (Block("BLOCK_M", wanted, ROWS),))
    largest = min(shape.width, _TRANSFER_BYTES // shape.itemsize)
    if shape.kernel in _OVERLAPPING_BYTES:
        largest = min(largest, device.ub_bytes // (ROWS * _OVERLAPPING_BYTES[shape.kernel]))
    largest = largest // _UNIT * _UNIT
    columns = Block("BLOCK_N", largest, _UNIT, _UNIT), Block("BLOCK_M", ROWS, ROWS)
    streams, blocks = first_fit([whole_rows, Way(True, tiles(shape, device, 0, streams=True), columns)], device)
    if streams:
        return _streaming(shape, device, blocks["BLOCK_N"])
    return AscendLaunch(
        shape=shape,
        device=device,
        block_m=blocks["BLOCK_M"],
        block_n=shape.width + _UNIT,
        tail_n=shape.width,
        decided_at=here(),
    )


def smaller(launch: AscendLaunch) -> AscendLaunch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if launch.streams:
        block = launch.block_n // 2 // _UNIT * _UNIT
    elif launch.block_m > ROWS:
        return dataclasses.replace(launch, block_m=max(ROWS, launch.block_m // 2))
    else:
        block = launch.shape.width // 2 // _UNIT * _UNIT
    return _streaming(launch.shape, launch.device, block) if block else None


def _streaming(shape: ChunkShape, device: Device, largest: int) -> AscendLaunch:
    """Blocks of at most `largest` columns, and not much less, of a length that leaves no tail or the shortest one."""

    def launch(columns: int) -> AscendLaunch:
        tail = shape.width % columns
        return AscendLaunch(shape=shape, device=device, block_m=ROWS, block_n=columns, tail_n=tail, decided_at=here())

    shortest = int(largest * _MIN_SHARE_EXACT) if shape.width < _FEW_BLOCKS * largest else largest
    for columns in range(largest, shortest, -_UNIT):
        if shape.width % columns == 0 and launch(columns).ub_bytes <= device.ub_bytes:
            return launch(columns)
    while True:
        shortest = max(_UNIT, int(largest * _MIN_SHARE) // _UNIT * _UNIT)
        lengths = range(shortest, largest + 1, _UNIT)
        for columns in sorted(lengths, key=lambda columns: (shape.width % columns, -columns)):
            if launch(columns).ub_bytes <= device.ub_bytes or columns == _UNIT:
                return launch(columns)
        largest = shortest


def tiles(shape: ChunkShape, device: Device, tail: int, *, streams: bool) -> list[Tile]:
    """The tiles that a kernel keeps on chip at once, as the compiler of CANN 8.5 and 9.0 plans them on a 910B.

    A value that a loop carries takes two buffers. The statistics of single rows are small, but every one is padded.
    """
    found = [Tile("statistics of rows", ("BLOCK_M", 1), FP32, _ROW_VALUES)]
    if shape.kernel is ChunkKernel.EXPONENTIALS:
        exponentials = _EXPONENTIAL_TILES[device.arch] + shape.transformed
        if not streams:
            found.append(Tile("statistics of the rows before", ("BLOCK_M", 1), FP32, _ROW_VALUES))
        if tail:
            found.append(Tile("tail of a row", ("BLOCK_M", tail), FP32, exponentials))
        if streams:
            references = ceil(shape.width / _SHORT_BLOCK)
            found.append(Tile("references of tiles", ("BLOCK_M", references), FP32, _REFERENCES))
            block = ("BLOCK_M", "BLOCK_N")
            found.append(Tile("exponentials", block, FP32, exponentials))
        return found
    if shape.kernel is ChunkKernel.DISTILLATION:
        arithmetic = _DISTILLATION_TILES + 2 * shape.transformed
        if streams:
            arithmetic += _DISTILLATION_SUMS + _DISTILLATION_ROOM
        length: str | int = "BLOCK_N" if streams else tail
        found.append(Tile("numbers of rows", ("BLOCK_M", 1), FP32, 2 * _ROW_VALUES))
        return [*found, Tile("arithmetic on both rows", ("BLOCK_M", length), FP32, arithmetic)]
    if not streams:
        arithmetic = _ROW_TILES + 2 * shape.transformed + shape.argmax
        return [*found, Tile("row", ("BLOCK_M", tail), FP32, arithmetic)]
    block = ("BLOCK_M", "BLOCK_N")
    computes_statistics = shape.kernel.value.computes_statistics
    found.append(Tile("logits read", block, shape.itemsize, 2))
    if shape.written_itemsize:
        found.append(Tile("gradient, fp32", block, FP32, 1 if computes_statistics else 2))
    found.append(Tile("fp32 arithmetic", block, FP32, 3))
    if computes_statistics:
        found.append(Tile("running maxima and sums", block, FP32, 4))
        if shape.smoothed:
            of_z = 1 if shape.kernel is ChunkKernel.DISTRIBUTIONS else 3  # whose other sums leave it memory
            found.append(Tile("running sums of z", block, FP32, of_z + _WEIGHT_TILES * shape.weighted))
            found.append(Tile("where maxima rise, a bit of each element", (1, "BLOCK_N"), 1))
        if shape.argmax:
            found.append(Tile("places of maxima", block, FP32 + FP32 // 2, 2))
        if shape.entropy:
            found.append(Tile("running sums of exp times z", block, FP32, 4))
        if shape.kernel is ChunkKernel.DISTRIBUTIONS:
            found.append(Tile("running sums of exp squared", block, FP32, 2))
    elif shape.smoothed or shape.entropy or shape.transformed:
        found.append(Tile("further arithmetic", block, FP32))
    if tail:
        found.append(Tile("tail of a row", ("BLOCK_M", tail), FP32, _ROW_TILES))
    return found
