"""LLaMA-Factory's kernel for norms with ours inside, as `use_v1_kernels` and `kernel_config` apply it."""

import copy

import pytest
import torch

pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from llamafactory.v1.plugins.model_plugins.kernels import interface  # noqa: E402
from npu_rms_norm.integrations import llamafactory as integration  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def a_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, num_hidden_layers=2, vocab_size=64))


@pytest.mark.parametrize("named", ["auto", integration.KERNEL])
def test_model_has_our_norms_and_the_loss_and_gradients_that_it_had(named):
    before = a_model().train()
    model = interface.apply_default_kernels(copy.deepcopy(before), include_kernels=named)
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    assert len(norms) == 9
    assert all(type(norm).__name__ == "NpuQwen3RMSNorm" for norm in norms)
    ids = torch.randint(64, (2, 16))
    losses = [known(input_ids=ids, labels=ids).loss for known in (model, before)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_plugin_of_version_1_takes_ours():
    model = interface.KernelPlugin("auto")(model=a_model(), include_kernels=integration.KERNEL)
    assert type(model.model.norm).__name__ == "NpuQwen3RMSNorm"


def test_unregister_puts_back_what_was_there():
    integration.register()
    integration.unregister()
    assert integration.KERNEL not in interface.default_kernels  # LLaMA-Factory's stands on npu alone
    with pytest.raises(ValueError, match="not found"):
        interface.apply_kernel(integration.KERNEL, model=a_model())
