"""Blocks of AttnRes's kernels on CUDA: powers of two, as stock Triton asks for."""

from __future__ import annotations

import dataclasses

from npu_tiling import ALL_TILES, Device
from npu_tiling.budget.arithmetic import power_of_two

from .launches import BACKWARDS, COLUMN_KINDS, FORWARDS, Kind, Launch, Problem, WeightsLaunch

# Measured on an H200 with the shapes of the documentation's table: loads of a few small tiles under way, not one large tile.
STAGES = 3  # tiles under way in a loop over blocks, or over tokens whose blocks are held
MIN_WARPS = 4
TILE_ELEMENTS = 8192  # of a tile of several blocks, unless TILE_BLOCKS rows have more
TILE_BLOCKS, TWO_PASS_BLOCKS = 2, 4  # TWO_PASS: backward, blocks read twice
ELEMENTS_PER_WARP, TWO_PASS_ELEMENTS_PER_WARP = 4096, 2048
TWO_PASS_PER_CORE, WIDE_PER_CORE = 2, 4
TWO_PASS_NARROW = 4096  # columns; wider rows take WIDE_PER_CORE
HELD_FORWARD, HELD_PER_CORE = 8192, 3  # elements of a token's blocks, programs of a core
HELD_BACKWARD = ((8192, 2048, 3), (16384, 2048, 2), (32768, 4096, 1))  # elements, of them a warp's, programs
HELD_COLUMNS, HELD_WIDTH, HELD_WARPS = 512, 8192, 16  # columns of a warp, and of a row, and warps of a core, at most
WIDEST_ROW = 16384  # wider rows are split into blocks of columns
LAYER_ELEMENTS, LAYER_WARPS, LAYER_PER_CORE = 32768, 16, 1  # rows of layers times columns
COLUMN_ELEMENTS, COLUMN_WARPS, COLUMN_PER_CORE = 4096, 4, 4  # kernels that take columns
ROW_ELEMENTS_PER_WARP, ROW_PER_CORE = 1024, 2  # merge and the gradient of the RMSNorm: one row
SCRATCH_BYTES = 1024  # of shared memory, that reductions over warps take at most


def row_launch(problem: Problem, device: Device) -> Launch | None:
    """Whole rows; None where they are too wide, or where there are too many layers."""
    block_d = power_of_two(problem.width)
    if problem.kind == Kind.LAYERS:
        block_s = power_of_two(problem.layers)
        if block_s * block_d > LAYER_ELEMENTS:
            return None
        return Launch(problem, device, block_s=block_s, block_d=block_d, warps=LAYER_WARPS, per_core=LAYER_PER_CORE)
    if block_d > WIDEST_ROW:
        return None
    if problem.kind in (*FORWARDS, *BACKWARDS):
        return _sources_launch(problem, device, block_d)
    warps = max(1, min(16, block_d // ROW_ELEMENTS_PER_WARP))
    return Launch(problem, device, block_d=block_d, warps=warps, per_core=ROW_PER_CORE)


def _sources_launch(problem: Problem, device: Device, block_d: int) -> Launch:
    """Several blocks of one token at a time."""
    launch = _held_launch(problem, device, block_d)
    while launch is not None and shared_bytes(launch) > device.ub_bytes and launch.stages > 2:
        launch = dataclasses.replace(launch, stages=launch.stages - 1)
    if launch is not None and shared_bytes(launch) <= device.ub_bytes:
        return launch
    blocks = max(TILE_BLOCKS, TILE_ELEMENTS // block_d)
    per_warp, per_core, stages = ELEMENTS_PER_WARP, ALL_TILES, STAGES
    if problem.kind in BACKWARDS:
        if block_d <= TWO_PASS_NARROW:
            blocks, per_core = max(TWO_PASS_BLOCKS, blocks), TWO_PASS_PER_CORE
        else:
            per_warp, per_core = TWO_PASS_ELEMENTS_PER_WARP, WIDE_PER_CORE
        blocks = max(1, min(blocks, problem.n_sources // 2))
    if block_d > 8192:  # a row takes most of a core's registers
        blocks, per_warp, per_core = 1, 1024, 1
        stages = STAGES if problem.kind in BACKWARDS else STAGES + 1
    block_n = min(problem.n_sources, blocks)
    warps = max(MIN_WARPS, block_n * block_d // per_warp)
    launch = Launch(problem, device, block_d=block_d, block_n=block_n, warps=warps, stages=stages, per_core=per_core)
    while shared_bytes(launch) > device.ub_bytes:
        launch = _fewer_under_way(launch)
    return launch


def _held_launch(problem: Problem, device: Device, block_d: int) -> Launch | None:
    """One token at a time, its blocks in registers; None where there are too many."""
    elements = problem.n_sources * block_d
    warps, per_core = MIN_WARPS, HELD_PER_CORE
    if problem.kind in FORWARDS:
        if elements > HELD_FORWARD:
            return None
    else:
        found = next((each for each in HELD_BACKWARD if elements <= each[0]), None)
        if found is None or block_d > HELD_WIDTH:
            return None
        _, per_warp, per_core = found
        warps = max(MIN_WARPS, elements // per_warp, block_d // HELD_COLUMNS)
        per_core = max(1, min(per_core, HELD_WARPS // warps))
    block_n = problem.n_sources
    return Launch(problem, device, 1, 1, block_d, block_n=block_n, warps=warps, stages=STAGES, per_core=per_core, held=True)


def shared_bytes(launch: Launch) -> int:
    """Shared memory that a program takes: the tiles that its loop has under way, but for the one in use."""
    problem, rows = launch.problem, launch.block_n
    if launch.held:  # in a loop over tokens rows beside the blocks are under way, too
        beside = {Kind.FORWARD_NORMALISED: 1, Kind.BANK: 3, Kind.BACKWARD: 1, Kind.BACKWARD_FP32: 2, Kind.BANK_BACKWARD: 3}
        rows += beside.get(problem.kind, 0)
    return (launch.stages - 1) * rows * launch.block_d * problem.itemsize + SCRATCH_BYTES


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a kernel that needs more than the device has; None at the end.

    The last one of a kernel for whole rows has fewer columns than a row: none fits, and other kernels are to take columns.
    """
    if launch.block_n > 1 or launch.stages > 1:
        return _fewer_under_way(launch)
    if launch.warps > 4:  # the registers of all threads
        return dataclasses.replace(launch, warps=launch.warps // 2)
    if launch.block_d == 1 or launch.problem.kind not in COLUMN_KINDS and not launch.whole_rows:
        return None
    return dataclasses.replace(launch, block_n=0, block_d=launch.block_d // 2)


def _fewer_under_way(launch: Launch) -> Launch:
    if launch.block_n > 1:
        return dataclasses.replace(launch, block_n=launch.block_n // 2, held=False)
    return dataclasses.replace(launch, stages=launch.stages - 1)


def columns_launch(problem: Problem, device: Device) -> Launch:
    """One block of columns."""
    block_s = power_of_two(problem.layers)
    block_d = max(1, min(power_of_two(problem.width), COLUMN_ELEMENTS // block_s))
    return Launch(problem, device, block_s=block_s, block_d=block_d, warps=COLUMN_WARPS, per_core=COLUMN_PER_CORE)


def weights_launch(width: int, device: Device) -> WeightsLaunch:
    """Blocks of the kernel that adds the partial sums of dg: narrow ones, so that many programs wait for memory at once."""
    return WeightsLaunch(width, device, 256, min(8, power_of_two(width)))
