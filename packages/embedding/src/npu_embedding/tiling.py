"""The decisions: `Shape` -> the way to a gradient; `RowShape` -> blocks of a launch."""

from __future__ import annotations

import functools
from math import ceil

from npu_tiling import persistent_grid

from .ascend import tiling as ascend
from .ascend.tiling import RowLaunch
from .both.tiling import Launch, Rule
from .cuda import tiling as cuda
from .shape import RowShape, Shape


@functools.lru_cache(maxsize=4096)
def choose(shape: Shape) -> Rule:
    """The first rule that holds, of the table of ways.

    Raises:
        ValueError: there are more indices, or the table has more rows, than any way takes (Ascend).
    """
    ways = (cuda if shape.device.kind == "cuda" else ascend).WAYS
    for rule in ways:
        elements = shape.indices * shape.width
        if shape.indices <= rule.max_indices and elements <= rule.max_elements and shape.rows <= rule.max_rows:
            return rule
    last, chip = ways[-1], shape.device.name
    if shape.indices > last.max_indices:
        raise ValueError(f"indices has {shape.indices} elements and must have at most {last.max_indices} on {chip}.")
    raise ValueError(f"the table has {shape.rows} rows and must have at most {last.max_rows} on {chip}.")


def gather_launch(shape: RowShape) -> Launch:
    """Blocks of the look-up. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return (cuda if shape.device.kind == "cuda" else ascend).gather_launch(shape)


def ngram_launch(shape: RowShape) -> Launch:
    """Blocks of the n-gram look-up that concatenates. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return cuda.gather_launch(shape) if shape.device.kind == "cuda" else ascend.ngram_launch(shape)


def ngram_sum_launch(shape: RowShape) -> Launch:
    """Blocks of the n-gram look-up that adds. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return cuda.gather_launch(shape) if shape.device.kind == "cuda" else ascend.ngram_sum_launch(shape)


def bags_launch(shape: RowShape) -> Launch:
    """Blocks of a look-up of bags between offsets. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return (cuda if shape.device.kind == "cuda" else ascend).bags_launch(shape)


def bag_tiles_launch(shape: RowShape) -> Launch:
    """Blocks of a look-up of bags of equally many ids. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return cuda.bags_launch(shape) if shape.device.kind == "cuda" else ascend.bag_tiles_launch(shape)


def norm_launch(shape: RowShape) -> Launch:
    """Blocks of a look-up of rows that are normalised. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return cuda.norm_launch(shape) if shape.device.kind == "cuda" else ascend.bag_tiles_launch(shape)


def spread_launch(shape: RowShape) -> Launch:
    """Blocks of the backward of bags up to dx and dsample. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return cuda.bags_launch(shape) if shape.device.kind == "cuda" else ascend.spread_launch(shape)


def norm_spread_launch(shape: RowShape) -> Launch:
    """Blocks of the backward of normalised rows. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return cuda.norm_launch(shape) if shape.device.kind == "cuda" else ascend.spread_tiles_launch(shape)


def ngram_grid(launch: Launch, n_batches: int, n_tokens: int, parts: int) -> int:
    """Programs of an n-gram look-up: on CUDA a program takes one of `parts` of the heads."""
    if launch.device.kind == "cuda":
        return ceil(n_batches * n_tokens / launch.per_program) * launch.column_blocks * parts
    return persistent_grid(n_batches * ceil(n_tokens / launch.per_program) * launch.column_blocks, launch.device)


def smaller(launch: Launch) -> RowLaunch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    return ascend.smaller(launch) if isinstance(launch, RowLaunch) else None
