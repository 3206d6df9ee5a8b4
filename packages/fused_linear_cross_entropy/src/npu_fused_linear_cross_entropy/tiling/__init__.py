"""From the shape of a chunk of logits, or of rows, element sizes and a device to block sizes and grid."""

from __future__ import annotations

from npu_tiling import Device

from . import ascend, cuda
from .launches import Launch, ScaleLaunch, ScaleRowsLaunch, SettleLaunch
from .problem import Problem

__all__ = [
    "Launch",
    "Problem",
    "ScaleLaunch",
    "ScaleRowsLaunch",
    "SettleLaunch",
    "chunk_launch",
    "scale_launch",
    "smaller",
    "streams",
]


def chunk_launch(problem: Problem, device: Device) -> Launch:
    """Blocks for a chunk of logits. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return (cuda if device.kind == "cuda" else ascend).chunk_launch(problem, device)


def scale_launch(itemsize: int, device: Device) -> ScaleLaunch:
    """Blocks for values of `itemsize` bytes."""
    return (cuda if device.kind == "cuda" else ascend).scale_launch(itemsize, device)


def streams(problem: Problem, device: Device) -> bool:
    """Whether rows are longer than a tile, so that a gradient which is known after the row takes a second sweep."""
    return chunk_launch(problem, device).streams


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    return None if launch.device.kind == "cuda" else ascend.smaller(launch)
