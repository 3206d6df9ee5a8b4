"""Offsets past 2^31 elements: strides of results are products in 64 bits."""

import npu_offline
import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton: device code imports it")
tl = pytest.importorskip("triton.language")
from npu_rms_norm.wide import result_strides  # noqa: E402

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.skipif(not npu_offline.installed(), reason="needs triton-ascend and a toolchain (npu-offline fetch)"),
]


@triton.jit
def strides_kernel(p_strides, n_outer, n_inner, N: tl.constexpr, BY_HEAD: tl.constexpr):
    s_outer, s_inner = result_strides(n_outer, n_inner, N, BY_HEAD)
    tl.store(p_strides, tl.cast(s_outer, tl.int64))
    tl.store(p_strides + 1, tl.cast(s_inner, tl.int64))


@pytest.mark.parametrize(
    ("rows", "per_head", "expected"),
    [((2, 2**20), False, [2**32, 4096]), ((3, 7), False, [7 * 4096, 4096]), ((2**20, 2), True, [4096, 2**32])],
)
def test_strides_of_results_are_64_bit_products(rows, per_head, expected):
    strides = torch.zeros(2, dtype=torch.int64)
    with npu_offline.emulate("Ascend910B4"):
        strides_kernel[(1,)](strides, *rows, N=4096, BY_HEAD=per_head)
    assert strides.tolist() == expected
