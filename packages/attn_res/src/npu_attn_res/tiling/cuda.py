"""Blocks of AttnRes's kernels on CUDA: powers of two, as stock Triton asks for."""

from __future__ import annotations

import dataclasses
from math import ceil

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
MOST_CHUNKS, LEAST_CHUNK, LEAST_PADDING = 8, 512, 1.2  # of a row forward, columns, and what is worth it
NARROW_PER_CORE = 4  # programs of two warps
WARP_COLUMNS = 256  # side by side: a chunk has all warps beside one another, so that sums over blocks need no exchange
SHARED_BLOCKS, SHARED_BYTES, SHARED_COLUMNS = 8, 16384, 4096  # of a tile of a program that shares a token, at most
SHARED_WARPS, SHARED_PER_CORE = 4, 3
SHARED_WORDS, SHARED_MOST = 128, 14  # that a program reads for each token, and programs that share one, at most
HELD_COLUMNS, HELD_WIDTH, HELD_WARPS = 512, 8192, 16  # columns of a warp, and of a row, and warps of a core, at most
WIDEST_ROW = 16384  # wider rows are split into blocks of columns
LAYER_ELEMENTS, LAYER_WARPS, LAYER_PER_CORE = 32768, 16, 1  # rows of layers times columns
COLUMN_ELEMENTS, COLUMN_WARPS, COLUMN_PER_CORE = 4096, 4, 4  # kernels that take columns
ROW_ELEMENTS_PER_WARP, ROW_PER_CORE = 1024, 2  # merge and the gradient of the RMSNorm: one row
SCRATCH_BYTES = 1024  # of shared memory, that reductions over warps take at most
SHARED_SCRATCH_BYTES = 8192  # the same where programs share a token: six sums, and numbers of the next token


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
    if launch is None or shared_bytes(launch) > device.ub_bytes:
        launch = _shared_launch(problem, device) if problem.kind in BACKWARDS else None
    return launch or _looped_launch(problem, device, block_d)


def _looped_launch(problem: Problem, device: Device, block_d: int) -> Launch:
    """A few blocks of a token at a time; backward all of them twice."""
    chunk, chunks = (block_d, 1) if problem.kind in BACKWARDS else _chunks(problem.width)
    row = chunk * chunks
    blocks = max(TILE_BLOCKS, power_of_two(TILE_ELEMENTS // row + 1) // 2)
    per_warp, per_core, stages = ELEMENTS_PER_WARP, ALL_TILES, STAGES
    if problem.kind in BACKWARDS:
        if block_d <= TWO_PASS_NARROW:
            blocks, per_core = max(TWO_PASS_BLOCKS, blocks), TWO_PASS_PER_CORE
        else:
            per_warp, per_core = TWO_PASS_ELEMENTS_PER_WARP, WIDE_PER_CORE
        blocks = max(1, min(blocks, power_of_two(problem.n_sources) // 2))
    if row > 8192:  # a row takes most of a core's registers
        blocks, per_warp, per_core = 1, 1024, 1
        stages = STAGES if problem.kind in BACKWARDS else STAGES + 1
    block_n = min(power_of_two(problem.n_sources), blocks)
    warps = max(MIN_WARPS, block_n * row // per_warp)
    if chunks > 1:
        warps, stages = max(1, chunk // WARP_COLUMNS), stages + (4096 < row <= 8192)
        per_core = NARROW_PER_CORE if warps <= 2 else per_core
    launch = Launch(
        problem, device, 1, 1, chunk, block_n=block_n, warps=warps, stages=stages, per_core=per_core, chunks=chunks
    )
    while shared_bytes(launch) > device.ub_bytes:
        launch = _fewer_under_way(launch)
    return launch


def _chunks(width: int) -> tuple[int, int]:
    """Columns of the equal chunks of a row that pad it least, and how many there are: the fewest of equal padding.

    One of 7168 columns, which the next power of two pads by a seventh, is faster whole.
    """
    whole = power_of_two(width)
    sizes = [whole >> halvings for halvings in range(4) if whole >> halvings >= LEAST_CHUNK] or [whole]
    padded, _, chunk = min((ceil(width / size) * size, -size, size) for size in sizes if width <= size * MOST_CHUNKS)
    return (chunk, padded // chunk) if whole > LEAST_PADDING * padded else (whole, 1)


def _shared_launch(problem: Problem, device: Device) -> Launch | None:
    """A few blocks and columns of a token in registers; None where too many programs would share one."""
    tiles = power_of_two(ceil(problem.n_sources / SHARED_BLOCKS))
    block_n = power_of_two(ceil(problem.n_sources / tiles))
    block_d = min(SHARED_BYTES // problem.itemsize // block_n, SHARED_COLUMNS, power_of_two(problem.width))
    share = ceil(problem.width / block_d) * tiles
    if share == 1 or share > SHARED_MOST or block_n * power_of_two(share) > SHARED_WORDS:
        return None
    launch = Launch(
        problem, device, 1, 1, block_d, block_n=block_n, warps=SHARED_WARPS, stages=STAGES, per_core=SHARED_PER_CORE,
        share=share, tiles=tiles
    )  # fmt: skip
    while launch.per_core * shared_bytes(launch) > device.ub_bytes:
        if launch.stages == 2:
            return None
        launch = dataclasses.replace(launch, stages=launch.stages - 1)
    return launch if share <= device.vector_cores * launch.per_core else None


def _held_launch(problem: Problem, device: Device, block_d: int) -> Launch | None:
    """One token at a time, its blocks in registers; None where there are too many."""
    block_n = power_of_two(problem.n_sources)
    elements = block_n * block_d
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
    return Launch(problem, device, 1, 1, block_d, block_n=block_n, warps=warps, stages=STAGES, per_core=per_core, held=True)


def shared_bytes(launch: Launch) -> int:
    """Shared memory that a program takes: the tiles that its loop has under way, but for the one in use."""
    problem, rows = launch.problem, launch.block_n
    if launch.held or launch.share:  # in a loop over tokens rows beside the blocks are under way, too
        beside = {Kind.FORWARD_NORMALISED: 1, Kind.BANK: 3, Kind.BACKWARD: 1, Kind.BACKWARD_FP32: 2, Kind.BANK_BACKWARD: 3}
        rows += beside.get(problem.kind, 0)
    row_bytes = launch.block_d * launch.chunks * problem.itemsize
    return (launch.stages - 1) * rows * row_bytes + (SHARED_SCRATCH_BYTES if launch.share else SCRATCH_BYTES)


def smaller(launch: Launch) -> Launch | None:
    """The next smaller launch for a kernel that needs more than the device has; None at the end.

    The last one of a kernel for whole rows has fewer columns than a row: none fits, and other kernels are to take columns.
    """
    if launch.share:
        return _looped_launch(launch.problem, launch.device, power_of_two(launch.problem.width))
    if launch.block_n > 1 or launch.stages > 1:
        return _fewer_under_way(launch)
    if launch.warps > 4:  # the registers of all threads
        return dataclasses.replace(launch, warps=launch.warps // 2)
    if launch.block_d == 1 or launch.problem.kind not in COLUMN_KINDS and not launch.whole_rows:
        return None
    return dataclasses.replace(launch, block_n=0, block_d=launch.block_d // 2, chunks=1)


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
