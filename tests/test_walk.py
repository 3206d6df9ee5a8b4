"""How many functions of ours, in how many files, a call passes until its first launch: what a reader follows."""

import sys

import npu_attn_res.operator
import npu_embedding.lookup
import npu_fused_linear_cross_entropy.operator
import npu_rms_norm.operator
import npu_tiling
import pytest
import torch
import torch.distributed.tensor  # once anyone has imported it, `is_distributed` looks into lists
from npu_attn_res import attn_res, attn_res_bank
from npu_embedding import embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs
from npu_rms_norm import rms_norm
from npu_tiling import chips as detection
from npu_tiling import launch as launching
from npu_tiling.direct import DirectCall
from npu_tiling.launch import Kernels

OURS = ("npu_", "<string>")  # a function that is written for a key or a plan has no file
WEIGHT = torch.ones(64)
# An operator, a call for a number of rows, and the most functions and files that a warm call and a shape's first one pass.
CALLS = {
    "rms_norm": (npu_rms_norm.operator.FORWARD, lambda rows: rms_norm(torch.ones(rows, 64), WEIGHT), (14, 7), (197, 15)),
    "embedding": (
        npu_embedding.lookup.FORWARD,
        lambda rows: embedding(torch.arange(rows), torch.ones(9, 64)),
        (14, 7),
        (126, 16),
    ),
    "attn_res, a list": (
        npu_attn_res.operator.FORWARD,
        lambda rows: attn_res([torch.ones(rows, 64) for _ in range(8)], WEIGHT, WEIGHT),
        (20, 9),
        (303, 19),
    ),
    "attn_res_bank": (
        npu_attn_res.operator.FORWARD,
        lambda rows: attn_res_bank(torch.ones(rows, 9, 64), 8, torch.ones(rows, 64), WEIGHT, WEIGHT),
        (20, 9),
        (263, 19),
    ),
    "cross entropy": (
        npu_fused_linear_cross_entropy.operator.FORWARD.forward,
        lambda rows: fused_linear_cross_entropy(torch.ones(rows, 8), torch.ones(9, 8), torch.arange(rows)),
        (14, 7),
        (476, 24),
    ),
    "log_probs": (
        npu_fused_linear_cross_entropy.operator.FORWARD.forward,
        lambda rows: linear_log_probs(torch.ones(rows, 8), torch.ones(9, 8), torch.arange(rows)),
        (14, 7),
        (488, 25),
    ),
    "distillation": (
        npu_fused_linear_cross_entropy.operator.DISTILLATION.forward,
        lambda rows: linear_distillation_loss(
            torch.ones(rows, 8), torch.ones(9, 8), teacher=(torch.ones(rows, 4), torch.ones(9, 4))
        ),
        (20, 9),
        (426, 20),
    ),
}


def launched(*arguments):
    """A stand-in for a kernel."""


@pytest.fixture(params=CALLS)
def case(request, monkeypatch):
    """A CPU is an H200, whose launches do nothing and whose kernels are called directly from the second launch on."""
    operator, *limits = CALLS[request.param]
    known = set()

    def launch(self, module, kernel, decision, *rest):
        known.add((module, kernel, decision.key))
        launched()

    def direct_call(self, module, kernel, decision, *rest):
        call = DirectCall(launched, lambda index: 0, (), ())
        return (call, ()) if (module, kernel, decision.key) in known else None

    monkeypatch.setitem(detection._found, torch.device("cpu"), npu_tiling.GPUS["H200"])
    monkeypatch.setattr(Kernels, "launch", launch)
    monkeypatch.setattr(Kernels, "direct_call", direct_call)
    for name in ("_plans", "_functions"):
        monkeypatch.setattr(operator, name, {})
    monkeypatch.setattr(operator, "_approved", set())
    monkeypatch.setattr(launching, "replaced", {})  # tilings that other tests refused: `decide` would hash each of ours
    return limits


def walk(call):
    """Files and names of the functions that a call passes until it launches."""
    passed = []

    def note(frame, event, _):
        if event != "call":
            return
        if frame.f_code is launched.__code__:
            sys.setprofile(None)
        elif any(name in frame.f_code.co_filename for name in OURS):
            passed.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return passed


def test_a_warm_call_passes_few_functions(case):
    call, (functions, files), _ = case
    for _ in range(4):
        call(4)
    passed = walk(lambda: call(4))
    assert len(passed) <= functions, passed
    assert len({file for file, _ in passed}) <= files, passed


def test_the_first_call_of_a_shape_passes_few_functions(case):
    call, _, (functions, files) = case
    call(4)
    passed = walk(lambda: call(5))
    assert len(passed) <= functions, len(passed)
    assert len({file for file, _ in passed}) <= files, passed
