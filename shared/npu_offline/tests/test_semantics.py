"""Numbers that the compiler's library computes in a way of its own: as its source says, or refused."""

import npu_offline
import pytest
import sample_kernels
import torch
import triton
import triton.language as tl
from npu_offline import FindingsError, emulate

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]


@triton.jit
def sorted_kernel(p_x, p_y, BLOCK: tl.constexpr):
    o_lane = tl.arange(0, BLOCK)
    tl.store(p_y + o_lane, tl.sort(tl.load(p_x + o_lane)))


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_running_sum_of_fp16_is_rounded_once(toolchain):
    """The library's own fp16 sums would be rounded at each step: the compilers cast before."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(0)).half()
    y = torch.empty(256, dtype=torch.float16)
    with emulate(toolchain=toolchain, final=True):
        sample_kernels.running_sum[(1,)](x, y, BN=256)
    assert torch.equal(y, x.float().cumsum(0).half())


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_row_with_nan_is_not_sorted(toolchain):
    x, y = torch.randn(128), torch.empty(128)
    with emulate(toolchain=toolchain, final=True):
        sorted_kernel[(1,)](x, y, BLOCK=128)
        assert torch.equal(y, x.sort().values)
        x[7] = torch.nan
        with pytest.raises(FindingsError, match="stop.*sort.*number 7 is NaN"):
            sorted_kernel[(1,)](x, y, BLOCK=128)
