"""What the kernels of chunks keep in the Unified Buffer at once."""

from __future__ import annotations

from math import ceil

from npu_tiling import Device, Tile, footprint
from npu_tiling.budget.arithmetic import FP32

from .problem import Problem

_ROW_VALUES = 6  # padded to 32 bytes each
_WHOLE_TILES = 7  # fp32, of a tile that is a whole row
_EXPONENTIALS = 4  # fp32, of a tile of exponentials: three on a 910B, four on an Ascend950
_REFERENCES = 3  # fp32, of each tile of a row
_SHORT_BLOCK = 1024  # columns of a block of exponentials; shorter ones leave room enough


def ub_bytes(problem: Problem, streams: bool, block_m: int, block_n: int, tail_n: int, device: Device) -> int:
    """Unified Buffer that the tiles of a launch take (see `launches.Launch`)."""
    return footprint(tiles(problem, streams, tail_n), {"BLOCK_M": block_m, "BLOCK_N": block_n}, device)


def tiles(problem: Problem, streams: bool, tail: int) -> list[Tile]:
    """What a kernel keeps on chip at once, as the compiler of CANN 8.5 and 9.0 plans it on a 910B.

    A value that a loop carries takes two buffers. The statistics of single rows are small, but every one is padded.
    """
    found = [Tile("statistics of rows", ("BLOCK_M", 1), FP32, _ROW_VALUES)]
    if problem.exponentials:
        if not streams:
            found.append(Tile("statistics of the rows before", ("BLOCK_M", 1), FP32, _ROW_VALUES))
        if tail:
            found.append(Tile("tail of a row", ("BLOCK_M", tail), FP32, _EXPONENTIALS + problem.transformed))
        if streams:
            references = ceil(problem.width / _SHORT_BLOCK)
            found.append(Tile("references of tiles", ("BLOCK_M", references), FP32, _REFERENCES))
            found.append(Tile("exponentials", ("BLOCK_M", "BLOCK_N"), FP32, _EXPONENTIALS + problem.transformed))
        return found
    if not streams:
        arithmetic = _WHOLE_TILES + 2 * problem.transformed + problem.argmax
        return [*found, Tile("row", ("BLOCK_M", tail), FP32, arithmetic)]
    block = ("BLOCK_M", "BLOCK_N")
    found.append(Tile("logits read", block, problem.itemsize, 2))
    if problem.gradient_itemsize:
        found.append(Tile("gradient, fp32", block, FP32, 1 if problem.statistics else 2))
    found.append(Tile("fp32 arithmetic", block, FP32, 3))
    if problem.statistics:
        found.append(Tile("running maxima and sums", block, FP32, 4))
        if problem.smoothed:
            found.append(Tile("running sums of z", block, FP32))
        if problem.argmax:
            found.append(Tile("places of maxima", block, FP32 + FP32 // 2, 2))
        if problem.entropy:
            found.append(Tile("running sums of exp times z", block, FP32, 4))
    elif problem.smoothed or problem.entropy or problem.transformed:
        found.append(Tile("further arithmetic", block, FP32))
    if tail:
        found.append(Tile("tail of a row", ("BLOCK_M", tail), FP32, _WHOLE_TILES))
    return found
