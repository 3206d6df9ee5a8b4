"""Every class that transformers marks as an RMSNorm, with our layer in place of its own."""

import importlib
import inspect
from pathlib import Path

import npu_rms_norm
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
kernels = pytest.importorskip("kernels", reason="the package kernels is not installed")

from npu_rms_norm.integrations import layers  # noqa: E402
from npu_rms_norm.integrations import transformers as integration  # noqa: E402
from npu_rms_norm.patching import formula_of  # noqa: E402

MARK = 'use_kernel_forward_from_hub("RMSNorm'


def marked_classes():
    """Name of the mark and class, for every class of the installed transformers that has one."""
    found = []
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if MARK in file.read_text():
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            for _, known in inspect.getmembers(module, inspect.isclass):
                mark = vars(known).get("kernel_layer_name", "")
                if known.__module__ == module.__name__ and mark.startswith("RMSNorm"):
                    found.append(pytest.param(mark, known, id=known.__name__))
    return found


@pytest.fixture
def registered(device):
    npu_rms_norm.use_kernels([device.type])
    yield
    integration.unregister()


def a_norm(known, dtype):
    norm = known(32).to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(1 + torch.randn(parameter.shape, dtype=torch.float32) / 4)
    return norm.train()


def outputs(norm, x, *gate):
    x = x.detach().clone().requires_grad_()
    y = norm(x, *gate)
    y.float().square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in norm.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mark", "known"), marked_classes())
def test_marked_class_computes_what_it_did(registered, device, mark, known, dtype):
    torch.manual_seed(0)
    norm = a_norm(known, dtype)
    x = torch.randn(3, 5, 32).to(dtype)
    gate = [torch.randn(3, 5, 32).to(dtype)] if mark == "RMSNormGated" else []
    expected = outputs(norm, x, *gate)
    norm.zero_grad()
    kernels.kernelize(norm, mode=kernels.Mode.TRAINING, device=device.type)
    assert norm.forward.__func__.__module__ == layers.__name__
    # Ours rounds gradients once, PyTorch's operators each.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 8e-2}
    for ours, theirs in zip(outputs(norm, x, *gate), expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **tolerance)


def test_every_marked_class_is_known():
    """One that is not keeps its own forward, which this test would hide above."""
    unknown = [
        known.__name__ for _, known in (parameter.values for parameter in marked_classes()) if formula_of(known) is None
    ]
    assert unknown == []


def test_model_takes_our_layers_and_trains(registered):
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(64, (2, 16))
    expected = model(input_ids=ids, labels=ids).loss
    model.set_use_kernels(True)
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    assert len(norms) == 5
    assert all(norm.forward.__func__.__module__ == layers.__name__ for norm in norms)
    loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert all(norm.weight.grad.abs().sum() > 0 for norm in norms)


def test_a_class_that_is_not_known_keeps_its_own_forward(registered, device):
    class Doubled(torch.nn.Module):
        kernel_layer_name = "RMSNorm"

        def forward(self, hidden_states):
            return 2 * hidden_states

    norm = Doubled().train()
    kernels.kernelize(norm, mode=kernels.Mode.TRAINING, device=device.type)
    assert norm(torch.ones(3)).tolist() == [2, 2, 2]


def test_unregister_puts_the_mapping_back():
    from transformers.integrations.hub_kernels import get_kernel_mapping_transformers

    before = {name: dict(devices) for name, devices in get_kernel_mapping_transformers().items() if devices}
    integration.register()
    assert get_kernel_mapping_transformers()["RMSNorm"]["npu"] != before["RMSNorm"]["npu"]
    integration.unregister()
    after = get_kernel_mapping_transformers()
    assert {name: devices for name, devices in after.items() if devices} == before
