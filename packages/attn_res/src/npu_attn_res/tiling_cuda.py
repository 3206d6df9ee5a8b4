"""Blocks for CUDA: powers of two, as stock Triton asks for."""

from __future__ import annotations

from npu_tiling import Device

from .tiling_launch import Launch, Problem

ALL_TILES = 2**16  # programs of a core: as many as there are tiles
# Measured on an H200 with the shapes of the README's table: loads of a few small tiles under way, not one large tile.
TILE_ELEMENTS, TILE_BLOCKS = 8192, 2  # of a tile of several blocks, at least: elements, or blocks
STAGES = 3  # tiles under way in a loop over blocks
FORWARD_ELEMENTS_PER_WARP = 4096
BACKWARD_ELEMENTS_PER_WARP = 2048
HELD_PER_CORE = 4  # backward, a token's blocks in one tile
SWEPT_PER_CORE, SWEPT_WIDE_PER_CORE = 2, 4  # backward, blocks read twice; rows of more than SWEPT_WIDE columns
SWEPT_WIDE = 4096
MIN_WARPS = 4
WIDEST_ROW = 16384  # wider rows are split into blocks of columns
LAYER_ELEMENTS, LAYER_WARPS, LAYER_PER_CORE = 32768, 16, 1  # rows of layers times columns
COLUMN_ELEMENTS, COLUMN_WARPS, COLUMN_PER_CORE = 4096, 4, 4  # kernels that take columns
ROW_ELEMENTS_PER_WARP, ROW_PER_CORE = 1024, 2  # merge and the gradient of the RMSNorm: one row


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def cuda_launch(problem: Problem, device: Device) -> Launch | None:
    """Whole rows; None where they are too wide, or where there are too many layers."""
    block_d = power_of_two(problem.width)
    if problem.kernel == "forward of layers":
        block_s = power_of_two(problem.layers)
        if block_s * block_d > LAYER_ELEMENTS:
            return None
        return Launch(problem, device, block_s=block_s, block_d=block_d, warps=LAYER_WARPS, per_core=LAYER_PER_CORE)
    if block_d > WIDEST_ROW:
        return None
    if problem.kernel.startswith(("forward", "backward")):
        return _sources_launch(problem, device, block_d)
    warps = max(1, min(16, block_d // ROW_ELEMENTS_PER_WARP))
    return Launch(problem, device, block_d=block_d, warps=warps, per_core=ROW_PER_CORE)


def _sources_launch(problem: Problem, device: Device, block_d: int) -> Launch:
    """Several blocks of one token at a time."""
    elements = max(TILE_ELEMENTS, TILE_BLOCKS * block_d)
    block_n = min(problem.n_blocks, elements // block_d)
    if problem.kernel.startswith("forward"):
        per_warp, per_core = FORWARD_ELEMENTS_PER_WARP, ALL_TILES
    else:
        per_warp = BACKWARD_ELEMENTS_PER_WARP
        per_core = SWEPT_PER_CORE if block_d <= SWEPT_WIDE else SWEPT_WIDE_PER_CORE
        if problem.n_blocks <= block_n:
            per_core = HELD_PER_CORE
    warps = max(MIN_WARPS, elements // per_warp)
    return Launch(problem, device, block_d=block_d, block_n=block_n, warps=warps, stages=STAGES, per_core=per_core)


def cuda_columns_launch(problem: Problem, device: Device) -> Launch:
    """One block of columns."""
    block_s = power_of_two(problem.layers)
    block_d = max(1, min(power_of_two(problem.width), COLUMN_ELEMENTS // block_s))
    return Launch(problem, device, block_s=block_s, block_d=block_d, warps=COLUMN_WARPS, per_core=COLUMN_PER_CORE)
