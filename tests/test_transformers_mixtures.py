"""`patch` of the loss in mixtures of experts, and in models of text and images: the same results."""

import npu_fused_linear_cross_entropy
import pytest
import torch
from causal_lms import VOCABULARY, WIDTH, assert_same, batch, reference, step, transformers

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTURES = {
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16},
}


@pytest.mark.parametrize("router", [True, False])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_routers_loss_is_added(family, router):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **TEXT, **{**EXPERTS, "output_router_logits": router}, **MIXTURES[family]
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    inputs = {**batch(), "attention_mask": torch.ones(2, 12, dtype=torch.int64)}
    inputs["attention_mask"][0, -3:] = 0
    expected, before = reference(model, inputs), model(**inputs)
    assert npu_fused_linear_cross_entropy.patch(model).replaced
    assert_same(step(model, inputs), expected)
    found = model(**inputs)
    assert type(found) is type(before)
    assert found.logits is None
    assert (found.aux_loss is None) == (not router)
    if router:
        torch.testing.assert_close(found.aux_loss, before.aux_loss)
        assert len(found.router_logits) == 2


def test_a_model_of_text_and_images_has_its_text_head():
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_index=5, image_token_id=5
    )
    model = transformers.LlavaForConditionalGeneration(config).train()
    inputs = batch()
    tokens = inputs["input_ids"].masked_fill(inputs["input_ids"] == 5, 6)
    tokens[:, 2:6] = 5  # the places of four patches
    inputs = {"input_ids": tokens, "labels": inputs["labels"], "pixel_values": torch.randn(2, 3, 8, 8)}
    used = {name for name, gradient in reference(model, inputs).gradients.items() if gradient is not None}
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in used)
    expected = reference(model, inputs)
    report = npu_fused_linear_cross_entropy.patch(model)
    assert [type(model).__name__ for _ in report.replaced] == ["LlavaForConditionalGeneration"]
    found = step(model, inputs)
    for result in (expected, found):
        result.gradients = {name: gradient for name, gradient in result.gradients.items() if name in used}
    assert_same(found, expected)
    after = model(**inputs)
    assert after.logits is None
    assert after.image_hidden_states is not None
