"""`npu_rms_norm.patch` in whole models whose norms have a gate: Mamba 2 and Qwen3-Next of transformers."""

from __future__ import annotations

import causal_lms
import npu_rms_norm
import pytest
import torch
from causal_lms import VOCABULARY, WIDTH, assert_same, batch, reference, step

pytestmark = pytest.mark.usefixtures("one_thread")

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
_MAMBA2 = {"hidden_size": WIDTH, "num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "chunk_size": 4}
CONFIGS = {
    "Mamba2": {**_TOKENS, **_MAMBA2, "n_groups": 1, "num_hidden_layers": 2},
    "Qwen3Next": {
        **_TOKENS,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [0, 1],
    },
}
GATED = {"Mamba2": 2, "Qwen3Next": 1}  # layers that have one


def make(family: str, dtype: torch.dtype) -> torch.nn.Module:
    transformers = causal_lms.transformers
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**CONFIGS[family]))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
    return model.to(dtype).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_with_gated_norms_trains_as_the_original_does(family, dtype):
    model, inputs = make(family, dtype), batch()
    expected = reference(model, inputs)
    report = npu_rms_norm.patch(model)
    assert not report.left
    gated = [entry for entry in report.replaced if entry.was.endswith("Gated")]
    assert len(gated) == GATED[family]
    found = step(model, inputs)
    assert torch.equal(found.loss, expected.loss)
    assert_same(found, expected, dtype)
    weights = [name for name in found.gradients if any(name.startswith(entry.name) for entry in gated)]
    assert len(weights) == GATED[family]
    assert all(found.gradients[name].abs().sum() > 0 for name in weights)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_with_gated_norms_is_the_original_again(family):
    model, inputs = make(family, torch.float32), batch()
    before, kinds = reference(model, inputs), [type(module) for module in model.modules()]
    npu_rms_norm.patch(model).undo()
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(step(model, inputs).loss, before.loss)
