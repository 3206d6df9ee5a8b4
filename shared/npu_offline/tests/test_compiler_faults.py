"""Faults of the compilers that COMPILER_FAULTS.md describes: still there, where it says. One that is gone fails here."""

import npu_offline
import pytest
import torch
from fault_kernels import dropped_rounding_kernel, shared_buffer_kernel

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]
GONE = "this compiler no longer has the fault: say so in COMPILER_FAULTS.md"


def run(kernel, arguments, toolchain, final=True, **constants):
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, final=final):
        kernel[(1,)](*arguments, **constants)


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_sum_that_begins_as_a_carried_value_shares_its_buffer(toolchain):
    n_rows, n_blocks, width = 3, 4, 1024
    x = torch.randn(n_rows * n_blocks + 1, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = torch.empty(n_rows, width)
    groups = x[:-1].float().view(n_rows, n_blocks, width)
    exact = groups[:, 0] + groups[:, 1:].square().sum(1)
    for final in (False, True):
        run(shared_buffer_kernel, (x, y, n_rows, n_blocks), toolchain, final, BLOCK=width, multibuffer=False)
        assert torch.allclose(y, exact, atol=1e-3) == (not final), GONE


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_cast_that_is_cast_back_is_left_out_on_cann_8_5(toolchain, apart):
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    y = torch.empty(1024)
    run(dropped_rounding_kernel, (x, y), toolchain, BLOCK=1024, APART=apart)
    rounded = (x * (1.0 / 3.0)).bfloat16().float() * 3.0
    is_right = torch.allclose(y, rounded, rtol=1e-5, atol=0)
    assert is_right == (apart or toolchain != "1.0.0"), GONE
