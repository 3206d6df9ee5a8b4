"""Registers that decide how later instructions work: a module sets them before it depends on them, or is refused."""

import npu_offline
import pytest
import sample_kernels
import timing_kernels
import torch
import triton
import triton.language as tl
from npu_offline import FindingsError, emulate
from npu_offline.errors import reason_of
from npu_offline.module.mlir import make, name_of, parse_attribute

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [pytest.mark.compilers, pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)]


@triton.jit
def larger(x_ptr, y_ptr, z_ptr, BN: tl.constexpr):
    cols = tl.arange(0, BN)
    x, y = tl.load(x_ptr + cols), tl.load(y_ptr + cols)
    tl.store(z_ptr + cols, tl.where(x > y, x, y))


def comparison():
    larger[(1,)](torch.randn(128), torch.randn(128), torch.empty(128), BN=128)


def cast():
    sample_kernels.cast[(1,)](torch.randn(128).bfloat16(), torch.empty(128), BN=128)


def product_and_exp():
    a, b, c = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16() / 64, torch.empty(64, 64)
    timing_kernels.exp_of_matmul[(1,)](a, b, c, 64, B=64)


def states(module, name):
    return [op for op in module.walk() if name_of(op) == f"hivm.hir.{name}"]


@pytest.mark.parametrize(
    ("call", "name", "said"),
    [
        (comparison, "set_mask_norm", r"state.*vcmp\w*#\d+ before set_mask_norm"),
        (product_and_exp, "set_ffts_base_addr", "state.*a flag between cores before set_ffts_base_addr"),
    ],
)
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_a_module_that_depends_on_what_launches_before_have_left_is_a_finding(toolchain, call, name, said):
    def mutate(module):
        removed = states(module, name)
        assert removed
        for op in removed:
            op.detach()

    with emulate(toolchain=toolchain, checks=True):
        call()
    with emulate(toolchain=toolchain, checks=True, mutate=mutate), pytest.raises(FindingsError, match=said):
        call()


@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_functions_that_set_the_mode_of_the_mask_need_none(toolchain):
    def mutate(module):
        for op in states(module, "set_mask_norm"):
            op.detach()

    with emulate(toolchain=toolchain, checks=True, mutate=mutate):
        cast()


@pytest.mark.parametrize(
    ("name", "properties", "said"),
    [
        ("set_mask_count", {}, "execution does not know hivm.hir.set_mask_count"),
        ("set_ctrl", {"idx": "48 : i64", "enable": "false"}, "execution does not know bit 48 of the control register as 0"),
        ("set_ctrl", {"idx": "56 : i64", "enable": "true"}, "execution does not know bit 56 of the control register as 1"),
        ("set_ctrl", {"idx": "48 : i64", "enable": "true"}, None),
    ],
)
def test_a_mode_that_changes_numbers_is_refused_by_name(name, properties, said):
    def mutate(module):
        (op,) = states(module, "set_mask_norm")
        given = {key: parse_attribute(value) for key, value in properties.items()}
        op.parent_block().insert_ops_after([make(f"hivm.hir.{name}", **given)], op)

    with emulate(checks=True, mutate=mutate):
        if said is None:
            cast()
        else:
            with pytest.raises(Exception, match=said) as caught:
                cast()
            assert said in (reason_of(caught.value) or "")
