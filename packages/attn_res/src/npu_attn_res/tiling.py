"""The decision how a launch is tiled: `Shape` -> `Tiling`, a way and its blocks."""

from __future__ import annotations

import dataclasses

from npu_tiling import Device

from .ascend.tiling import choice as ascend
from .ascend.tiling.choice import AscendTiling
from .both.tiling import Tiling
from .cuda.tiling import choice as cuda
from .cuda.tiling.tile import CudaTiling
from .shape import Shape


def choose(shape: Shape, device: Device) -> Tiling | None:
    """The way and the blocks of a launch; None where it takes whole rows and none fit on chip.

    Raises:
        UnifiedBufferError: it takes blocks of columns, and not even the smallest fits.
    """
    return cuda.choose(shape, device) if device.kind == "cuda" else ascend.choose(shape, device)


def smaller(tiling: Tiling) -> Tiling | None:
    """The next smaller tiling for a compiler that needs more memory on chip than was declared; None at the end.

    The last one of a kernel for whole rows has fewer columns than a row: none fits, and other kernels are to take columns.
    """
    if isinstance(tiling, CudaTiling):
        found: Tiling | None = cuda.smaller(tiling)
    else:
        assert isinstance(tiling, AscendTiling)
        found = ascend.smaller(tiling)
    return None if found is None else dataclasses.replace(found, why="the compiler refused a larger tile")


def statistics_by_token(width: int, itemsize: int, n_sources: int, device: Device) -> bool:
    """Whether the statistics that a forward keeps are [tokens, sources] instead of [sources, tokens]."""
    return device.kind == "ascend" and ascend.statistics_by_token(width, itemsize, n_sources, device)
