"""Blocks of chunks of logits on CUDA: powers of two; whole rows on chip where they are not too long."""

from __future__ import annotations

from npu_tiling import Device
from npu_tiling.budget.arithmetic import power_of_two

from .launches import Launch, ScaleLaunch
from .problem import Problem

_ROW = 8192  # columns up to which whole rows are on chip
_BLOCK = 8192  # columns of a block beyond
_TILE = 4096  # elements of a tile of several short rows
_LANES = 512  # elements that one warp takes of a tile
_WARPS = (4, 16)  # the fewest and the most
_SCALE_BLOCK = 4096


def chunk_launch(problem: Problem, device: Device) -> Launch:
    """Blocks for a chunk of logits."""
    width = power_of_two(problem.width)
    if width <= _ROW:
        rows = max(1, _TILE // width)
        return Launch(problem, device, rows, 2 * width, width, _warps(rows * width))
    left = problem.width % _BLOCK
    return Launch(problem, device, 1, _BLOCK, power_of_two(left) if left else 0, _warps(_BLOCK))


def _warps(elements: int) -> int:
    return min(max(elements // _LANES, _WARPS[0]), _WARPS[1])


def scale_launch(itemsize: int, device: Device) -> ScaleLaunch:
    """Blocks for values of any size."""
    return ScaleLaunch(device, _SCALE_BLOCK)
