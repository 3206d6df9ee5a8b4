"""The tiling is plain arithmetic: it fits every chip, and follows its own rules."""

import dataclasses

import npu_tiling
import pytest
from npu_embedding import tiling
from npu_tiling import SOCS, footprint

WIDTHS = [*range(1, 200), 256, 768, 1000, 1024, 2048, 3584, 4096, 5120, 7168, 8192, 9000, 12288, 16384, 16411, 65536, 100003]
CHOOSE = [tiling.forward_launch, tiling.runs_launch, tiling.finish_launch]
CHOOSE_ON_CUDA = [tiling.forward_launch, tiling.runs_launch, tiling.partials_launch, tiling.sums_launch]
CHIPS = {(soc.ub_bytes, soc.vector_cores): soc for soc in SOCS.values()}.values()
GPU = npu_tiling.Device("a GPU", "cuda", "sm_90", vector_cores=132, cube_cores=132, ub_bytes=232448, ub_align=16)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("choose", CHOOSE)
def test_every_launch_fits_and_moves_whole_rows_or_8_kb(choose, itemsize):
    for chip in CHIPS:
        for width in WIDTHS:
            launch = choose(width, itemsize, chip)
            assert footprint(launch.tiles, {}, chip) <= chip.ub_bytes
            assert launch.block_n <= width
            assert launch.column_blocks * launch.block_n >= width
            if launch.column_blocks > 1:
                assert launch.block_n * itemsize >= 8192
                assert launch.block_n * itemsize % 32 == 0
                # Columns that two blocks have in common: less than a unit a block.
                assert (launch.column_blocks * launch.block_n - width) * itemsize < 32 * launch.column_blocks
            assert not launch.masks_columns


def test_rows_are_gathered_where_they_fill_units():
    chip = SOCS["Ascend910B4"]
    for width, gathers in ((8, True), (7, False), (123, False), (768, True), (16411, True)):
        launch = tiling.forward_launch(width, 4, chip)
        assert launch.constants["GATHER"] == gathers
        assert launch.block_m >= 2


def test_grids_are_persistent():
    chip = SOCS["Ascend910B4"]
    forward, finish = tiling.forward_launch(768, 4, chip), tiling.finish_launch(768, 4, chip)
    assert forward.grid(1) == finish.grid(1) == 1
    assert forward.grid(16384) == finish.grid(131072) == chip.vector_cores
    for launch in (tiling.keys_launch(chip), tiling.offsets_launch(chip)):
        assert launch.grid(1) == 1 and launch.grid(10**6) == chip.vector_cores
    wide = tiling.runs_launch(16384, 4, chip)
    assert wide.column_blocks * wide.chunks(10**6) <= chip.vector_cores
    assert tiling.runs_launch(768, 4, chip).chunks(10**6) == chip.vector_cores
    assert tiling.runs_launch(768, 4, chip).chunks(17) == 3


def test_cuda_blocks_are_powers_of_two_and_masked_only_where_they_must_be():
    for width in WIDTHS:
        for itemsize in (2, 4):
            for choose in CHOOSE_ON_CUDA:
                launch = choose(width, itemsize, GPU)
                for block in (launch.block_m, launch.block_n, launch.block_p, launch.warps):
                    assert block & (block - 1) == 0
                assert launch.masks_columns == (width % launch.block_n != 0)
                assert launch.options == {"num_warps": launch.warps}
    assert tiling.forward_launch(768, 4, GPU).block_n == 256
    assert tiling.sums_launch(768, 4, GPU).chunks(10**6) * 3 <= 4 * 132 * 32
    assert tiling.smaller(tiling.forward_launch(768, 4, GPU)) is None


def test_a_group_of_sorted_indices_is_a_power_of_two_of_programs():
    sort, rank = tiling.sort_launch(GPU), tiling.rank_launch(GPU)
    assert sort.group == rank.group == 2 ** rank.constants["STEPS"]
    for launch in (sort, rank):
        assert launch.constants["GROUP"] == launch.group
        assert launch.constants["BLOCK_M"] == launch.block_m
        assert launch.group % launch.block_m == 0
        assert launch.grid(5) * launch.block_m == 5 * launch.group


@pytest.mark.parametrize("width", WIDTHS)
def test_programs_that_sum_and_store_zeros_reach_all_rows(width):
    launch = tiling.sums_launch(width, 2, GPU)
    assert launch.zero_n & (launch.zero_n - 1) == 0
    for rows in (1, 3, 1000, 151936):
        sums = launch.chunks(5000) * launch.column_blocks
        assert launch.zeros(rows, sums) * sums * launch.block_m >= rows
        assert (launch.zeros(rows, sums) - 1) * sums * launch.block_m < rows
    assert tiling.partials_launch(width, 2, GPU).grid(18) == 2 * tiling.partials_launch(width, 2, GPU).column_blocks


@pytest.mark.parametrize("choose", CHOOSE)
def test_smaller_launches_end_at_one_unit(choose):
    launch, seen = choose(4096, 2, SOCS["Ascend910B4"]), []
    while launch is not None:
        seen.append((launch.block_m, launch.block_n))
        assert launch.column_blocks * launch.block_n >= 4096
        launch = tiling.smaller(launch)
    assert len(set(seen)) == len(seen) > 5
    assert seen[-1][1] == 16


def test_what_cannot_fit_says_what_needs_how_much():
    tiny = dataclasses.replace(SOCS["Ascend910B4"], name="tiny", ub_bytes=32)
    for choose in CHOOSE:
        with pytest.raises(npu_tiling.UnifiedBufferError, match="tiny has 32"):
            choose(4096, 4, tiny)
