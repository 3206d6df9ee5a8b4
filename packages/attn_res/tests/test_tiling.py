"""Tiling is plain arithmetic: no Triton, no device."""

import dataclasses
import subprocess
import sys

import pytest
from npu_attn_res import tiling
from npu_attn_res.tiling import Problem, columns_launch, cuda, row_launch, smaller, weights_launch
from npu_tiling import SOCS, Device, soc

B4 = soc("Ascend910B4")
H200 = Device("H200", "cuda", "sm_90", 132, 132, 232448, max_grid=2**31 - 1)
WIDTHS = [1, 7, 16, 123, 1000, 4096, 5120, 7168, 8192, 16384, 65536]
ROW_KERNELS = [
    "forward",
    "forward, normalised",
    "backward",
    "backward from fp32",
    "merge",
    "merge backward",
    "norm backward",
]


def test_importing_tilings_needs_neither_triton_nor_a_device():
    code = "import sys; sys.modules['triton'] = None; import npu_attn_res; sys.exit('torch.cuda.nvtx' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("chip", [*SOCS.values(), H200], ids=lambda chip: chip.name)
def test_every_launch_covers_the_rows_within_the_grid(chip):
    problems = [Problem(kernel, width, size, n_sources=8) for kernel in ROW_KERNELS for width in WIDTHS for size in (2, 4)]
    launches = [launch for problem in problems if (launch := row_launch(problem, chip)) is not None]
    layers = [
        Problem(kernel, width, 2, n_layers)
        for kernel in tiling.COLUMN_KINDS
        for width in WIDTHS
        for n_layers in (1, 3, 12, 64)
    ]
    launches += [columns_launch(problem, chip) for problem in layers]
    assert len(launches) > len(layers) + len(problems) // 2
    for launch in launches:
        assert launch.column_blocks * launch.block_d >= launch.problem.width
        assert launch.block_s >= launch.problem.layers
        for n_tokens in (1, 77, 10**6):
            assert 1 <= launch.grid(n_tokens) <= chip.max_grid
            assert launch.splits(n_tokens) >= 1
        if chip.kind == "ascend":
            assert launch.grid(10**6) <= chip.vector_cores
            assert tiling.ub_bytes(launch) <= chip.ub_bytes


def test_small_rows_share_a_tile_and_wide_ones_are_taken_the_fastest_way_that_fits():
    for kernel in ("forward", "backward"):
        for width in (64, 512, 1000, 2048):
            assert row_launch(Problem(kernel, width, 2), B4).block_m >= 2
    assert row_launch(Problem("forward", 4096, 2), B4).block_m == 2
    assert row_launch(Problem("forward", 5120, 2), B4).double_buffered
    assert row_launch(Problem("backward", 4096, 2), B4).prefetch
    assert row_launch(Problem("backward", 5120, 2), B4).double_buffered
    for width in (4096, 7168):
        launch = row_launch(Problem("forward", width, 2), B4)
        assert launch.prefetch  # the kernel doubles its buffer itself
        assert not launch.double_buffered
    assert not row_launch(Problem("forward", 8192, 2), B4).prefetch
    assert row_launch(Problem("forward", 16384, 2), B4) is None


def test_layers_share_a_tile_as_long_as_they_fit():
    assert row_launch(Problem("forward of layers", 1024, 2, 5), B4).block_s == 5
    assert row_launch(Problem("forward of layers", 4096, 2, 8), B4) is None
    assert row_launch(Problem("forward of layers", 4096, 2, 5), H200).block_s == 8


def test_blocks_of_one_token_are_held_where_they_fit():
    held = {(1024, 8): True, (4096, 8): True, (4096, 16): False, (7168, 16): False, (16384, 1): False}
    for (width, n_blocks), wanted in held.items():
        launch = row_launch(Problem("backward", width, 2, n_sources=n_blocks), H200)
        assert launch.held == wanted == (launch.block_n == n_blocks and width <= 8192)


@pytest.mark.parametrize("n_blocks", [5, 8, 12, 16, 32])
@pytest.mark.parametrize("width", [2048, 5120, 7168, 16384])
@pytest.mark.parametrize("kernel", ["backward", "backward from fp32", "backward beside a prefix"])
def test_programs_that_share_a_token_are_resident_at_once_and_have_all_of_it(kernel, width, n_blocks):
    for size in (2, 4):
        launch = row_launch(Problem(kernel, width, size, n_sources=n_blocks), H200)
        assert launch.share or (width, n_blocks, size) != (7168, 8, 2)
        if not launch.share:
            continue
        constants = launch.constants
        assert constants["PER_TILE"] * constants["TILES"] >= n_blocks
        assert constants["PER_TILE"] <= constants["BLOCK_N"]
        assert constants["BLOCK_D"] * constants["SHARE"] // constants["TILES"] >= width
        assert constants["BLOCK_D"] >= constants["VECTOR"] * launch.warps * 32  # all warps side by side
        for n_tokens in (1, 7, 10**6):
            grid = launch.grid(n_tokens)
            assert grid % launch.share == 0
            assert launch.share <= grid <= H200.vector_cores * launch.per_core
            assert launch.partials(n_tokens) == grid // launch.share * launch.tiles
        assert launch.per_core * cuda.shared_bytes(launch) <= H200.ub_bytes
        assert not smaller(launch).share  # where the driver refuses programs that wait for one another


def test_rows_between_powers_of_two_come_in_chunks_with_little_padding():
    for width in (2304, 2560, 2880, 3072, 3584, 5120, 6144, 7168, 10240):
        launch = row_launch(Problem("forward", width, 2, n_sources=8), H200)
        assert width <= launch.chunks * launch.block_d <= 1.2 * width
        assert launch.chunks == 1 or launch.block_d == 256 * launch.warps  # all warps side by side


def test_ascend_tiles_are_whole_aligned_pieces():
    assert row_launch(Problem("forward", 123, 2), B4).block_d == 128
    assert row_launch(Problem("forward", 1000, 2), B4).block_d == 1008
    assert row_launch(Problem("forward", 1000, 4), B4).block_d == 1000
    assert columns_launch(Problem("products", 20011, 2), B4).block_d % 16 == 0


def test_a_tile_stays_inside_32_bits():
    far = Problem("forward", 64, 2, row_stride=2**30)
    assert (row_launch(far, B4).block_m - 1) * 2**30 + 64 < 2**31


@pytest.mark.parametrize("problem", [Problem("forward", 1000, 2), Problem("merge", 4096, 2), Problem("gradient", 16384, 2)])
def test_smaller_launches_shrink_to_an_end(problem):
    launch = columns_launch(problem, B4) if problem.kind in tiling.COLUMN_KINDS else row_launch(problem, B4)
    seen = [launch]
    while (following := smaller(seen[-1])) is not None:
        seen.append(following)
        assert len(seen) < 100
    assert len(set(seen)) == len(seen)
    assert seen[-1].block_d == 16 if problem.kind == "gradient" else not seen[-1].whole_rows


def test_partial_sums_are_spread_over_the_cores():
    assert weights_launch(4096, B4).grid >= 32
    assert weights_launch(1, B4).grid == 1
    for width in WIDTHS:
        launch = weights_launch(width, B4)
        assert launch.grid * launch.block_d >= width


CUDA_DEVICES = {"H200": 232448, "A100": 166912, "RTX 4090": 101376, "T4": 65536, "none": 0}


@pytest.mark.parametrize("shared", CUDA_DEVICES.values(), ids=list(CUDA_DEVICES))
def test_tiles_under_way_fit_in_the_shared_memory_of_a_program(shared):
    """Triton 3.6 takes 262,208 bytes for two blocks of 16384 fp32 columns and three stages, and an H200 has 232,448."""
    device = dataclasses.replace(H200, ub_bytes=shared + cuda.SCRATCH_BYTES)
    for kernel in ("forward", "forward, normalised", "backward", "backward from fp32"):
        for width in (1, 123, 4096, 8193, 12288, 16384):
            for size in (2, 4):
                for n_blocks in (1, 2, 4, 16, 64):
                    launch = row_launch(Problem(kernel, width, size, 1, width, n_blocks), device)
                    under_way = (launch.stages - 1) * launch.block_n * launch.block_d * launch.chunks * size
                    assert under_way <= shared
                    assert launch.whole_rows
    widest = cuda.row_launch(Problem("forward", 16384, 4, n_sources=2), H200)
    assert (widest.block_n, widest.stages) == (1, 4)


def test_on_cuda_a_smaller_launch_ends_in_kernels_that_take_columns():
    launch = row_launch(Problem("backward", 2048, 4, n_sources=16), H200)
    seen = []
    while launch is not None:
        seen.append(launch)
        assert not launch.block_n or launch.held == (launch.block_n >= 16)
        launch = smaller(launch)
    assert [one.block_n for one in seen] == sorted((one.block_n for one in seen), reverse=True)
    assert not seen[-1].whole_rows
    assert all(one.whole_rows for one in seen[:-1])
    launch = columns_launch(Problem("gradient", 100, 2, 3), H200)
    while launch.block_d > 1:
        launch = smaller(launch)
    assert smaller(launch) is None
