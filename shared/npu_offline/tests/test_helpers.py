"""Helpers of one name in a kernel: an error for whoever compiles it, as triton-ascend compiles the first alone."""

import re

import fault_helpers
import npu_offline
import pytest
import torch
import triton
import triton.language as tl
from fault_kernels import helpers_of_one_name_kernel
from npu_offline.errors import reason_of

SAYS = r"two helpers of the name changed .*: fault_kernels\.changed \(.*\) and fault_helpers\.changed \(.*\)"


def same(b_x):
    return b_x * 2.0


first, second = triton.jit(same), triton.jit(same)


@triton.jit
def sigmoid(b_x):
    return b_x + 1.0


@triton.jit
def one_function_twice_kernel(p_x, p_y, BLOCK: tl.constexpr):
    o_col = tl.arange(0, BLOCK)
    tl.store(p_y + o_col, second(first(tl.load(p_x + o_col))))


@triton.jit
def other_types_kernel(p_x, p_y, BLOCK: tl.constexpr):
    o_col = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_col)
    tl.store(p_y + o_col, fault_helpers.changed(changed(b_x.to(tl.int32)).to(tl.float32)))


@triton.jit
def changed(b_x):
    return b_x * 3


@triton.jit
def sigmoid_kernel(p_x, p_y, BLOCK: tl.constexpr):
    o_col = tl.arange(0, BLOCK)
    tl.store(p_y + o_col, sigmoid(tl.sigmoid(tl.load(p_x + o_col))))


@pytest.fixture
def tensors():
    return torch.linspace(-4, 4, 64), torch.empty(64)


def test_emulation_of_a_kernel_with_two_helpers_of_one_name_is_an_error(tensors):
    with npu_offline.emulate(), pytest.raises(Exception, match="two helpers") as caught:
        helpers_of_one_name_kernel[(1,)](*tensors, BLOCK=64)
    assert re.search(SAYS, reason_of(caught.value))


def test_recording_of_a_kernel_with_two_helpers_of_one_name_is_an_error(tensors):
    with npu_offline.record(), pytest.raises(Exception, match="two helpers"):
        helpers_of_one_name_kernel[(1,)](*tensors, BLOCK=64)


def test_compilation_of_a_kernel_with_two_helpers_of_one_name_is_an_error():
    with pytest.raises(Exception, match="two helpers"):
        npu_offline.compile_kernel(helpers_of_one_name_kernel, {"p_x": "*fp32", "p_y": "*fp32"}, {"BLOCK": 64})


def test_a_helper_with_the_name_of_a_function_of_triton_is_an_error(tensors):
    with npu_offline.emulate(), pytest.raises(Exception, match="two helpers of the name sigmoid"):
        sigmoid_kernel[(1,)](*tensors, BLOCK=64)


def test_one_function_under_two_names_and_one_name_for_two_types_are_none(tensors):
    x, y = tensors
    with npu_offline.emulate():
        one_function_twice_kernel[(1,)](x, y, BLOCK=64)
        assert torch.equal(y, 4 * x)
        other_types_kernel[(1,)](x, y, BLOCK=64)
        assert torch.equal(y, x.trunc() * 3 + 1)
