"""Training steps of a model with all four operators under `torch.compile(mode="reduce-overhead")`: CUDA graphs, replayed."""

from __future__ import annotations

import pytest
import torch
from npu_tiling import Kernels

from tools import bench_block as bench

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no graphs to capture")]

VOCABULARY, SIZES = 512, (64, 48, 72)  # tokens of a row


def batch(tokens):
    ids, target = (torch.randint(0, VOCABULARY, (2, tokens), device="cuda") for _ in range(2))
    return ids, target.flatten()


def step(forward, given, parameters):
    torch.compiler.cudagraph_mark_step_begin()
    loss = forward(*given, *parameters)
    gradients = torch.autograd.grad(loss, parameters)
    return [loss.detach().clone(), *(gradient.clone() for gradient in gradients)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_step_is_captured_and_replayed(dynamic, monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    found = bench.inputs(bench.case("captured", 2, SIZES[0], 128, 4, 256, VOCABULARY), torch.device("cuda"))
    parameters = [found[name].detach().float().requires_grad_() for name in found if name not in ("tokens", "target")]
    eager = bench.forward_of(bench.OURS, True)
    compiled = torch.compile(eager, fullgraph=True, dynamic=dynamic, mode="reduce-overhead")
    sizes = SIZES if dynamic else SIZES[:1]
    for tokens in sizes * 3:  # runs, is recorded, is replayed
        step(compiled, batch(tokens), parameters)
    given = [batch(tokens) for tokens in sizes]
    expected = [step(eager, each, parameters) for each in given]
    launched = []
    monkeypatch.setattr(Kernels, "launch", lambda self, module, kernel, *_: launched.append(kernel))
    for each, wanted in zip(given, expected, strict=True):
        for value, exact in zip(step(compiled, each, parameters), wanted, strict=True):
            torch.testing.assert_close(value, exact, rtol=2e-3, atol=2e-4 * float(exact.abs().max()))
    assert not launched  # by Python
