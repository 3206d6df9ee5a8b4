"""`patch` on the norms that Megatron's own layers have."""

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import npu_rms_norm  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def test_norms_of_local_layers_are_replaced():
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, normalization="RMSNorm")
    model = torch.nn.ModuleDict({"input_layernorm": WrappedTorchNorm(config, 32, eps=1e-5)})
    norm, x, seen = model["input_layernorm"], torch.randn(7, 32, requires_grad=True), torch.randn(7, 32)
    torch.nn.init.normal_(norm.weight)

    def step():
        y = norm(x)
        return [y, *torch.autograd.grad(y, (x, norm.weight), seen)]

    expected = step()
    report = npu_rms_norm.patch(model)
    assert len(report.replaced) == 1 and type(norm) is not torch.nn.RMSNorm
    for one, other in zip(step(), expected, strict=True):
        torch.testing.assert_close(one, other)
