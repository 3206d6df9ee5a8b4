"""CUDA's kernels without a GPU: which launches are compiled, what the interpreter is given, and what counts as equal."""

import re

import npu_tiling
import pytest
import torch

from tools import cuda_code, interpreted, interpreter
from tools.cuda_calls import CALLS
from tools.cuda_code import Code
from tools.workspace import ROOT

H200 = npu_tiling.GPUS["H200"]


def test_launches_that_triton_compiles_apart_are_told_apart():
    found = cuda_code.unique("fused_linear_cross_entropy", H200)
    kernels = {launch.kernel for launch in found.values()}
    assert {"cross_entropy_targets_kernel", "cross_entropy_product_kernel"} <= kernels
    assert len(found) > 2 * len(kernels)
    described = next(launch for launch in found.values() if launch.kernel == "cross_entropy_product_kernel")
    assert described.arguments[0].block and described.options["num_stages"] == 3


def test_the_largest_numbers_of_a_kernel_are_told():
    found = {("rms_norm", "cuda.forward_kernel", "sm_90"): [Code(32, 0, 16), Code(20, 8, 4)]}
    assert cuda_code.table(found).splitlines()[-1] == "| rms_norm | `cuda.forward_kernel` |  | 2: 32, 8, 16 |  |"


@pytest.mark.nightly
def test_the_record_has_the_kernels_that_are_launched():
    made = {(package, launch.kernel) for package in CALLS for launch in cuda_code.unique(package, H200).values()}
    kept = re.findall(r"^\| (\w+) \| `[\w.]+\.(\w+)` \|", cuda_code.RECORD.read_text(), re.MULTILINE)
    assert made == set(kept), "hatch run interpreted:record"


def test_every_kernel_without_waiting_programs_is_interpreted():
    labels = interpreted.chosen("rms_norm")
    assert 4 <= len(labels) <= 40


@pytest.mark.parametrize("value", [1.0, -1.00390625, 1.01171875, 3.3895313892515355e38, -0.0, float("inf"), float("nan")])
def test_casts_to_bf16_round_as_pytorch_does(value):
    numbers = torch.tensor([value, value * (1 + 2**-9), value / 3])
    found = torch.from_numpy(interpreter._bf16_as_fp32(numbers.numpy()))
    assert torch.equal(found.nan_to_num(), numbers.bfloat16().float().nan_to_num())
    assert torch.equal(found.isnan(), numbers.isnan())


def test_errors_are_in_units_of_the_tolerance():
    ones = torch.ones(3)
    assert interpreted.error(ones, ones) == 0.0
    assert interpreted.error(ones * 1.0002, ones) == pytest.approx(2.0, rel=0.01)
    assert interpreted.error(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert interpreted.error(torch.tensor([4, 5]), torch.tensor([4, 6])) == float("inf")
    assert interpreted.error(torch.tensor([4, 5], dtype=torch.int8), torch.tensor([4, 6], dtype=torch.int8)) == 1.0


def test_the_meaning_of_all_assembly_is_known():
    """But of what waits for other programs, which the interpreter runs one after the other."""
    texts = []
    for folder in ("packages", "shared/npu_tiling"):
        for file in (ROOT / folder).glob("**/src/**/*.py"):
            texts += re.findall(r"inline_asm_elementwise\(\s*(.*?)\n?\s*\"=", file.read_text(), re.DOTALL)
    assert len(texts) > 2
    unknown = [text for text in texts if "bra AGAIN" not in text and not any(part in text for part in interpreter.ASSEMBLY)]
    assert unknown == [], "tools/interpreter.py: ASSEMBLY"
