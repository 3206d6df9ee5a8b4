"""From row widths, layers, element sizes and a device to block sizes and grid."""

from __future__ import annotations

from npu_tiling import Device

from . import ascend, cuda
from .footprint import ub_bytes
from .launches import COLUMN_KINDS, ROW_BACKWARDS, Kind, Launch, Problem, TableLaunch, WeightsLaunch

__all__ = ["COLUMN_KINDS", "Kind", "Launch", "Problem", "TableLaunch", "WeightsLaunch", "columns_launch", "row_launch"]
__all__ += ["ROW_BACKWARDS", "smaller", "statistics_by_token", "ub_bytes", "weights_launch"]


def row_launch(problem: Problem, device: Device) -> Launch | None:
    """The launch of a kernel that takes whole rows; None where none fit on chip."""
    return (cuda if device.kind == "cuda" else ascend).row_launch(problem, device)


def columns_launch(problem: Problem, device: Device) -> Launch:
    """The launch of a kernel that takes one block of columns. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return (cuda if device.kind == "cuda" else ascend).columns_launch(problem, device)


def statistics_by_token(width: int, itemsize: int, n_sources: int, device: Device) -> bool:
    """Whether the statistics that a forward keeps are [tokens, sources] instead of [sources, tokens]."""
    return device.kind == "ascend" and ascend.statistics_by_token(width, itemsize, n_sources, device)


def weights_launch(width: int, device: Device) -> WeightsLaunch:
    """Blocks and grid of the kernel that adds the partial sums of dg."""
    return (cuda if device.kind == "cuda" else ascend).weights_launch(width, device)


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a compiler that needs more memory on chip than was declared; None at the end.

    The last one of a kernel for whole rows has fewer columns than a row: none fits, and other kernels are to take columns.
    """
    return (cuda if launch.device.kind == "cuda" else ascend).smaller(launch)
