"""Unified Buffer budgeting, core counts, grids and launches for Triton kernels on Huawei Ascend NPUs."""

from .budget import ALL_TILES, Block, Tile, Way, first_fit, fit, footprint, persistent_grid
from .chips import GPUS, SOC_VARIABLE, SOCS, Device, device_for, soc, use_device
from .errors import GPUResourcesError, MissingTritonError, TileTooLargeError, UnifiedBufferError, UnknownDeviceError
from .launch import Kernels, Launcher, LaunchSpec, import_kernels, is_out_of_resources, is_ub_overflow
from .listing import dry_run, watch_launches
from .rows import RowLayout, row_layout

__all__ = [
    "ALL_TILES",
    "GPUS",
    "SOCS",
    "SOC_VARIABLE",
    "Block",
    "Device",
    "GPUResourcesError",
    "Kernels",
    "Launcher",
    "MissingTritonError",
    "LaunchSpec",
    "RowLayout",
    "Tile",
    "TileTooLargeError",
    "UnifiedBufferError",
    "UnknownDeviceError",
    "Way",
    "device_for",
    "dry_run",
    "first_fit",
    "fit",
    "footprint",
    "import_kernels",
    "is_out_of_resources",
    "is_ub_overflow",
    "persistent_grid",
    "row_layout",
    "soc",
    "use_device",
    "watch_launches",
]
