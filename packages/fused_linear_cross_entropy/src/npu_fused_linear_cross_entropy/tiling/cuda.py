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
# The same of exponentials. H200, 1024 rows of 128256 and 50257 fp32 logits: .204 and .098 ms. With 512: .291 and .094.
# With 512 and blocks of 4096: .202 and .103.
_EXPONENTIAL_LANES = 1024
_WARPS = (4, 16)  # the fewest and the most
_SCALE_BLOCK = 4096


def chunk_launch(problem: Problem, device: Device) -> Launch:
    """Blocks for a chunk of logits."""
    width, lanes = power_of_two(problem.width), _EXPONENTIAL_LANES if problem.exponentials else _LANES
    if width <= _ROW:
        rows = max(1, _TILE // width)
        return Launch(problem, device, rows, 2 * width, width, _warps(rows * width, lanes))
    left = problem.width % _BLOCK
    return Launch(problem, device, 1, _BLOCK, power_of_two(left) if left else 0, _warps(_BLOCK, lanes))


def _warps(elements: int, lanes: int) -> int:
    return min(max(elements // lanes, _WARPS[0]), _WARPS[1])


def scale_launch(itemsize: int, device: Device) -> ScaleLaunch:
    """Blocks for values of any size."""
    return ScaleLaunch(device, _SCALE_BLOCK)
