"""Liger's fused head with ours inside."""

import pytest
import torch

liger_kernel = pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
pytest.importorskip("triton", reason="liger-kernel needs Triton")

from npu_fused_linear_cross_entropy.integrations import liger as integration  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    yield
    integration.unregister()


def a_head(tokens=13, width=24, vocabulary=37):
    torch.manual_seed(0)
    x = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    target = torch.randint(vocabulary, (tokens,))
    target[::4] = -100
    return x, weight, target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_functional_gives_the_loss_of_the_definition(reduction):
    from liger_kernel.functional import fused_linear_cross_entropy

    x, weight, target = a_head()
    loss, z_loss, accuracy, predicted = fused_linear_cross_entropy(x, weight, target, reduction=reduction)
    expected = torch.nn.functional.cross_entropy(x @ weight.T, target, reduction=reduction)
    assert (z_loss, accuracy, predicted) == (None, None, None)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss.sum(), [x, weight])
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.sum(), [x, weight]), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_module_passes_every_option_on():
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    x, weight, target = a_head()
    head = LigerFusedLinearCrossEntropyLoss(
        label_smoothing=0.1,
        lse_square_scale=1e-2,
        softcap=5.0,
        return_z_loss=True,
        return_token_accuracy=True,
        return_predicted_tokens=True,
    )
    output = head(weight, x, target)
    logits = 5 * torch.tanh(x @ weight.T / 5)
    counted = target != -100
    z_loss = 1e-2 * torch.logsumexp(logits, -1)[counted].square().mean()
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1) + z_loss)
    torch.testing.assert_close(output.z_loss, z_loss)
    largest = logits.argmax(-1)
    assert torch.equal(output.predicted_tokens, torch.where(counted, largest, -1))
    torch.testing.assert_close(output.token_accuracy, (largest == target)[counted].float().mean())


def test_unregister_gives_liger_its_own():
    import liger_kernel.ops

    integration.unregister()
    name = integration.LigerFusedLinearCrossEntropyFunction.__name__
    assert getattr(liger_kernel.ops, name) is not integration.LigerFusedLinearCrossEntropyFunction
