"""How many functions of ours, in how many files, a call passes until its first launch: what a reader follows."""

import sys

import npu_tiling
import pytest
import torch
from npu_rms_norm import operator, rms_norm
from npu_tiling.chips import detection
from npu_tiling.launching.direct import DirectCall
from npu_tiling.launching.kernels import Kernels

OURS = ("npu_rms_norm", "npu_tiling", "<string>")  # a function that is written for a key or a plan has no file


def launched(*arguments):
    """A stand-in for a kernel."""


@pytest.fixture
def stubbed(monkeypatch):
    """A CPU is an H200, whose launches do nothing and whose kernels are called directly from the second launch on."""
    known = set()

    def launch(self, module, kernel, spec, *rest):
        known.add((module, kernel, spec.key))
        launched()

    def direct_call(self, module, kernel, spec, *rest):
        call = DirectCall(launched, lambda index: 0, (), ())
        return (call, ()) if (module, kernel, spec.key) in known else None

    monkeypatch.setitem(detection._found, torch.device("cpu"), npu_tiling.GPUS["H200"])
    monkeypatch.setattr(Kernels, "launch", launch)
    monkeypatch.setattr(Kernels, "direct_call", direct_call)
    for name in ("_plans", "_functions"):
        monkeypatch.setattr(operator.FORWARD, name, {})
    monkeypatch.setattr(operator.FORWARD, "_approved", set())


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


def test_a_warm_call_passes_few_functions(stubbed):
    x, weight = torch.randn(4, 64), torch.ones(64)
    for _ in range(4):
        rms_norm(x, weight)
    passed = walk(lambda: rms_norm(x, weight))
    assert len(passed) <= 14, passed
    assert len({file for file, _ in passed}) <= 7, passed


def test_the_first_call_of_a_shape_passes_as_few_as_before(stubbed):
    weight = torch.ones(64)
    rms_norm(torch.randn(4, 64), weight)
    passed = walk(lambda: rms_norm(torch.randn(5, 64), weight))
    assert len(passed) <= 200, len(passed)
    assert len({file for file, _ in passed}) <= 28, passed
