"""Faults of the compilers that COMPILER_FAULTS.md describes: still there, where it says. One that is gone fails here."""

import operator

import npu_offline
import pytest
import torch
from fault_kernels import (
    dropped_rounding_kernel,
    lost_in_branch_kernel,
    reused_flag_kernel,
    shared_buffer_kernel,
    unordered_sum_kernel,
    unrounded_arithmetic_kernel,
)

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sign", "compute"), [("+", operator.add), ("-", operator.sub), ("*", operator.mul)])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_arithmetic_in_bf16_is_not_rounded(toolchain, sign, compute, dtype):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(1024, generator=generator).to(dtype) for _ in range(2))
    y = torch.empty(1024)
    run(unrounded_arithmetic_kernel, (x, w, y), toolchain, final=False, BLOCK=1024, OPERATION=sign)
    assert torch.equal(y, compute(x, w).float())
    run(unrounded_arithmetic_kernel, (x, w, y), toolchain, BLOCK=1024, OPERATION=sign)
    is_unrounded = dtype == torch.bfloat16
    assert torch.equal(y, compute(x.float(), w.float()) if is_unrounded else compute(x, w).float()), GONE


@pytest.mark.parametrize("multibuffer", [True, False])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_sums_of_an_inner_loop_have_no_barrier_between_them_where_the_outer_loop_has_two_buffers(toolchain, multibuffer):
    n_blocks, n_rows, width = 3, 5, 1024
    x = torch.randn(n_rows, n_blocks * width, generator=torch.Generator().manual_seed(0))
    y = torch.empty(n_blocks * width)
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, checks=True, keep_going=True) as emulation:
        unordered_sum_kernel[(1,)](x, y, n_blocks, n_rows, x.shape[1], BLOCK=width, multibuffer=multibuffer)
    assert torch.allclose(y, x.sum(0), atol=1e-5)  # in program order
    found = [finding for finding in emulation.launches[0].notes if finding.kind == "hazard"]
    unordered = [finding for finding in found if "RAW" in finding.text and finding.text.count("vadd") == 2]
    assert bool(unordered) == (multibuffer and toolchain != "1.0.0"), GONE


@pytest.mark.parametrize("branch", [True, False])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_what_a_branch_in_a_loop_yields_is_lost_on_cann_8_5(toolchain, branch):
    n_tiles, n_blocks, shape = 3, 4, (2, 64)
    x = torch.randn(n_tiles, n_blocks, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.empty(n_tiles, *shape)
    scores = x.amax(3)  # [n_tiles, n_blocks, 2]
    largest = torch.cat((scores[:1, 0], scores[1:].amax(1)))  # of each tile; in the first one nothing is careful
    expected = (x[:, 1:] * (scores[:, 1:] - largest[:, None]).exp()[..., None]).sum(1)
    for final in (False, True):
        run(lost_in_branch_kernel, (x, y, n_tiles, n_blocks), toolchain, final, BLOCK_M=2, BLOCK_D=64, BRANCH=branch)
        is_right = torch.allclose(y, expected, atol=1e-4)
        assert is_right == (not final or not branch or toolchain != "1.0.0"), GONE


@pytest.mark.parametrize("exchanges", [0, 8])
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_flag_is_set_again_behind_the_loop_that_carries_it_on_cann_8_5(toolchain, exchanges):
    n_tiles, n_blocks, width = 3, 4, 64
    x = torch.randn(n_tiles, n_blocks, width, generator=torch.Generator().manual_seed(0)) / 8
    y = torch.empty(n_tiles)
    extra = x[0, 0, 0]
    for _ in range(exchanges):
        extra = (extra * 0.5).exp()
    with npu_offline.emulate("Ascend910B4", toolchain=toolchain, checks=True, keep_going=True) as emulation:
        reused_flag_kernel[(1,)](x, y, n_tiles, n_blocks, BLOCK=width, EXCHANGES=exchanges)
    assert torch.allclose(y, x.sum(2).logsumexp(1) + extra, atol=1e-5)  # in program order
    twice = [finding for finding in emulation.launches[0].notes if finding.kind == "flag" and "set again" in finding.text]
    assert bool(twice) == (exchanges == 8 and toolchain == "1.0.0"), GONE
