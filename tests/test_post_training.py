"""The page on post-training: what its head under FSDP2 sends, on two ranks, and that its LoRA is peft's formula."""

from pathlib import Path

import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy
from npu_offline import ranks

WORKER = Path(__file__).parent / "post_training_worker.py"


@pytest.mark.slow
def test_a_head_that_computes_its_loss_is_gathered_once_for_all_chunks():
    ranks.need("cpu")
    ranks.run(WORKER, 2, "cpu")


def test_an_adapter_as_columns_has_the_gradients_of_the_merged_weight():
    torch.manual_seed(0)
    x, base, target = torch.randn(9, 16), torch.randn(50, 16), torch.randint(0, 50, (9,))
    leaves = torch.randn(4, 16, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    lora_a, lora_b = leaves
    wide = torch.cat((x, 0.5 * torch.nn.functional.linear(x, lora_a)), -1)
    loss = fused_linear_cross_entropy(wide, torch.cat((base, lora_b), 1), target)
    expected = torch.nn.functional.cross_entropy(x @ (base + 0.5 * lora_b @ lora_a).t(), target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))
