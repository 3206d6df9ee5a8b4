"""Registers, chunks and compiler options of CUDA kernels."""

import pytest
from npu_tiling.budget import equal_chunks, register_cap, row_options


@pytest.mark.parametrize("columns", [1, 8, 32])
def test_rows_within_a_warp_are_summed_without_fused_products(columns):
    assert row_options(columns, 4) == {"num_warps": 4, "enable_fp_fusion": False}


def test_other_rows_are_fused_as_usual():
    assert row_options(64, 8) == {"num_warps": 8}


@pytest.mark.parametrize("warps", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("per_core", [1, 2, 3, 4, 1000])
def test_capped_programs_are_resident_together(warps, per_core):
    cap = register_cap(warps, per_core)
    assert cap % 8 == 0 or cap == 255
    assert 32 <= cap <= 255
    assert cap * 32 * warps * min(per_core, 64 // warps) <= 65536


def test_chunks_are_equal_powers_of_two_that_pad_least():
    assert equal_chunks(2560, least=256) == (512, 5)
    assert equal_chunks(4096, least=256) == (4096, 1)
    assert equal_chunks(100, least=256) == (128, 1)
    assert equal_chunks(7168, least=256) == (1024, 7)
    for width in range(1025, 16385, 13):
        chunk, count = equal_chunks(width, least=256)
        assert chunk & (chunk - 1) == 0
        assert width <= chunk * count <= 1.25 * width or count == 1
        assert count <= 8
