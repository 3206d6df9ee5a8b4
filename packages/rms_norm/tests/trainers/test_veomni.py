"""VeOmni's norms with ours inside, against the code that its models run without a kernel."""

import importlib

import pytest
import torch

pytest.importorskip("veomni", reason="VeOmni is not installed")

from npu_rms_norm.integrations import veomni as integration  # noqa: E402
from veomni.ops.kernel_registry import KERNEL_REGISTRY  # noqa: E402

# Variant of the norm, its class, and the file of VeOmni's models that has both.
CLASSES = [
    ("standard", "Qwen3RMSNorm", "qwen3.generated.patched_modeling_qwen3_npu"),
    ("standard", "LlamaRMSNorm", "llama.generated.patched_modeling_llama_gpu"),
    ("qwen3_5", "Qwen3_5RMSNorm", "qwen3_5.generated.patched_modeling_qwen3_5_npu"),
    ("unweighted", "DeepseekV4UnweightedRMSNorm", "deepseek_v4.generated.patched_modeling_deepseek_v4_npu"),
]


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def outputs(norm, x):
    x = x.detach().clone().requires_grad_()
    norm.zero_grad()
    y = norm(x)
    y.float().square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in norm.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("variant", "name", "file"), CLASSES, ids=lambda value: value.partition(".")[0])
def test_models_norm_is_what_it_was(variant, name, file, dtype):
    torch.manual_seed(0)
    module = importlib.import_module(f"veomni.models.transformers.{file}")
    norm = getattr(module, name)(*() if variant == "unweighted" else (32,)).to(dtype)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, 1 if variant == "standard" else 0, 0.25)
    x = torch.randn(3, 5, 32).to(dtype)
    slot = module.veomni_unweighted_rms_norm if variant == "unweighted" else module.veomni_rms_norm
    slot.bind("eager")
    expected = outputs(norm, x)
    slot.bind(integration.BACKEND)
    assert slot.bound_kernel() is integration.VARIANTS[variant]
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 8e-2}
    results = outputs(norm, x)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **tolerance)
    if dtype is torch.bfloat16:
        torch.testing.assert_close(results[0], expected[0], rtol=2**-7, atol=1e-6)  # one rounding of the last bit
    slot.bind("eager")


def test_classes_that_are_patched_as_a_whole_get_ours(monkeypatch):
    """DeepSeek 3's norm has no variant of the registry: VeOmni puts a forward into transformers' class."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling
    from veomni.ops.config.registry import _import_entry, get_op

    backend = get_op("rms_norm").backends[integration.BACKEND]
    assert backend.replace_forward
    norm, x = modeling.DeepseekV3RMSNorm(32), torch.randn(3, 5, 32)
    expected = outputs(norm, x)
    monkeypatch.setattr(modeling.DeepseekV3RMSNorm, "forward", _import_entry(backend.entry))
    for ours, theirs in zip(outputs(norm, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_weights_near_zero_keep_their_channels():
    """1 + weight in bf16 has steps of 2^-7: it loses a weight below 2^-9, and the norm of Qwen 3.5 must not."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 32).bfloat16(), torch.full((32,), 2.0**-10, dtype=torch.bfloat16)
    y = KERNEL_REGISTRY.resolve("rms_norm", "qwen3_5", integration.BACKEND)(10000 * x, weight, 1e-6)
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    kept = (y.double() / exact).mean()
    assert abs(kept - 1 - 2.0**-10) < 2.0**-11


def test_unregister_gives_veomni_its_own():
    integration.unregister()
    spec = KERNEL_REGISTRY._specs["rms_norm", "standard"][integration.BACKEND]
    assert spec.factory.__module__.startswith("veomni")
    integration.register()
    integration.register()
    assert KERNEL_REGISTRY.resolve("rms_norm", "standard", integration.BACKEND) is integration.VARIANTS["standard"]
