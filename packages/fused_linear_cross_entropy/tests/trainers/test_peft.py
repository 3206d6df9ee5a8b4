"""The loss with the adapter of a head that peft has taken is that of the head's own logits."""

import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy

peft = pytest.importorskip("peft", reason="peft is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_of_peft(dtype):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(64, 500, bias=False, dtype=dtype)})
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["lm_head"], use_rslora=True)
    layer = peft.inject_adapter_in_model(config, model)["lm_head"]
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    leaves = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    x, target = torch.randn(2, 9, 64, dtype=dtype, requires_grad=True), torch.randint(0, 500, (2, 9))
    lora_a, lora_b, dropout = (part["default"] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    u = layer.scaling["default"] * lora_a(dropout(x).to(lora_a.weight.dtype))
    found = fused_linear_cross_entropy(x, layer.base_layer.weight, target, adapter=(u, lora_b.weight))
    expected = torch.nn.functional.cross_entropy(layer(x).float().flatten(0, 1), target.flatten())
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=20 * unit, atol=20 * unit)
    gradients = zip(*(torch.autograd.grad(loss, [x, *leaves]) for loss in (found, expected)), strict=True)
    for one, other in gradients:
        assert (one.double() - other.double()).norm() <= 20 * unit * other.double().norm()
