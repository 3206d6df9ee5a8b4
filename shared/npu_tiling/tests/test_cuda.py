"""Compiler options of CUDA kernels."""

import pytest
from npu_tiling.launching.cuda import row_options


@pytest.mark.parametrize("columns", [1, 8, 32])
def test_rows_within_a_warp_are_summed_without_fused_products(columns):
    assert row_options(columns, 4) == {"num_warps": 4, "enable_fp_fusion": False}


def test_other_rows_are_fused_as_usual():
    assert row_options(64, 8) == {"num_warps": 8}
