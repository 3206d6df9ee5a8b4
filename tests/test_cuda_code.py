"""CUDA's kernels without a GPU: which launches are compiled."""

import re

import npu_tiling
import pytest
import torch
from npu_tiling.plans import Reached, Slot

from tools import cuda_code
from tools.cuda_calls import CALLS
from tools.cuda_code import Code

H200 = npu_tiling.GPUS["H200"]


def test_launches_that_triton_compiles_apart_are_told_apart():
    found = cuda_code.unique("fused_linear_cross_entropy", H200)
    kernels = {launch.kernel for launch in found.values()}
    assert {"cross_entropy_targets_kernel", "cross_entropy_product_kernel"} <= kernels
    assert len(found) > 2 * len(kernels)
    described = next(launch for launch in found.values() if launch.kernel == "cross_entropy_product_kernel")
    assert described.arguments[3].block and described.decision.options["num_stages"] == 3


def test_tensors_that_a_kernel_reaches_through_one_pointer_are_one():
    first, second = (Slot(number, (4,), (1,), torch.float16, number) for number in range(2))
    for of in (cuda_code._given, cuda_code._specialised):
        assert of(Reached([first, second])) == of(first)
        assert of((first, second)) == (of(first), of(second))


def test_the_largest_numbers_of_a_kernel_are_told():
    found = {("rms_norm", "cuda.forward_kernel", "sm_90"): [Code(32, 0, 16), Code(20, 8, 4)]}
    assert cuda_code.table(found).splitlines()[-1] == "| rms_norm | `cuda.forward_kernel` |  | 2: 32, 8, 16 |  |"


@pytest.mark.nightly
def test_the_record_has_the_kernels_that_are_launched():
    made = {(package, launch.kernel) for package in CALLS for launch in cuda_code.unique(package, H200).values()}
    kept = re.findall(r"^\| (\w+) \| `[\w.]+\.(\w+)` \|", cuda_code.RECORD.read_text(), re.MULTILINE)
    assert made == set(kept), "hatch run interpreted:record"
