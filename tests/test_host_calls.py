"""Functions of ours that one call runs on the host: what a small call costs is Python, and these are counted, not timed."""

import sys
from collections.abc import Callable

import npu_tiling
import pytest
import torch
import torch.distributed.tensor  # where it is imported, calls look for DTensors: the same in every process
from npu_attn_res import attn_res, attn_res_bank
from npu_embedding import embedding
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs
from npu_rms_norm import add_rms_norm, rms_norm
from npu_tiling import Kernels

WEIGHTS = [(256,), (256,)]
HEAD, TARGET = [(16, 256), (128, 256)], torch.arange(16)
TEACHER = torch.ones(16, 64, dtype=torch.bfloat16), torch.ones(128, 64, dtype=torch.bfloat16)
CALLS = {  # a call, its tensors, and how many functions it runs at most: forward, and forward with backward
    "rms_norm": (rms_norm, [(16, 256), (256,)], 29, 58),
    "add_rms_norm": (lambda *given: add_rms_norm(*given).y, [(16, 256)] * 2 + [(256,)], 31, 60),
    "embedding": (lambda table: embedding(torch.arange(16), table), [(64, 256)], 28, 50),
    "attn_res": (lambda v, *weights: attn_res(v, *weights), [(8, 16, 256), *WEIGHTS], 37, 81),
    "attn_res, a list": (lambda q, w, *v: attn_res(v, q, w), [*WEIGHTS, *[(16, 256)] * 8], 43, 99),
    "cross entropy": (lambda *head: fused_linear_cross_entropy(*head, TARGET), HEAD, 110, 165),
    "log_probs": (lambda *head: linear_log_probs(*head, TARGET), HEAD, 119, 242),
    "distillation": (lambda *head: linear_distillation_loss(*head, TARGET, teacher=TEACHER), HEAD, 115, 172),
    "attn_res_bank": (lambda v, p, q, w: attn_res_bank(v, 8, p, q, w).output, [(16, 9, 256), (16, 256), *WEIGHTS], 47, 97),
}


def functions(run: Callable[[], object]) -> int:
    """How many functions of our packages a call runs, once all that is looked up has been met."""
    found = 0

    def count(frame, event, argument):
        nonlocal found
        found += event == "call" and frame.f_globals.get("__name__", "").startswith("npu_")

    for _ in range(2):
        run()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_few_functions(name, monkeypatch):
    call, shapes, forward, both = CALLS[name]
    monkeypatch.setattr(Kernels, "launch", lambda *_: None)
    monkeypatch.setattr(
        "npu_tiling.launching.fallback._replaced", {}
    )  # what other tests' launches fell back to is looked up
    leaves = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]

    def with_gradients():
        y = call(*leaves)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    def without_gradients():
        with torch.no_grad():
            call(*leaves)

    with npu_tiling.use_device(npu_tiling.GPUS["H200"], emulated=True):
        counted = functions(without_gradients), functions(with_gradients)
    assert counted[0] <= forward and counted[1] <= both, counted
