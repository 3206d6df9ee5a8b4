"""A model that ms-swift loads, with our norms inside."""

import sys
import types

import pytest
import torch

pytest.importorskip("swift.model.register", reason="ms-swift is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from npu_rms_norm.integrations import ms_swift as integration  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen 3 of two layers with a tokenizer of words."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("model")
    words = {word: number for number, word in enumerate(["<pad>", "<|im_end|>", "<unk>", "user"])}
    words = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokens = {"pad_token": "<pad>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes, num_hidden_layers=2, vocab_size=64)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def loaded(folder):
    from swift.model import get_model_processor

    options = {
        "model_type": "qwen3",
        "torch_dtype": torch.float32,
        "device_map": torch.get_default_device().type,
        "attn_impl": "eager",
        "use_hf": True,
    }
    model, _ = get_model_processor(folder, **options)
    return model.train()


def test_loaded_model_has_our_norms_and_the_loss_and_gradients_that_it_had(folder):
    before = loaded(folder)
    integration.register()
    integration.register()
    model = loaded(folder)
    integration.unregister()
    assert type(loaded(folder).model.norm) is type(before.model.norm)
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


@pytest.mark.parametrize(("name", "known"), [("NpuRMSNorm", "qwen3"), ("NpuQwen3_5RMSNorm", "qwen3_5")])
def test_classes_for_npu_compute_what_those_of_transformers_do(name, known, monkeypatch):
    """ms-swift loads these classes where there is an npu, and they call torch_npu: a stand-in of its name is empty."""
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    import swift.model.npu_patch.model as for_npu

    of_transformers = {"NpuRMSNorm": "Qwen3RMSNorm", "NpuQwen3_5RMSNorm": "Qwen3_5RMSNorm"}[name]
    modeling = pytest.importorskip(f"transformers.models.{known}.modeling_{known}", reason=f"no {known}")
    norm, expected = getattr(for_npu, name)(32), getattr(modeling, of_transformers)(32)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter, norm.weight.mean().item(), 0.25)
    expected.load_state_dict(norm.state_dict())
    x = torch.randn(3, 5, 32).bfloat16()
    norm, expected = norm.bfloat16(), expected.bfloat16()
    integration.register()
    y = norm(x)
    integration.unregister()
    torch.testing.assert_close(y, expected(x), rtol=2**-7, atol=1e-6)
    with pytest.raises(AttributeError, match="npu_rms_norm"):
        norm(x)  # ms-swift's own
