"""RMSNorm through Hugging Face's `kernels` library, without a network."""

from __future__ import annotations

import copy

import npu_rms_norm
import pytest
import torch
from causal_lms import assert_same, batch, make, step
from npu_rms_norm import layers

kernels = pytest.importorskip("kernels", minversion="0.17")
pytestmark = pytest.mark.usefixtures("one_thread")

MODE = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))


@pytest.fixture
def kernelized(monkeypatch):
    """Makes a model with ours; transformers registers its norms itself only with the release of `kernels` that it wants."""

    def make_with_ours(family, dtype=torch.float32):
        model = make(family, dtype)
        known = type(model.model.norm)
        if not hasattr(known, "kernel_layer_name"):
            monkeypatch.setattr(known, "kernel_layer_name", None, raising=False)  # taken back at the end
            monkeypatch.setattr(known, "kernel_condition", None, raising=False)
            kernels.replace_kernel_forward_from_hub(known, "RMSNorm")
        with kernels.use_kernel_mapping(layers.MAPPING, inherit_mapping=False):
            return kernels.kernelize(model, mode=MODE, device="cpu", use_fallback=False)

    return make_with_ours


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernelize_takes_ours_with_the_roundings_of_the_model(family, dtype, kernelized, monkeypatch):
    inputs = batch()
    expected, model = step(make(family, dtype), inputs), kernelized(family, dtype)
    calls = []
    monkeypatch.setattr(layers, "normalise", lambda *given: calls.append(given) or npu_rms_norm.patching.normalise(*given))
    found = step(model, inputs)
    assert len(calls) == sum("RMSNorm" in type(module).__name__ for module in model.modules())
    assert torch.equal(found.loss, expected.loss)
    assert_same(found, expected, dtype)


def test_kernelized_model_compiles_and_is_left_by_patch(kernelized):
    model, inputs = kernelized("Llama"), batch()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(step(model, inputs, compiled), step(model, inputs))
    report = npu_rms_norm.patch(model)
    assert not report.replaced
    assert {entry.text for entry in report.left} == {"its forward was replaced by something else"}


def test_class_of_another_formula_keeps_its_forward():
    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class HalfRMSNorm(torch.nn.Module):
        def forward(self, hidden_states):
            return hidden_states / 2

    module, x = HalfRMSNorm(), torch.randn(3, 8)
    with kernels.use_kernel_mapping(layers.MAPPING, inherit_mapping=False):
        kernelized = kernels.kernelize(copy.deepcopy(module), mode=MODE, device="cpu", use_fallback=False)
    assert "forward" in vars(kernelized)
    assert torch.equal(kernelized(x), module(x))
