"""Persistent grids."""

from __future__ import annotations

from typing import Literal

from ..chips.devices import Device

ALL_TILES = 2**16
"""`per_core` of a grid that is not persistent: one program for every tile."""


def persistent_grid(tiles: int, device: Device, *, cores: Literal["vector", "cube"] = "vector", per_core: int = 1) -> int:
    """Number of programs of a persistent 1-D grid: one per core, or one per tile where there are fewer tiles.

    Args:
        tiles: how many tiles the launch has; each program strides over them.
        device: the chip that the launch is for.
        cores: the kind that runs it: "cube" for kernels with a matrix product, else "vector".
        per_core: programs resident on one core at once; more than 1 hides latency on CUDA and is of no use on Ascend.
    """
    available = device.vector_cores if cores == "vector" else device.cube_cores
    return max(1, min(tiles, available * per_core, device.max_grid))
