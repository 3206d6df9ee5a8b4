"""What the tests with Hugging Face transformers share: small models, a step of training, how far apart two may be."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY, WIDTH, LAYERS = 96, 32, 2
PATCHES = {
    "rms_norm": npu_rms_norm.patch,
    "embedding": npu_embedding.patch,
    "fused_linear_cross_entropy": npu_fused_linear_cross_entropy.patch,
}

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # logits far enough apart for a softcap to matter
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"head_dim": 16, "tie_word_embeddings": True}
#: What a family's configuration has beside the sizes.
FAMILIES = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
    "Gemma": _GEMMA,
    "Gemma2": {**_GEMMA, "final_logit_softcapping": 2.0, "sliding_window": 4, "query_pre_attn_scalar": 16},
    "Gemma3": {**_GEMMA, "sliding_window": 4, "query_pre_attn_scalar": 16},
    "Mistral": {"sliding_window": 4},
    "Phi3": {"sliding_window": 4},
    "Olmo2": {},
}


def make(family: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.nn.Module:
    """A model of random weights, the same for equal arguments, in training mode."""
    config = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")(**_SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones and zeros would hide a weight that is left out
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
    return model.to(device, dtype).train()


def patch_all(model: torch.nn.Module) -> None:
    for patch in PATCHES.values():
        assert patch(model).replaced


def batch(tokens: int = 12, rows: int = 2, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Tokens, with the padding token and repeats among them, and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(tokens)
    input_ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    input_ids[0, 1] = input_ids[0, 2] = input_ids[1, 0]
    input_ids[-1, -2] = 0
    labels = input_ids.masked_fill(torch.rand(rows, tokens, generator=generator) < 0.3, -100)
    return {"input_ids": input_ids.to(device), "labels": labels.to(device)}


@dataclass
class Step:
    """What a step of training gives: the loss and the gradient of every parameter."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def step(model: torch.nn.Module, inputs: dict[str, torch.Tensor], call=None) -> Step:
    """One forward and backward of a model, called as `call` if that is given."""
    model.zero_grad(set_to_none=True)
    loss = (model if call is None else call)(**inputs).loss
    loss.backward()
    return Step(loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()})


def reference(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Step:
    """The step of a model as it was before it is patched; the model is as before."""
    return step(copy.deepcopy(model), inputs)


def assert_same(actual: Step, expected: Step, dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> None:
    """Both within the rounding of two ways to compute the same.

    On its way through the layers a value is rounded some sixteen times a layer, each time after a sum of about WIDTH terms
    in fp32; errors of random signs add up as their square root. Measured as norms against the gradient itself or, where
    terms cancel (biases of keys), against a hundredth of the largest one.
    """
    roundings = math.sqrt(16 * (layers + 1))
    unit = roundings * (torch.finfo(dtype).eps / 2 + (3 * math.sqrt(WIDTH) + 4) * torch.finfo(torch.float32).eps / 2)
    largest = max(gradient.norm() for gradient in expected.gradients.values())
    assert abs(actual.loss - expected.loss) <= unit * abs(expected.loss), "loss"
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        found = actual.gradients[name]
        assert found.dtype == gradient.dtype, name
        error = (found.double() - gradient.double()).norm() / max(gradient.double().norm(), largest / 100)
        assert error <= unit, f"{name}: off by {error:.3g}, {unit:.3g} is allowed"
