"""From the shape of a chunk of logits, element sizes and a device to block sizes and grid."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import ceil

from npu_tiling import ALL_TILES, Block, Device, Tile, UnifiedBufferError, fit, footprint, persistent_grid
from npu_tiling.budget.arithmetic import FP32, power_of_two
from npu_tiling.launching.cuda import row_options

# Bytes that one transfer should have: 8 KB reach 76 % of the bandwidth, 16 KB 94 %, and more leaves no room for the rest.
_TRANSFER_BYTES = 16 * 1024
_ROWS = 2  # rows of a tile that keep row reductions in the vector unit
_MAX_ROWS = 64
_UNIT = 16  # columns that make up one aligned piece of a row, of logits and of gradients
_SHORTEST = 0.75  # of the longest block: a block may be this short where it leaves a shorter tail
_SHORTEST_EXACT = 0.5  # and this short where it leaves none, of a row of few blocks
_FEW_BLOCKS = 8
# Unified Buffer, for an element of a tile, that a kernel of statistics and gradient has to have for its loads to overlap
# arithmetic. Less compiles: the compilers of CANN 9.0 and later then put temporaries where the next block is being loaded.
_OVERLAPPING_BYTES = 53
_ROW_VALUES = 6  # padded to 32 bytes each
_WHOLE_TILES = 7  # fp32, of a tile that is a whole row

# CUDA, powers of two: whole rows on chip up to this many columns, blocks of this many beyond.
_CUDA_ROW = 8192
_CUDA_BLOCK = 8192
_CUDA_TILE = 4096  # elements of a tile of several short rows
_CUDA_LANES = 512  # elements that one warp takes of a tile
_CUDA_WARPS = (4, 16)  # the fewest and the most
_CUDA_SCALE_BLOCK = 4096
_CUDA_SCALE_PROGRAMS = 8  # of a multiprocessor


@dataclass(frozen=True)
class Problem:
    """What a launch is for.

    Attributes:
        width: columns of the chunk.
        itemsize: bytes of a logit.
        gradient_itemsize: bytes of an element of the gradient; 0 where there is none.
        statistics: whether statistics are computed.
        smoothed, entropy, argmax: whether sums of z, sums of exp times z, and the places of maxima are kept.
        transformed: whether logits are biased, scaled or softcapped.
    """

    width: int
    itemsize: int
    gradient_itemsize: int
    statistics: bool
    smoothed: bool = False
    entropy: bool = False
    argmax: bool = False
    transformed: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch but for its number of rows: blocks and compiler options.

    Attributes:
        problem: what it was made for.
        device: the chip.
        block_m, block_n: rows and columns of a tile; block_n is above the width where a row is one tile.
        tail_n: columns of the last tile of a row, 0 for none.
        warps: warps of a program (CUDA).
    """

    problem: Problem
    device: Device = field(repr=False)
    block_m: int
    block_n: int
    tail_n: int
    warps: int = 4

    def grid(self, rows: int) -> int:
        per_core = ALL_TILES if self.device.kind == "cuda" else 1
        return persistent_grid(ceil(rows / self.block_m), self.device, per_core=per_core)

    @property
    def streams(self) -> bool:
        """Whether a row is more than one tile."""
        return self.block_n <= self.problem.width

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return footprint(_tiles(self.problem, self.streams, self.tail_n), blocks, self.device)

    @property
    def constants(self) -> dict[str, int | bool]:
        return {
            "N": self.problem.width,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "TAIL_N": self.tail_n,
            "BARRIER": self.device.kind == "cuda" and 0 < self.problem.gradient_itemsize < self.problem.itemsize,
        }

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        return row_options(min(self.block_n, self.tail_n or self.block_n), self.warps) if self.device.kind == "cuda" else {}


@dataclass(frozen=True)
class ScaleLaunch:
    """The launch that multiplies values by a number: programs stride over blocks of them."""

    device: Device = field(repr=False)
    block_n: int

    def grid(self, values: int) -> int:
        per_core = _CUDA_SCALE_PROGRAMS if self.device.kind == "cuda" else 1
        return persistent_grid(ceil(values / self.block_n), self.device, per_core=per_core)

    @property
    def constants(self) -> dict[str, int | bool]:
        return {"BLOCK_N": self.block_n}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": 4} if self.device.kind == "cuda" else {}


def chunk_launch(problem: Problem, device: Device) -> Launch:
    """Blocks for a chunk of logits. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    if device.kind == "cuda":
        return _cuda_launch(problem, device)
    # Whole rows, as many as make one good transfer, where two fit.
    wanted = min(_MAX_ROWS, max(_ROWS, _TRANSFER_BYTES // (problem.width * problem.itemsize)))
    try:
        tiles = _tiles(problem, False, problem.width)
        rows = fit(tiles, (Block("BLOCK_M", wanted, _ROWS),), device)["BLOCK_M"]
        return Launch(problem, device, rows, problem.width + _UNIT, problem.width)
    except UnifiedBufferError:
        pass
    largest = min(problem.width, _TRANSFER_BYTES // problem.itemsize)
    if problem.statistics and problem.gradient_itemsize:
        largest = min(largest, device.ub_bytes // (_ROWS * _OVERLAPPING_BYTES))
    largest = largest // _UNIT * _UNIT
    block = fit(_tiles(problem, True, 0), (Block("BLOCK_N", largest, _UNIT, _UNIT), Block("BLOCK_M", _ROWS, _ROWS)), device)[
        "BLOCK_N"
    ]
    return _streaming(problem, device, block)


def scale_launch(itemsize: int, device: Device) -> ScaleLaunch:
    """Blocks for values of `itemsize` bytes."""
    return ScaleLaunch(device, _CUDA_SCALE_BLOCK if device.kind == "cuda" else _TRANSFER_BYTES // itemsize)


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if launch.device.kind == "cuda":
        return None
    if not launch.streams:
        if launch.block_m > _ROWS:
            return dataclasses.replace(launch, block_m=max(_ROWS, launch.block_m // 2))
        block = launch.problem.width // 2 // _UNIT * _UNIT
    else:
        block = launch.block_n // 2 // _UNIT * _UNIT
    return _streaming(launch.problem, launch.device, block) if block else None


def _streaming(problem: Problem, device: Device, largest: int) -> Launch:
    """Blocks of at most `largest` columns, and not much less, of a length that leaves no tail or the shortest one."""
    shortest = int(largest * _SHORTEST_EXACT) if problem.width < _FEW_BLOCKS * largest else largest
    for size in range(largest, shortest, -_UNIT):
        launch = Launch(problem, device, _ROWS, size, 0)
        if problem.width % size == 0 and launch.ub_bytes <= device.ub_bytes:
            return launch
    while True:
        shortest = max(_UNIT, int(largest * _SHORTEST) // _UNIT * _UNIT)
        sizes = range(shortest, largest + 1, _UNIT)
        for size in sorted(sizes, key=lambda size: (problem.width % size, -size)):
            launch = Launch(problem, device, _ROWS, size, problem.width % size)
            if launch.ub_bytes <= device.ub_bytes or size == _UNIT:
                return launch
        largest = shortest


def _tiles(problem: Problem, streams: bool, tail: int) -> list[Tile]:
    """What a kernel keeps on chip at once, as the compiler of CANN 8.5 and 9.0 plans it on a 910B.

    A value that a loop carries takes two buffers. The statistics of single rows are small, but every one is padded.
    """
    tiles = [Tile("statistics of rows", ("BLOCK_M", 1), FP32, _ROW_VALUES)]
    if not streams:
        arithmetic = _WHOLE_TILES + 2 * problem.transformed + problem.argmax
        return [*tiles, Tile("row", ("BLOCK_M", tail), FP32, arithmetic)]
    block = ("BLOCK_M", "BLOCK_N")
    tiles.append(Tile("logits read", block, problem.itemsize, 2))
    if problem.gradient_itemsize:
        tiles.append(Tile("gradient, fp32", block, FP32, 1 if problem.statistics else 2))
    tiles.append(Tile("fp32 arithmetic", block, FP32, 3))
    if problem.statistics:
        tiles.append(Tile("running maxima and sums", block, FP32, 4))
        if problem.smoothed:
            tiles.append(Tile("running sums of z", block, FP32))
        if problem.argmax:
            tiles.append(Tile("places of maxima", block, FP32 + FP32 // 2, 2))
        if problem.entropy:
            tiles.append(Tile("running sums of exp times z", block, FP32, 4))
    elif problem.smoothed or problem.entropy or problem.transformed:
        tiles.append(Tile("further arithmetic", block, FP32))
    if tail:
        tiles.append(Tile("tail of a row", ("BLOCK_M", tail), FP32, _WHOLE_TILES))
    return tiles


def _cuda_launch(problem: Problem, device: Device) -> Launch:
    width = power_of_two(problem.width)
    if width <= _CUDA_ROW:
        rows = max(1, _CUDA_TILE // width)
        return Launch(problem, device, rows, 2 * width, width, _cuda_warps(rows * width))
    left = problem.width % _CUDA_BLOCK
    return Launch(problem, device, 1, _CUDA_BLOCK, power_of_two(left) if left else 0, _cuda_warps(_CUDA_BLOCK))


def _cuda_warps(elements: int) -> int:
    return min(max(elements // _CUDA_LANES, _CUDA_WARPS[0]), _CUDA_WARPS[1])
