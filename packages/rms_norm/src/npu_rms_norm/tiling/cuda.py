"""Blocks of RMSNorm's kernels on CUDA."""

from __future__ import annotations

from npu_tiling import ALL_TILES, Device
from npu_tiling.budget.arithmetic import power_of_two

from .launches import Launch, SumLaunch
from .problem import Problem


def row_launch(problem: Problem, device: Device, *, backward: bool) -> Launch:
    """Measured on an H200 with the shapes of the README's table; powers of two, as stock Triton asks for."""
    block_n = power_of_two(problem.width)
    if not backward:
        if block_n <= 1024:
            block_m = _rows(problem, 4096 // block_n)
            return Launch(problem, device, False, False, True, block_m, block_n, warps=4, per_core=ALL_TILES)
        # Two column blocks or more: the second read finds the row in a cache, and fewer registers mean more rows at once.
        warps = 4 if block_n <= 2048 else 8 if block_n <= 8192 else 16 if block_n <= 16384 else 32
        per_core = ALL_TILES if block_n <= 16384 else 2
        return Launch(problem, device, False, True, True, 1, min(block_n // 2, 256 * max(16, warps)), 1, warps, per_core)
    if block_n > 16384:
        return Launch(problem, device, True, True, True, 1, 2048, warps=8, per_core=4)
    # As many resident programs as leave each the registers for its partial sum of dw.
    block_m = _rows(problem, 4096 // block_n)
    per_core = 3 if block_n <= 4096 else 1
    return Launch(problem, device, True, False, True, block_m, block_n, warps=8, per_core=per_core)


def _rows(problem: Problem, wanted: int) -> int:
    """A power of two up to `wanted` that the problem allows."""
    return 1 << (max(1, min(problem.max_rows, wanted)).bit_length() - 1)


def sum_launch(width: int, device: Device) -> SumLaunch:
    """Blocks of the kernel that adds the partial sums of dw."""
    return SumLaunch(width, device, 32, min(64, power_of_two(width)))
