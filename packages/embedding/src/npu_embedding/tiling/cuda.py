"""Blocks of the embedding's kernels on CUDA."""

from __future__ import annotations

from npu_tiling import Device
from npu_tiling.budget.arithmetic import power_of_two

from .launches import ForwardLaunch, PartialsLaunch, RunsLaunch, SumsLaunch

_MAX_ROWS = 32  # of a tile
_ZEROS_COLUMNS = 512  # stored at once by a warp
_ZEROS_BYTES = 16384  # of a program
# Bytes of a tile for each warp, from 16-byte vectors for each thread: what was fastest on an H200.
_WARP_BYTES_BACKWARD = 1024
_WARP_BYTES_FORWARD = 4096


def forward_launch(width: int, itemsize: int, device: Device) -> ForwardLaunch:
    """Blocks of the forward."""
    block_n = _columns(width, 1024)
    block_m = 1 if block_n > 512 else max(1, min(_MAX_ROWS, _WARP_BYTES_FORWARD // (block_n * itemsize)))
    return ForwardLaunch(device, width, itemsize, block_n, block_m, warps=1)


def runs_launch(width: int, itemsize: int, device: Device) -> RunsLaunch:
    """Blocks of the backward's sums."""
    block_n = _columns(width, 2048)
    warps = max(1, min(8, block_n * itemsize // _WARP_BYTES_BACKWARD))
    return RunsLaunch(device, width, itemsize, block_n, warps=warps)


def partials_launch(width: int, itemsize: int, device: Device) -> PartialsLaunch:
    """Blocks of the backward's partial sums."""
    # Many partial sums of a few columns, so that a run of thousands of them is added by several programs.
    block_n = _columns(width, 256)
    return PartialsLaunch(device, width, itemsize, block_n, block_p=max(1, min(32, 8192 // block_n)), warps=8)


def sums_launch(width: int, itemsize: int, device: Device) -> SumsLaunch:
    """Blocks of the backward's sums and zeros."""
    runs = runs_launch(width, itemsize, device)
    zero_n = min(power_of_two(width), _ZEROS_COLUMNS * runs.warps)
    rows = max(1, min(64, _ZEROS_BYTES // (width * itemsize)))
    return SumsLaunch(device, width, itemsize, runs.block_n, power_of_two(rows), warps=runs.warps, zero_n=zero_n)


def _columns(width: int, most: int) -> int:
    """A power of two that divides the width, or one that takes a mask where that would be a short one."""
    divisor = min(width & -width, most)
    return divisor if divisor >= 128 else min(power_of_two(width), most)
