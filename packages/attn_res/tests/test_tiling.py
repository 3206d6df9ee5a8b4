"""Tiling is plain arithmetic: no Triton, no device."""

import dataclasses

import pytest
from npu_attn_res.ascend.tiling import AscendTiling, Way
from npu_attn_res.cuda import tiling as cuda
from npu_attn_res.cuda.tiling import Way as CudaWay
from npu_attn_res.shape import COLUMN_TASKS, Shape, Task
from npu_attn_res.sources import choose
from npu_tiling import SOCS, Device, soc

from testing.operators import *  # noqa: F403

WITHOUT_TRITON = (
    "npu_attn_res",
    "tokens=8, width=64, blocks=2",
    "attn_res(torch.randn(2, 4, 64), torch.ones(64), torch.ones(64))",
)
B4 = soc("Ascend910B4")
H200 = Device("H200", "cuda", "sm_90", 132, 132, 232448, max_grid=2**31 - 1)
CHIPS = [*{dataclasses.replace(chip, name=""): chip for chip in SOCS.values()}.values(), H200]  # names apart, each once
WIDTHS = [1, 7, 16, 123, 1000, 4096, 5120, 7168, 8192, 16384, 65536]
FORWARD, BACKWARD = {"task": Task.FORWARD}, {"task": Task.BACKWARD}
ROWS = {
    "forward": FORWARD,
    "forward, normalised": {**FORWARD, "normalised": True},
    "backward": BACKWARD,
    "backward from fp32": {**BACKWARD, "fp32_dh": True},
    "backward with a prefix": {**BACKWARD, "prefix": True},
    "merge": {"task": Task.MERGE},
    "merge backward": {"task": Task.MERGE_BACKWARD},
    "norm backward": {"task": Task.NORM_BACKWARD},
}


def chosen(chip, width, *, itemsize=2, **options):
    return choose(Shape(width=width, itemsize=itemsize, **options), chip)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_launch_covers_the_rows_within_the_grid(chip):
    rows = [
        Shape(width=w, itemsize=size, n_sources=8, **options) for options in ROWS.values() for w in WIDTHS for size in (2, 4)
    ]
    tilings = [tiling for shape in rows if (tiling := choose(shape, chip)) is not None]
    columns = [
        Shape(task=task, width=width, itemsize=2, layers=layers)
        for task in COLUMN_TASKS
        for width in WIDTHS
        for layers in (1, 3, 12, 64)
    ]
    tilings += [choose(shape, chip) for shape in columns]
    assert len(tilings) > len(columns) + len(rows) // 2
    for tiling in tilings:
        assert tiling.column_blocks * tiling.row_columns >= tiling.shape.width
        assert tiling.block_s >= tiling.shape.layers
        assert tiling.why and tiling.decided_at
        for n_tokens in (1, 77, 10**6):
            assert 1 <= tiling.grid(n_tokens) <= chip.max_grid
            assert tiling.splits(n_tokens) >= 1
        if chip.kind == "ascend":
            assert tiling.grid(10**6) <= chip.vector_cores
            assert tiling.ub_bytes <= chip.ub_bytes


def test_the_table_says_which_way_a_row_is_taken():
    for options in (FORWARD, BACKWARD):
        for width in (64, 512, 1000, 2048):
            assert chosen(B4, width, **options).block_m >= 2
    ways = {4096: Way.ROWS_AHEAD, 5120: Way.ROW_AHEAD_TWO_BUFFERS, 7168: Way.ROW_AHEAD, 8192: Way.ROW}
    assert {width: chosen(B4, width, **FORWARD).way for width in ways} == ways
    assert chosen(B4, 1000, **BACKWARD).way is Way.ROWS
    assert chosen(B4, 5120, **BACKWARD).way is Way.ROW_TWO_BUFFERS
    assert chosen(B4, 4096, by_token=True, **BACKWARD).way is Way.ROW_KEPT
    assert chosen(B4, 7168, by_token=True, **BACKWARD).way is Way.HALVES_KEPT
    assert chosen(B4, 16384, **FORWARD) is None


def test_layers_share_a_tile_as_long_as_they_fit():
    assert chosen(H200, 8192, task=Task.LAYERS, layers=5) is None
    assert chosen(H200, 4096, task=Task.LAYERS, layers=5).block_s == 8


def test_the_sources_of_a_token_stay_in_registers_where_they_fit():
    fit = {(1024, 8): True, (4096, 8): True, (4096, 16): False, (7168, 16): False, (16384, 1): False}
    for (width, n_sources), wanted in fit.items():
        tiling = chosen(H200, width, n_sources=n_sources, **BACKWARD)
        assert (tiling.way is CudaWay.IN_REGISTERS) == wanted == (tiling.block_n == n_sources and width <= 8192)


@pytest.mark.parametrize("n_sources", [5, 8, 12, 16, 32])
@pytest.mark.parametrize("width", [2048, 5120, 7168, 16384])
@pytest.mark.parametrize("kind", ["backward", "backward from fp32", "backward with a prefix"])
def test_programs_that_share_a_token_have_all_of_it(kind, width, n_sources):
    for itemsize in (2, 4):
        tiling = chosen(H200, width, itemsize=itemsize, n_sources=n_sources, **ROWS[kind])
        assert tiling.cooperating or (width, n_sources, itemsize) != (7168, 8, 2)
        if not tiling.cooperating:
            continue
        constants = tiling.constants
        assert constants["PER_TILE"] * constants["TILES"] >= n_sources
        assert constants["PER_TILE"] <= constants["BLOCK_N"]
        assert -(-width // constants["BLOCK_D"]) * constants["TILES"] == tiling.cooperating  # as the kernel takes it
        assert constants["BLOCK_D"] >= constants["VECTOR"] * tiling.warps * 32  # all warps side by side
        for n_tokens in (1, 7, 10**6):
            grid = tiling.grid(n_tokens)
            assert grid % tiling.cooperating == 0
            assert tiling.cooperating <= grid <= H200.vector_cores * tiling.per_core
            assert tiling.partials(n_tokens) == grid // tiling.cooperating * tiling.tiles
        assert tiling.per_core * tiling.shared_bytes <= H200.ub_bytes
        assert not tiling.smaller().cooperating


def test_rows_between_powers_of_two_come_in_chunks_with_little_padding():
    for width in (2304, 2560, 2880, 3072, 3584, 5120, 6144, 7168, 10240):
        tiling = chosen(H200, width, n_sources=8, **FORWARD)
        assert width <= tiling.chunks * tiling.block_d <= 1.2 * width
        assert tiling.chunks == 1 or tiling.block_d == 256 * tiling.warps  # all warps side by side


def test_ascend_tiles_are_whole_aligned_pieces():
    assert chosen(B4, 123, **FORWARD).block_d == 128
    assert chosen(B4, 1000, **FORWARD).block_d == 1008
    assert chosen(B4, 1000, itemsize=4, **FORWARD).block_d == 1000
    assert chosen(B4, 20011, task=Task.PRODUCTS).block_d % 16 == 0


def test_a_tile_stays_inside_32_bits():
    assert (chosen(B4, 64, row_stride=2**30, **FORWARD).block_m - 1) * 2**30 + 64 < 2**31


@pytest.mark.parametrize(("task", "width"), [(Task.FORWARD, 1000), (Task.MERGE, 4096), (Task.GRADIENT, 16384)])
def test_smaller_launches_shrink_to_an_end(task, width):
    seen = [chosen(B4, width, task=task)]
    while (following := seen[-1].smaller()) is not None:
        assert isinstance(following, AscendTiling)
        seen.append(following)
        assert len(seen) < 100
    assert len(set(seen)) == len(seen)
    assert seen[-1].block_d == 16 if task == Task.GRADIENT else not seen[-1].has_whole_rows


CUDA_DEVICES = {"H200": 232448, "A100": 166912, "RTX 4090": 101376, "T4": 65536, "none": 0}


@pytest.mark.parametrize("shared", CUDA_DEVICES.values(), ids=list(CUDA_DEVICES))
def test_tiles_under_way_fit_in_the_shared_memory_of_a_program(shared):
    """Triton 3.6 takes 262,208 bytes for two blocks of 16384 fp32 columns and three stages, and an H200 has 232,448."""
    device = dataclasses.replace(H200, ub_bytes=shared + cuda.SCRATCH_BYTES)
    for kind in ("forward", "forward, normalised", "backward", "backward from fp32"):
        for width in (1, 123, 4096, 8193, 12288, 16384):
            for itemsize in (2, 4):
                for n_sources in (1, 2, 4, 16, 64):
                    tiling = chosen(device, width, itemsize=itemsize, row_stride=width, n_sources=n_sources, **ROWS[kind])
                    row_bytes = tiling.block_d * tiling.chunks * itemsize
                    assert (tiling.stages - 1) * tiling.block_n * row_bytes <= shared
                    assert tiling.has_whole_rows
    widest = chosen(H200, 16384, itemsize=4, n_sources=2, **FORWARD)
    assert (widest.block_n, widest.stages) == (1, 4)


def test_on_cuda_a_smaller_launch_ends_in_kernels_that_take_columns():
    tiling = chosen(H200, 2048, itemsize=4, n_sources=16, **BACKWARD)
    seen = []
    while tiling is not None:
        seen.append(tiling)
        assert not tiling.block_n or (tiling.way is CudaWay.IN_REGISTERS) == (tiling.block_n >= 16)
        tiling = tiling.smaller()
    assert {each.why for each in seen[1:]} == {"the compiler refused a larger tile"}
    assert [each.block_n for each in seen] == sorted((each.block_n for each in seen), reverse=True)
    assert not seen[-1].has_whole_rows
    assert all(each.has_whole_rows for each in seen[:-1])
    tiling = chosen(H200, 100, task=Task.GRADIENT, layers=3)
    while tiling.block_d > 1:
        tiling = tiling.smaller()
    assert tiling.smaller() is None
