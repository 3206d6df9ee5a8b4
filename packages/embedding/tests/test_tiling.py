"""The tiling is plain arithmetic: it fits every chip, and follows its own rules."""

import dataclasses
from functools import partial

import npu_tiling
import pytest
from npu_embedding import lookup as operator
from npu_embedding.bags import ascend as bags
from npu_embedding.lookup import (
    ascend,
    ascend_sort,
    cuda,
    cuda_sort,
)
from npu_embedding.ngram import ascend as ngram
from npu_embedding.rows import RowShape, Way
from npu_tiling import SOCS

from testing.operators import *  # noqa: F403

WITHOUT_TRITON = ("npu_embedding", "tokens=8, vocabulary=9, width=64", "embedding(torch.arange(4), torch.randn(9, 64))")
WIDTHS = [*range(1, 200), 256, 768, 1000, 1024, 2048, 3584, 4096, 5120, 7168, 8192, 9000, 12288, 16384, 16411, 65536, 100003]
CHOOSE = [ascend.gather_tiling, ascend.sums_tiling, ascend.PARTIALS.tiling]
CHIPS = {(soc.ub_bytes, soc.vector_cores): soc for soc in SOCS.values()}.values()
CHIP = SOCS["Ascend910B4"]
GPU = npu_tiling.Device("a GPU", "cuda", "sm_90", vector_cores=132, cube_cores=132, ub_bytes=232448, ub_align=16)


def rows(width, itemsize=4, device=CHIP):
    return RowShape(width=width, itemsize=itemsize, device=device)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("choose", CHOOSE)
def test_every_launch_fits_and_moves_whole_rows_or_8_kb(choose, itemsize):
    for chip in CHIPS:
        for width in WIDTHS:
            launch = choose(rows(width, itemsize, chip))
            assert launch.ub_bytes <= chip.ub_bytes
            assert launch.block_n <= width
            assert launch.column_blocks * launch.block_n >= width
            if launch.column_blocks > 1:
                assert launch.block_n * itemsize >= 8192
                assert launch.block_n * itemsize % 32 == 0
                # Columns that two blocks have in common: less than a unit a block.
                assert (launch.column_blocks * launch.block_n - width) * itemsize < 32 * launch.column_blocks


def test_rows_move_in_tiles_where_they_fill_units():
    for width, in_tiles in ((8, True), (7, False), (123, False), (768, True), (16411, True)):
        launch = ascend.gather_tiling(rows(width))
        assert launch.constants["GATHER"] == in_tiles
        assert launch.block_m >= 2


def test_grids_are_persistent():
    gather, partials = ascend.gather_tiling(rows(768)), ascend.PARTIALS.tiling(rows(768))
    assert gather.grid(1) == partials.grid(1) == 1
    assert gather.grid(16384) == partials.grid(131072) == CHIP.vector_cores
    for launch in (ascend.slots_tiling(CHIP), ascend_sort.WAYS[0].tiling(CHIP, dict(ascend_sort.SORT), 1)):
        assert launch.grid(1) == 1 and launch.grid(10**6) == CHIP.vector_cores
    wide = ascend.sums_tiling(rows(16384))
    assert wide.column_blocks * ascend.chunks(wide, 10**6) <= CHIP.vector_cores
    narrow = ascend.sums_tiling(rows(768))
    assert ascend.chunks(narrow, 10**6) == CHIP.vector_cores
    assert ascend.chunks(narrow, 17) == 3


@pytest.mark.parametrize("choose", CHOOSE)
def test_smaller_launches_end_at_one_unit(choose):
    launch, seen = choose(rows(4096, 2)), []
    while launch is not None:
        seen.append((launch.block_m, launch.block_n))
        assert launch.column_blocks * launch.block_n >= 4096
        launch = launch.smaller()
    assert len(set(seen)) == len(seen) > 5
    assert seen[-1][1] == 16


@pytest.mark.parametrize("choose", [partial(ngram.choose, concat=concat) for concat in (True, False)])
def test_smaller_ngram_launches_hash_whole_units_of_tokens(choose):
    for width in WIDTHS:
        launch = choose(rows(width))
        while launch is not None:
            assert launch.block_m % 8 == 0
            last, launch = launch, launch.smaller()
        assert last.block_m == 8
        assert last.block_n == min(width, 8)


@pytest.mark.parametrize("kernel", [bags.BAG_TILES, bags.SPREAD_TILES])
def test_smaller_tiles_of_bags_have_whole_rows(kernel):
    for width in WIDTHS:
        launch = bags.tiles_of_bags(kernel, rows(width))
        while launch is not None:
            assert launch.block_n == width or not launch.constants["TILES"]
            launch = launch.smaller()


def test_what_cannot_fit_says_what_needs_how_much():
    tiny = dataclasses.replace(CHIP, name="tiny", ub_bytes=32)
    for choose in CHOOSE:
        with pytest.raises(npu_tiling.UnifiedBufferError, match="tiny has 32"):
            choose(rows(4096, 4, tiny))


@pytest.mark.parametrize(
    ("device", "indices", "n_rows", "width", "way"),
    [
        (CHIP, 1, 2**30, 8, Way.MERGED),
        (CHIP, 2**30, 1, 8, Way.MERGED),
        (GPU, 1, 2**30, 2**18, Way.SEARCHED),
        (GPU, 1, 2**30, 2**18 + 1, Way.RANKED),
        (GPU, cuda_sort.SEARCHED, 1, 256, Way.SEARCHED),
        (GPU, cuda_sort.SEARCHED, 257, 257, Way.RANKED),
        (GPU, cuda_sort.SEARCHED, 256, 257, Way.REPEATED),
        (GPU, cuda_sort.SEARCHED + 1, 2**30, 8, Way.RANKED),
        (GPU, 1, 2**30 + 1, 8, Way.SORTED),
        (GPU, 131072, 32769, 8, Way.RANKED),
        (GPU, 131072, 32768, 256, Way.RANKED),
        (GPU, 131072, 16384, 256, Way.REPEATED),
        (GPU, 131072, 32768, 8, Way.REPEATED),
        (GPU, 65536, 2**30 + 1, 8, Way.SORTED),
        (GPU, 131073, 1, 8, Way.SORTED),
    ],
)
def test_the_way_follows_from_the_numbers_of_indices_and_rows(device, indices, n_rows, width, way):
    chosen = operator.choose(indices, n_rows, width, device)
    assert chosen.way is way
    file, _, line = chosen.decided_at.partition(":")
    module = ascend_sort if device is CHIP else cuda_sort
    assert module.__file__.endswith(file)
    with open(module.__file__) as source:
        assert way.name in source.readlines()[int(line) - 1]


def test_the_last_row_and_place_are_an_fp32_number():
    last = ascend_sort.KEY_OF_ROW_0 + (ascend_sort.MAX_ROWS_OF_ONE_DIGIT + 1) * ascend_sort.BLOCK + ascend_sort.BLOCK - 1
    assert last < 0x7F800000  # the bits of infinity


def test_a_search_ends_when_all_keys_are_found():
    for n in (0, 1, 2, 5, 2048, 2049, 8192, 10**6):
        left = n
        for _ in range(ascend_sort.search_steps(n)):
            assert left > 0
            left -= max(left - 1, 0) // 4 + 1
        assert left == 0


def test_cuda_blocks_are_powers_of_two():
    for width in WIDTHS:
        for itemsize in (2, 4):
            for choose in (cuda.gather_tiling, cuda.sums_tiling, cuda.partials_tiling, cuda.search_tiling):
                launch = choose(rows(width, itemsize, GPU))
                assert launch.options == {"num_warps": launch.warps}
                for name, block in (*launch.constants.items(), ("warps", launch.warps)):
                    assert name == "N" or block & (block - 1) == 0
    assert cuda.gather_tiling(rows(768, 4, GPU)).constants["BLOCK_N"] == 256
    assert cuda.chunks(cuda.sums_tiling(rows(768, 4, GPU)), 10**6) * 3 <= 4 * 132 * 32
    assert cuda.gather_tiling(rows(768, 4, GPU)).smaller() is None
    partials = cuda.partials_tiling(rows(768, 4, GPU))
    assert partials.grid(partials.per_program + 1) == 2 * partials.column_blocks


def test_a_search_takes_all_indices_at_once_and_its_rows_of_zeros_fit_the_bits_of_a_number():
    for width in WIDTHS:
        for itemsize in (2, 4):
            launch = cuda.search_tiling(rows(width, itemsize, GPU))
            blocks = launch.constants
            assert blocks["BLOCK_M"] == cuda_sort.SEARCHED and cuda_sort.SEARCHED % blocks["BLOCK_K"] == 0
            assert blocks["ZERO_M"] == launch.per_program <= 32
            assert blocks["BLOCK_K"] * blocks["BLOCK_N"] <= 4096  # fp32 sums, 32 for each thread


def test_stages_make_one_run_of_sorted_groups():
    for n_rows, wide in ((1, False), (2**22 - 2, False), (2**22 - 1, True), (2**30, True)):
        sort = cuda_sort.sort_tiling(cuda_sort.WAYS[0], GPU, n_rows)
        assert (2 ** sort.constants["LOG"], sort.constants["WIDE"]) == (cuda_sort.GROUP, wide)
        assert sort.grid(5 * cuda_sort.GROUP) == 5
    for n in (1, 600, 16384, 16385, 40000, 131072):
        stages = cuda_sort.rank_stages(n)
        assert stages[0].run == cuda_sort.GROUP
        assert [stage.run for stage in stages[1:]] == [stage.places for stage in stages[:-1]]
        assert [stage.runs == 0 for stage in stages] == [False] * (len(stages) - 1) + [True]
        for stage in stages:
            launch = stage.tiling(cuda_sort.WAYS[0], GPU)
            assert 2 ** launch.constants["STEPS"] == stage.run
            assert stage.run % launch.constants["BLOCK_M"] == 0
            assert launch.grid(5 * stage.run) * launch.constants["BLOCK_M"] == 5 * stage.run
