"""Tiling is plain arithmetic: no Triton, no device."""

import dataclasses
from pathlib import Path

import pytest
from npu_rms_norm import ascend, cuda
from npu_rms_norm.call import CASTING_MODES, Rounding, Shape, casting
from npu_rms_norm.plans import choose
from npu_tiling import SOCS, Device, soc

from testing.operators import *  # noqa: F403

WITHOUT_TRITON = ("npu_rms_norm", "tokens=8, width=64", "rms_norm(torch.randn(4, 64))")
B4, B950 = soc("Ascend910B4"), soc("Ascend950PR_957b")
H200 = Device("H200", "cuda", "sm_90", 132, 132, 232448, max_grid=2**31 - 1)
CHIPS = [*{dataclasses.replace(chip, name=""): chip for chip in SOCS.values()}.values(), H200]  # names apart, each once
WIDTHS = [1, 7, 16, 123, 512, 1000, 4096, 5120, 7168, 8192, 16384, 65536]
BOTH = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def shape(width, itemsize=2, *, backward=False, rows=2048, mode="llama", **changes):
    x = "bf16" if itemsize == 2 else "fp32"
    rounding = Rounding.of(mode, x, x)
    plain = Shape(
        backward=backward,
        n_outer=1,
        n_inner=rows,
        width=width,
        inner_stride=width,
        itemsizes=(itemsize,),
        narrow=itemsize < 4,
        rounding=rounding,
    )
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
@BOTH
def test_every_tiling_covers_the_rows_within_the_grid(backward, chip):
    for width in WIDTHS:
        for itemsize in (2, 4):
            tiling = choose(shape(width, itemsize, backward=backward), chip)
            assert tiling.rows * tiling.row_tiles >= 2048
            assert -(-width // tiling.columns) * tiling.columns >= width
            assert 1 <= tiling.grid <= chip.max_grid
            if chip.kind == "ascend":
                assert tiling.kernel in ("rows", "wide")
                assert tiling.columns >= width or tiling.kernel == "wide"
                assert tiling.grid <= chip.vector_cores
                assert tiling.column_grid <= chip.vector_cores
                assert tiling.ub_bytes <= chip.ub_bytes


@BOTH
@pytest.mark.parametrize("chip", [B4, H200], ids=lambda chip: chip.name)
def test_what_is_compiled_does_not_depend_on_the_number_of_rows(backward, chip):
    for width in WIDTHS:
        tilings = [choose(shape(width, backward=backward, rows=rows), chip) for rows in (1, 2, 3, 77, 4096, 10**7)]
        assert len({tuple(tiling.constants.items()) for tiling in tilings}) == 1


def names_of(traits):
    return " | ".join(each.name for each in cuda.Trait if each in traits) or "ANY"


@BOTH
def test_decisions_name_their_row_of_the_table(backward):
    for chip, table in ((B4, "ascend"), (H200, "cuda")):
        source = Path(ascend.__file__).with_name(f"{table}.py").read_text().splitlines()
        for width in WIDTHS:
            tiling = choose(shape(width, backward=backward), chip)
            file, line = tiling.decided_at.split(":")
            assert file == f"npu_rms_norm/{table}.py"
            named = f'"{tiling.rule.way}"' if chip is B4 else names_of(tiling.rule.traits)
            assert f"_row({named}," in source[int(line) - 1]
            assert tiling.why


def test_an_unknown_casting_mode_is_an_error():
    with pytest.raises(ValueError, match="casting_mode is 'bert' and must be one of 'llama', 'gemma', 'none'"):
        casting("bert")
    assert Rounding.of("none", "bf16", None) == Rounding(normalised="bf16", factors="bf16", weighted="fp32")
    assert Rounding.of("llama", "fp16", "fp32").weighted == "fp32"
    assert set(CASTING_MODES) == {"llama", "gemma", "none"}


def test_narrow_rows_share_a_tile_and_rows_up_to_8192_are_read_once():
    for width in (64, 512, 1000, 2048):
        assert choose(shape(width), B4).rows >= 2
        assert choose(shape(width, backward=True), B4).rows >= 2
    for width in WIDTHS[:-2]:
        assert choose(shape(width), B4).kernel == "rows"
        assert choose(shape(width, backward=True, itemsizes=(2, 2)), B4).kernel == "rows"


def test_ascend_tiles_are_whole_aligned_pieces():
    assert choose(shape(123), B4).columns == 128
    assert choose(shape(1000), B4).columns == 1008
    assert choose(shape(1000, 4), B4).columns == 1000
    assert choose(shape(65536), B4).columns % 16 == 0


def test_a_backward_on_an_ascend950_takes_several_rows_or_blocks_of_columns():
    """Its compilers would sum a single row up again and again."""
    for width in WIDTHS:
        for itemsize in (2, 4):
            tiling = choose(shape(width, itemsize, backward=True), B950)
            assert tiling.kernel == "wide" or tiling.rows > 1
    assert choose(shape(8192, backward=True), B950).kernel == "wide"


@BOTH
def test_programs_share_the_rows_of_one_group_evenly(backward):
    assert choose(shape(512, backward=backward), B4).split == "rows"
    assert choose(shape(512, backward=backward, rows=100), B4).grid == 40
    assert choose(shape(512, backward=backward, rows=7), B4).grid == 7
    assert choose(shape(512, backward=backward, n_outer=2), B4).split == "tiles"


def test_small_groups_share_a_tile_whole():
    """Heads of a fused projection: a few rows side by side, then a long way to the next ones."""
    heads = shape(128, n_outer=4096, rows=8, outer_stride=3 * 8 * 128, itemsizes=(2, 2))
    for backward, groups in ((False, 6), (True, 5)):
        tiling = choose(dataclasses.replace(heads, backward=backward), B4)
        assert (tiling.groups, tiling.rows) == (groups, 8)
        assert tiling.row_tiles == -(-4096 // groups)
    assert choose(dataclasses.replace(heads, outer_stride=2**30), B4).groups == 1
    assert choose(dataclasses.replace(heads, n_inner=100), B4).groups == 1


def test_the_tiles_of_a_group_have_equally_many_rows():
    gated = shape(128, n_outer=4096, rows=32, outer_stride=2 * 32 * 128, itemsizes=(2, 2, 2), activation="silu")
    assert choose(dataclasses.replace(gated, backward=True), B4).rows == 16  # of 29, the last tile of a group would have 3
    assert choose(gated, B4).rows == 32


def test_a_tile_of_several_rows_leaves_room_to_spare():
    """A tile that fills the Unified Buffer is predicted to take up to twice the time: its transfers wait for arithmetic."""
    for options in ({}, {"biased": True}, {"activation": "silu", "itemsizes": (2, 2, 2)}):
        for width in (64, 128, 256, 512):
            tiling = choose(shape(width, backward=True, **{"itemsizes": (2, 2), **options}), B4)
            assert tiling.rows > 2
            assert tiling.ub_bytes <= B4.ub_bytes * 7 // 8
    assert choose(shape(2048, itemsizes=(2, 2)), B4).rows == 3


def test_the_residual_of_a_tile_of_several_rows_and_the_gradient_of_a_sum_take_no_buffer_of_their_own():
    for changes in ({"itemsizes": (2, 2)}, {"itemsizes": (2, 4)}):
        assert choose(shape(4096, **changes), B4).rows == 2
    for itemsizes in ((2, 2, 2), (2, 4, 4)):
        tiling = choose(shape(8192, backward=True, itemsizes=itemsizes), B4)
        assert (tiling.kernel, tiling.rows) == ("rows", 1)


def test_a_gated_backward_of_4096_columns_reads_its_rows_once():
    for itemsize, narrow in ((2, True), (4, False)):
        gated = shape(4096, itemsize, backward=True, itemsizes=(itemsize,) * 3, narrow=narrow, activation="silu")
        for gate_first in (False, True):
            assert choose(dataclasses.replace(gated, gate_first=gate_first), B4).kernel == "rows"


def test_two_rows_of_a_forward_fill_the_unified_buffer_of_a_910b_alone():
    for biased, width in ((True, 4096), (False, 5504)):
        tiling = choose(shape(width, biased=biased), B4)
        assert tiling.rows == 2
        assert tiling.ub_bytes > B4.ub_bytes * 7 // 8
    assert choose(shape(6144, biased=True), B950).rows == 1


def test_a_row_of_16_bits_has_one_buffer_on_a_910b_and_one_that_is_computed_in_place_two():
    assert choose(shape(8192), B4).rule.buffers == 1
    assert choose(shape(4096, backward=True, itemsizes=(2, 2)), B4).rule.buffers == 1
    assert choose(shape(6144, itemsizes=(4,), narrow=False), B4).rule.buffers == 2
    assert choose(shape(4096, itemsizes=(2, 4)), B4).rule.buffers == 2
    assert choose(shape(8192), B950).rule.buffers == 2


@BOTH
def test_on_cuda_a_tile_takes_rows_of_any_groups(backward):
    plain = choose(shape(128, backward=backward, itemsizes=(2, 2)), H200)
    for heads in (3, 8, 28, 32):
        groups = {"n_outer": 4096, "rows": heads, "outer_stride": 3 * heads * 128, "itemsizes": (2, 2)}
        tiling = choose(shape(128, backward=backward, **groups), H200)
        assert tiling.order == "groups"
        assert (tiling.rows, tiling.columns, tiling.warps) == (plain.rows, plain.columns, plain.warps)
        assert tiling.row_tiles == -(-4096 * heads // tiling.rows)


@pytest.mark.parametrize("heads", [1, 3, 32, 100])
def test_a_program_takes_rows_of_one_head_where_each_has_a_weight(heads):
    per_head = shape(128, n_outer=heads, rows=5000, per_head=True)
    backward = dataclasses.replace(per_head, backward=True)
    for tiling in (choose(per_head, B4), choose(backward, B4), choose(backward, H200)):
        assert tiling.grid % heads == 0
        assert tiling.splits % heads == 0
        assert tiling.constants.get("SPLIT", tiling.constants.get("ORDER")) == "heads"
    assert choose(per_head, B4).grid % 40 == 0  # every core is busy in every round
    assert choose(per_head, H200).order == "tokens"  # a program takes one tile, whose rows are of any heads
    assert choose(shape(65536, backward=True, n_outer=3, rows=50, per_head=True), B4).splits == 3


def test_a_tile_stays_inside_a_group_and_inside_32_bits():
    assert choose(shape(64, n_outer=100, rows=100), B4).rows <= 100
    assert choose(shape(64, backward=True, n_outer=100, rows=4, per_head=True), H200).rows <= 4
    far = shape(64, inner_stride=2**30)
    assert (choose(far, B4).rows - 1) * 2**30 + 64 < 2**31
    assert choose(shape(64, inner_stride=2**31 + 5), H200).rows == 1


@BOTH
def test_smaller_tilings_shrink_to_an_end(backward):
    seen = [choose(shape(4096, backward=backward), B4)]
    while (following := seen[-1].smaller()) is not None:
        seen.append(following)
        assert len(seen) < 100
    assert len(set(seen)) == len(seen)
    assert seen[-1].columns == 16
    assert any(tiling.kernel == "rows" and tiling.rule.buffers == 1 for tiling in seen)
    assert choose(shape(4096, backward=backward), H200).smaller() is None


def test_programs_that_share_a_row_find_room_at_once():
    for width in (16385, 20000, 65536, 131072):
        tiling = choose(shape(width, backward=True), H200)
        assert tiling.kernel == "shared"
        assert tiling.grid == tiling.splits * tiling.share <= H200.vector_cores * tiling.per_core
        assert width <= tiling.share * tiling.columns < width + tiling.columns
        assert tiling.options["maxnreg"] * 32 * tiling.warps * tiling.per_core <= 65536
        assert "launch_cooperative_grid" not in tiling.options  # it would wait until every other kernel has left the GPU
        assert choose(shape(width, backward=True, rows=3), H200).splits == 3
    few_cores = dataclasses.replace(H200, vector_cores=7)
    for changes, chip in (
        ({"width": 131073}, H200),
        ({}, few_cores),
        ({"activation": "silu"}, H200),
        ({"per_head": True}, H200),
        ({"biased": True}, H200),
        ({"with_rows": False}, H200),
    ):
        assert choose(shape(**{"width": 65536, "backward": True, **changes}), chip).kernel == "wide"


def test_chunks_pad_a_row_by_a_quarter_at_most_and_fit_registers():
    for width in range(1025, 16385, 13):
        tiling = choose(shape(width, backward=True), H200)
        assert tiling.columns & (tiling.columns - 1) == 0
        assert tiling.column_blocks * tiling.columns <= 1.25 * width or tiling.column_blocks == 1
        assert tiling.column_blocks * tiling.columns <= 64 * 32 * tiling.warps
    for width in (2560, 3072, 3584, 5120, 6144, 7168):
        tiling = choose(shape(width, backward=True), H200)
        assert tiling.column_blocks > 1
        assert tiling.column_blocks * tiling.columns == width


def test_capped_registers_leave_room_for_the_other_programs():
    for width in (64, 128, 512, 2560, 4096, 7168, 16384):
        for options in ({}, {"biased": True}, {"activation": "silu", "itemsizes": (2, 2, 2)}, {"rows": 3}):
            for backward in (False, True):
                tiling = choose(shape(width, backward=backward, **options), H200)
                resident = min(tiling.per_core, 64 // tiling.warps)
                assert tiling.options.get("maxnreg", 0) * 32 * tiling.warps * resident <= 65536
                assert 32 <= tiling.options.get("maxnreg", 32) <= 255
                assert not backward or tiling.rule.capped


def test_quantised_rows_are_read_once_up_to_16384_columns():
    for width in (100, 2048, 2880, 4096, 7168, 8192, 10000, 16384):
        assert choose(shape(width, quantised=True), H200).kernel == "rows"
    assert choose(shape(16385, quantised=True), H200).kernel == "wide"
    for width, kernel in ((8192, "rows"), (10000, "wide"), (16384, "wide")):
        assert choose(shape(width, quantised=True, itemsizes=(2, 2)), H200).kernel == kernel
    assert choose(shape(4096), H200).kernel == "wide"  # two reads, the second from a cache, take less


def test_every_row_of_the_cuda_tables_is_taken():
    found = set()
    for width in (16, 64, 128, 300, 1000, 1100, 2000, 2048, 2560, 4096, 5120, 8192, 10000, 16384, 20000):
        for changes in ({}, {"activation": "silu", "itemsizes": (2, 2)}, {"biased": True}, {"quantised": True}):
            for backward in (False, True):
                found.add(choose(shape(width, backward=backward, **changes), H200).rule)
    assert found == {*cuda.FORWARD_RULES, *cuda.BACKWARD_RULES}


def test_a_row_of_any_width_has_a_tile():
    for backward in (False, True):
        assert choose(shape(10**7, backward=backward), B4).kernel == "wide"
