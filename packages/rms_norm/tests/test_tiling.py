"""Tiling is plain arithmetic: no Triton, no device."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
from npu_rms_norm import tiling
from npu_rms_norm.tiling import Problem, backward_launch, forward_launch, smaller, sum_launch
from npu_tiling import SOCS, Device, soc

B4 = soc("Ascend910B4")
H200 = Device("H200", "cuda", "sm_90", 132, 132, 232448, max_grid=2**31 - 1)
WIDTHS = [1, 7, 16, 123, 512, 1000, 4096, 5120, 7168, 8192, 16384, 65536]


def problem(width, itemsize=2, rows=2048, **changes):
    return dataclasses.replace(Problem(1, rows, width, width, 0, (itemsize,), itemsize < 4), **changes)


def test_importing_tilings_needs_neither_triton_nor_a_device():
    code = "import sys; sys.modules['triton'] = None; import npu_rms_norm; sys.exit('torch.cuda.nvtx' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("chip", [*SOCS.values(), H200], ids=lambda chip: chip.name)
@pytest.mark.parametrize("choose", [forward_launch, backward_launch])
def test_every_launch_covers_the_rows_within_the_grid(choose, chip):
    for width in WIDTHS:
        for itemsize in (2, 4):
            launch = choose(problem(width, itemsize), chip)
            assert launch.block_g * launch.block_m * launch.row_tiles >= 2048
            assert launch.column_blocks * launch.block_n >= width
            assert (launch.form == "rows") == (launch.column_blocks == 1)
            assert chip.kind == "cuda" or launch.form in ("rows", "wide")
            assert 1 <= launch.grid <= chip.max_grid
            if chip.kind == "ascend":
                assert launch.grid <= chip.vector_cores
                assert launch.column_grid <= chip.vector_cores
                assert launch.ub_bytes <= chip.ub_bytes


@pytest.mark.parametrize("choose", [forward_launch, backward_launch])
@pytest.mark.parametrize("chip", [B4, H200], ids=lambda chip: chip.name)
def test_blocks_do_not_depend_on_the_number_of_rows(choose, chip):
    for width in WIDTHS:
        blocks = {tuple(choose(problem(width, rows=rows), chip).constants.items()) for rows in (1, 2, 3, 77, 4096, 10**7)}
        assert len(blocks) == 1


def test_small_rows_share_a_tile_and_rows_up_to_8192_are_read_once():
    for width in (64, 512, 1000, 2048):
        assert forward_launch(problem(width), B4).block_m >= 2
        assert backward_launch(problem(width), B4).block_m >= 2
    for width in WIDTHS[:-2]:
        assert not forward_launch(problem(width), B4).wide
        assert not backward_launch(problem(width, itemsizes=(2, 2)), B4).wide


def test_ascend_tiles_are_whole_aligned_pieces():
    assert forward_launch(problem(123), B4).block_n == 128
    assert forward_launch(problem(1000), B4).block_n == 1008
    assert forward_launch(problem(1000, 4), B4).block_n == 1000
    assert forward_launch(problem(65536), B4).block_n % 16 == 0


def test_a_backward_on_an_ascend950_takes_no_row_alone():
    """Its compilers would sum the row up again and again."""
    for width in WIDTHS:
        for itemsize in (2, 4):
            launch = backward_launch(problem(width, itemsize), soc("Ascend950PR_957b"))
            assert launch.wide or launch.block_m > 1
    assert backward_launch(problem(8192), soc("Ascend950PR_957b")).wide


def test_rows_are_shared_out_evenly_where_they_lie_on_one_level():
    for choose in (forward_launch, backward_launch):
        assert choose(problem(512), B4).constants["CONTIGUOUS_SPLIT"]
        assert choose(problem(512, rows=100), B4).grid == 40
        assert choose(problem(512, rows=7), B4).grid == 7
        assert not choose(problem(512, n_outer=2), B4).constants["CONTIGUOUS_SPLIT"]
        assert not choose(problem(512), H200).constants["CONTIGUOUS_SPLIT"]


def test_small_groups_share_a_tile_whole():
    """Heads of a fused projection: a few rows side by side, then a long way to the next ones."""
    heads = Problem(4096, 8, 128, 128, 3 * 8 * 128, (2, 2), True)
    for choose, groups in ((forward_launch, 6), (backward_launch, 5)):
        launch = choose(heads, B4)
        assert (launch.block_g, launch.block_m) == (groups, 8)
        assert launch.row_tiles == -(-4096 // groups)
    assert forward_launch(dataclasses.replace(heads, outer_stride=2**30), B4).block_g == 1
    assert forward_launch(dataclasses.replace(heads, n_inner=100), B4).block_g == 1


def test_rows_of_a_group_are_shared_out_evenly_over_its_tiles():
    gated = Problem(4096, 32, 128, 128, 2 * 32 * 128, (2, 2, 2), True, gated=True)
    assert backward_launch(gated, B4).block_m == 16  # 29 would fit, and leave a tile of three rows to every group
    assert forward_launch(gated, B4).block_m == 32


def test_a_tile_of_several_rows_leaves_room_to_spare():
    """A tile that fills the Unified Buffer is predicted to take up to twice the time: its transfers wait for arithmetic."""
    for options in ({}, {"biased": True}, {"gated": True, "itemsizes": (2, 2, 2)}):
        for width in (64, 128, 256, 512):
            launch = backward_launch(problem(width, **{"itemsizes": (2, 2), **options}), B4)
            assert launch.block_m > 2
            assert launch.ub_bytes <= B4.ub_bytes * 7 // 8
    added = {"itemsizes": (2, 2)}
    assert forward_launch(problem(2048, **added), B4).block_m == 3
    assert forward_launch(problem(4096, **added), B4).block_m == 1  # a residual's sum is one more tile
    assert forward_launch(problem(4096), B4).block_m == 2
    assert forward_launch(problem(4096, biased=True, rounded=True), B4).block_m == 1


def test_on_cuda_a_tile_takes_rows_of_any_heads():
    for choose in (forward_launch, backward_launch):
        for heads in (3, 8, 28, 32):
            launch = choose(Problem(4096, heads, 128, 128, 3 * heads * 128, (2, 2), True), H200)
            plain = choose(problem(128), H200)
            assert launch.block_g == -heads
            assert (launch.block_m, launch.block_n, launch.warps) == (plain.block_m, plain.block_n, plain.warps)
            assert launch.row_tiles == -(-4096 * heads // launch.block_m)
        tokens = Problem(8, 4096, 128, 128, 2**20, (2, 2), True)  # a kernel for each length of a sequence would be many
        assert choose(tokens, H200).block_g == 1
    own = Problem(32, 4096, 128, 32 * 128, 128, (2,), True, per_head=True)  # the forward's tiles go along the tokens
    assert (forward_launch(own, H200).block_g, backward_launch(own, H200).block_g) == (-32, 1)
    assert forward_launch(own, H200).row_tiles == 32 * 4096 // forward_launch(own, H200).block_m


def test_a_program_takes_rows_of_one_head_where_each_has_a_weight():
    for heads in (1, 3, 32, 100):
        own = problem(128, n_outer=heads, rows=5000, per_head=True)
        for choose, chip in itertools.product((forward_launch, backward_launch), (B4, H200)):
            launch = choose(own, chip)
            if chip is H200 and choose is forward_launch and heads > 1:
                assert launch.block_g == -heads  # a program takes one tile, whose rows are of any heads
                continue
            assert launch.grid % heads == 0
            assert launch.splits % heads == 0
            assert not launch.constants.get("CONTIGUOUS_SPLIT")
            assert launch.block_g == 1
        assert forward_launch(own, B4).grid % 40 == 0  # every core is busy in every round
    assert backward_launch(problem(65536, n_outer=3, rows=50, per_head=True), B4).splits == 3


def test_a_tile_stays_inside_a_group_and_inside_32_bits():
    grouped = problem(64, n_outer=100, rows=100)
    assert forward_launch(grouped, B4).block_m <= 100
    assert backward_launch(problem(64, n_outer=100, rows=4, per_head=True), H200).block_m <= 4
    far = problem(64, inner_stride=2**30)
    assert (forward_launch(far, B4).block_m - 1) * 2**30 + 64 < 2**31
    assert forward_launch(problem(64, inner_stride=2**31 + 5), H200).block_m == 1


@pytest.mark.parametrize("choose", [forward_launch, backward_launch])
def test_smaller_launches_shrink_to_an_end(choose):
    launch = choose(problem(4096), B4)
    seen = [launch]
    while (following := smaller(seen[-1])) is not None:
        seen.append(following)
        assert len(seen) < 100
    assert len(set(seen)) == len(seen)
    assert seen[-1].block_n == 16
    assert any(not launch.wide and not launch.double_buffered for launch in seen)
    assert smaller(choose(problem(4096), H200)) is None


def test_programs_that_share_a_row_are_resident_at_once():
    for width in (16385, 20000, 65536, 131072):
        launch = backward_launch(problem(width), H200)
        assert launch.form == "shared"
        assert launch.grid == launch.splits * launch.share <= H200.vector_cores * launch.per_core
        assert width <= launch.share * launch.block_n < width + launch.block_n
        assert launch.options["maxnreg"] * 32 * launch.warps * launch.per_core <= 65536
        assert launch.options["launch_cooperative_grid"]
        assert backward_launch(problem(width, rows=3), H200).splits == 3
        assert smaller(launch).form == "wide"
        assert smaller(smaller(launch)) is None
    few_cores = dataclasses.replace(H200, vector_cores=7)
    for other, chip in (
        (problem(131073), H200),
        (problem(65536), few_cores),
        (problem(65536, gated=True), H200),
        (problem(65536, per_head=True), H200),
        (problem(65536, biased=True), H200),
        (problem(65536, with_rows=False), H200),
    ):
        assert backward_launch(other, chip).form == "wide"


def test_chunks_pad_a_row_by_a_quarter_at_most_and_are_held_in_registers():
    for width in range(1025, 16385, 13):
        launch = backward_launch(problem(width), H200)
        assert launch.block_n & (launch.block_n - 1) == 0
        assert launch.column_blocks * launch.block_n <= 1.25 * width or launch.form == "rows"
        assert launch.column_blocks * launch.block_n <= 64 * 32 * launch.warps
    for width in (2560, 3072, 3584, 5120, 6144, 7168):
        launch = backward_launch(problem(width), H200)
        assert (launch.form, launch.column_blocks * launch.block_n) == ("chunks", width)


def test_launches_that_are_held_to_registers_leave_room_for_the_others():
    for width in (64, 128, 512, 2560, 4096, 7168, 16384):
        for options in ({}, {"biased": True}, {"gated": True, "itemsizes": (2, 2, 2)}, {"rows": 3}):
            for choose in (forward_launch, backward_launch):
                launch = choose(problem(width, **options), H200)
                resident = min(launch.per_core, 64 // launch.warps)
                assert launch.options.get("maxnreg", 0) * 32 * launch.warps * resident <= 65536
                assert 32 <= launch.options.get("maxnreg", 32) <= 255
                assert choose is forward_launch or launch.held


def test_quantised_rows_are_read_once_up_to_16384_columns():
    for width in (100, 2048, 2880, 4096, 7168, 8192, 16384):
        assert not forward_launch(problem(width, quantised=True), H200).wide
    assert forward_launch(problem(16385, quantised=True), H200).wide
    assert forward_launch(problem(4096), H200).wide  # two reads, the second from a cache, take less


def test_partial_sums_are_spread_over_the_cores():
    assert sum_launch(4096, B4).grid == 40
    assert sum_launch(1, B4).grid == 1
    for width in WIDTHS:
        launch = sum_launch(width, B4)
        assert launch.grid * launch.block_n >= width


def test_a_row_of_any_width_has_a_tile():
    assert tiling.forward_launch(problem(10**7), B4).wide
    assert tiling.backward_launch(problem(10**7), B4).wide
