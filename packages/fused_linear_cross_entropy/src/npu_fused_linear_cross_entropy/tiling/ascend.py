"""Blocks of chunks of logits on Ascend: as large as the Unified Buffer allows, of a length that leaves the shortest tail."""

from __future__ import annotations

import dataclasses

from npu_tiling import Block, Device, Way, first_fit

from .footprint import tiles
from .launches import Launch, ScaleLaunch
from .problem import ROWS, Problem

# Bytes that one transfer should have: 8 KB reach 76 % of the bandwidth, 16 KB 94 %, and more leaves no room for the rest.
_TRANSFER_BYTES = 16 * 1024
_MAX_ROWS = 64
_UNIT = 16  # columns that make up one aligned piece of a row, of logits and of gradients
_SHORTEST = 0.75  # of the longest block: a block may be this short where it leaves a shorter tail
_SHORTEST_EXACT = 0.5  # and this short where it leaves none, of a row of few blocks
_FEW_BLOCKS = 8
# Unified Buffer, for an element of a tile, that a kernel of statistics and gradient needs for its loads to overlap
# arithmetic. Below that it still compiles, but CANN 9.0 and later put temporaries where the next block is being loaded.
_OVERLAPPING_BYTES = 53
_OVERLAPPING_EXPONENTIALS = 28  # the same, of exponentials


def chunk_launch(problem: Problem, device: Device) -> Launch:
    """Blocks for a chunk of logits. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    # Whole rows, as many as make one good transfer, where two fit.
    wanted = min(_MAX_ROWS, max(ROWS, _TRANSFER_BYTES // (problem.width * problem.itemsize)))
    whole_rows = Way(False, tiles(problem, False, problem.width), (Block("BLOCK_M", wanted, ROWS),))
    largest = min(problem.width, _TRANSFER_BYTES // problem.itemsize)
    if problem.statistics and problem.gradient_itemsize:
        overlapping = _OVERLAPPING_EXPONENTIALS if problem.exponentials else _OVERLAPPING_BYTES
        largest = min(largest, device.ub_bytes // (ROWS * overlapping))
    largest = largest // _UNIT * _UNIT
    columns = Block("BLOCK_N", largest, _UNIT, _UNIT), Block("BLOCK_M", ROWS, ROWS)
    streams, blocks = first_fit([whole_rows, Way(True, tiles(problem, True, 0), columns)], device)
    if streams:
        return _streaming(problem, device, blocks["BLOCK_N"])
    return Launch(problem, device, blocks["BLOCK_M"], problem.width + _UNIT, problem.width)


def scale_launch(itemsize: int, device: Device) -> ScaleLaunch:
    """Blocks for values of `itemsize` bytes."""
    return ScaleLaunch(device, _TRANSFER_BYTES // itemsize)


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    if not launch.streams:
        if launch.block_m > ROWS:
            return dataclasses.replace(launch, block_m=max(ROWS, launch.block_m // 2))
        block = launch.problem.width // 2 // _UNIT * _UNIT
    else:
        block = launch.block_n // 2 // _UNIT * _UNIT
    return _streaming(launch.problem, launch.device, block) if block else None


def _streaming(problem: Problem, device: Device, largest: int) -> Launch:
    """Blocks of at most `largest` columns, and not much less, of a length that leaves no tail or the shortest one."""
    shortest = int(largest * _SHORTEST_EXACT) if problem.width < _FEW_BLOCKS * largest else largest
    for size in range(largest, shortest, -_UNIT):
        launch = Launch(problem, device, ROWS, size, 0)
        if problem.width % size == 0 and launch.ub_bytes <= device.ub_bytes:
            return launch
    while True:
        shortest = max(_UNIT, int(largest * _SHORTEST) // _UNIT * _UNIT)
        sizes = range(shortest, largest + 1, _UNIT)
        for size in sorted(sizes, key=lambda size: (problem.width % size, -size)):
            launch = Launch(problem, device, ROWS, size, problem.width % size)
            if launch.ub_bytes <= device.ub_bytes or size == _UNIT:
                return launch
        largest = shortest
