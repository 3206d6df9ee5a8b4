"""Unified Buffer budgeting, core counts, grids and launches for Triton kernels on Huawei Ascend NPUs."""

from .budget import (
    ALL_TILES,
    Block,
    Candidate,
    GPUResourcesError,
    Tile,
    TileTooLargeError,
    UnifiedBufferError,
    first_fit,
    fit,
    footprint,
    passed_over,
    persistent_grid,
)
from .chips import GPUS, SOC_VARIABLE, SOCS, Device, UnknownDeviceError, device_for, soc, use_device
from .launch import (
    Decision,
    Kernels,
    Launcher,
    MissingTritonError,
    dry_run,
    import_kernels,
    watch_launches,
)
from .rows import RowLayout, row_layout

__all__ = [
    "ALL_TILES",
    "GPUS",
    "SOCS",
    "SOC_VARIABLE",
    "Block",
    "Candidate",
    "Decision",
    "Device",
    "GPUResourcesError",
    "Kernels",
    "Launcher",
    "MissingTritonError",
    "RowLayout",
    "Tile",
    "TileTooLargeError",
    "UnifiedBufferError",
    "UnknownDeviceError",
    "device_for",
    "dry_run",
    "first_fit",
    "passed_over",
    "fit",
    "footprint",
    "import_kernels",
    "persistent_grid",
    "row_layout",
    "soc",
    "use_device",
    "watch_launches",
]
