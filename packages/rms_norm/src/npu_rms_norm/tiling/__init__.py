"""From row counts, widths, element sizes and a device to block sizes and grid."""

from __future__ import annotations

from npu_tiling import Device

from . import ascend, cuda
from .launches import Launch, SumLaunch
from .problem import Problem

__all__ = ["Launch", "Problem", "SumLaunch", "backward_launch", "forward_launch", "smaller", "sum_launch"]


def forward_launch(problem: Problem, device: Device) -> Launch:
    """Blocks and grid of the forward. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    choose = cuda if device.kind == "cuda" else ascend
    return choose.row_launch(problem, device, backward=False)


def backward_launch(problem: Problem, device: Device) -> Launch:
    """Blocks and grid of the backward. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    choose = cuda if device.kind == "cuda" else ascend
    return choose.row_launch(problem, device, backward=True)


def sum_launch(width: int, device: Device) -> SumLaunch:
    """Blocks and grid of the kernel that adds the partial sums of dw."""
    choose = cuda if device.kind == "cuda" else ascend
    return choose.sum_launch(width, device)


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    return (cuda if launch.device.kind == "cuda" else ascend).smaller(launch)
