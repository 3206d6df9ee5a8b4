"""Functions of ours that one call runs on the host: what a small call costs is Python, and these are counted, not timed.

Those of RMSNorm, the embedding and Attention Residuals are counted until the launch: test_walk.py.
"""

import gc
import sys
from collections.abc import Callable

import npu_tiling
import pytest
import torch
import torch.distributed.tensor  # where it is imported, calls look for DTensors: the same in every process
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs
from npu_tiling import Kernels
from npu_tiling.launching import listening
from npu_tiling.launching.direct import DirectCall
from npu_tiling.pytorch.repeats import Repeats

HEAD, TARGET = [(16, 256), (128, 256)], torch.arange(16)
TEACHER = torch.ones(16, 64, dtype=torch.bfloat16), torch.ones(128, 64, dtype=torch.bfloat16)
CALLS = {  # a call, its tensors, and how many functions it runs at most: forward, and forward with backward
    "cross entropy": (lambda *head: fused_linear_cross_entropy(*head, TARGET), HEAD, 110, 167),
    "log_probs": (lambda *head: linear_log_probs(*head, TARGET), HEAD, 119, 243),
    "distillation": (lambda *head: linear_distillation_loss(*head, TARGET, teacher=TEACHER), HEAD, 115, 174),
}


def functions(run: Callable[[], object]) -> int:
    """How many functions of our packages a call runs, once all that is looked up has been met."""
    found = 0

    def count(frame, event, argument):
        nonlocal found
        found += event == "call" and frame.f_globals.get("__name__", "").startswith("npu_")

    for _ in range(6):
        run()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def forward_and_both(name: str) -> tuple[int, int]:
    call, shapes, *_ = CALLS[name]
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]

    def with_gradients():
        y = call(*leaves)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    def without_gradients():
        with torch.no_grad():
            call(*leaves)

    return functions(without_gradients), functions(with_gradients)


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(Kernels, "launch", lambda *_: None)
    for one in gc.get_objects():
        if type(one) is Repeats:  # what other tests repeat is decided here, and forgotten after
            monkeypatch.setattr(one, "_known", {})
            monkeypatch.setattr(one, "recognised", {})
            monkeypatch.setattr(one, "_count", 0)
            monkeypatch.setattr(one, "_lists", ())
    # What other tests' launches fell back to is looked up.
    monkeypatch.setattr("npu_tiling.launching.fallback._replaced", {})
    with npu_tiling.use_device(npu_tiling.GPUS["H200"], emulated=True):
        yield


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_launches_are_decided_runs_few_functions(name):
    counted, most = forward_and_both(name), CALLS[name][2:]
    assert counted[0] <= most[0] and counted[1] <= most[1], counted


REPEATED = {  # the same of calls that are repeated
    "cross entropy": (35, 58),
    "log_probs": (43, 62),
    "distillation": (45, 68),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_runs_fewer(name, monkeypatch):
    monkeypatch.setattr("npu_tiling.pytorch.repeats.is_overridden", lambda: False)
    monkeypatch.setattr("npu_tiling.pytorch.repeats._index_of", lambda tensor: 0)
    call = DirectCall(lambda *_: None, lambda index: 0, (), ())

    def launch(self, module, kernel, spec, grid, tensors, scalars):
        if listening.here.listener is not None:
            listening.here.listener.launched(call, grid, tensors, scalars, ())

    monkeypatch.setattr(Kernels, "launch", launch)
    counted = forward_and_both(name)
    assert counted == REPEATED[name]
