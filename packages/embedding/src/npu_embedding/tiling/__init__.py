"""From table widths, element sizes and a device to block sizes and grids."""

from __future__ import annotations

from npu_tiling import Device

from . import ascend, cuda
from .ascend import finish_launch
from .cuda import partials_launch, sums_launch
from .indices import IndexLaunch, keys_launch, mark_launch, offsets_launch, rank_launch, sort_launch
from .launches import FinishLaunch, ForwardLaunch, Launch, RunsLaunch

__all__ = [
    "FinishLaunch",
    "ForwardLaunch",
    "IndexLaunch",
    "Launch",
    "RunsLaunch",
    "finish_launch",
    "forward_launch",
    "keys_launch",
    "mark_launch",
    "offsets_launch",
    "partials_launch",
    "rank_launch",
    "runs_launch",
    "smaller",
    "sort_launch",
    "sums_launch",
]


def forward_launch(width: int, itemsize: int, device: Device) -> ForwardLaunch:
    """Blocks of the forward. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    choose = cuda if device.kind == "cuda" else ascend
    return choose.forward_launch(width, itemsize, device)


def runs_launch(width: int, itemsize: int, device: Device) -> RunsLaunch:
    """Blocks of the backward's sums. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    choose = cuda if device.kind == "cuda" else ascend
    return choose.runs_launch(width, itemsize, device)


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    return None if launch.device.kind == "cuda" else ascend.smaller(launch)
