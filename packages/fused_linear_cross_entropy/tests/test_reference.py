"""The definition, in fp64 on a CPU: against torch.nn.functional.cross_entropy, and its derivatives."""

import itertools

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy

from testing.pairs import all_pairs


def inputs(tokens=7, width=5, vocabulary=11, **changes):
    case = losses.make(tokens, width, vocabulary, torch.float64, ignored=0.3, **changes)
    return case.x, case.weight, case.target


@pytest.mark.parametrize(
    *all_pairs(reduction=["mean", "sum", "none"], weighted=[False, True], smoothing=[0.0, 0.3], biased=[False, True])
)
def test_equals_torch_where_torch_has_the_option(reduction, weighted, smoothing, biased):
    x, weight, target = inputs()
    class_weight = torch.rand(11).double() + 0.5 if weighted else None
    bias = torch.randn(11).double() if biased else None
    results = []
    for chunk in (None, 3):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        options = {"reduction": reduction, "label_smoothing": smoothing, "chunk_tokens": chunk}
        loss = fused_linear_cross_entropy(*leaves, target, bias, class_weight=class_weight, **options)
        results.append((loss, *torch.autograd.grad(loss.square().sum(), leaves)))
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = torch.nn.functional.linear(*leaves, bias)
    loss = torch.nn.functional.cross_entropy(
        logits, target, class_weight, reduction=reduction, label_smoothing=smoothing
    )  # fmt: skip
    expected = (loss, *torch.autograd.grad(loss.square().sum(), leaves))
    for result in results:
        for ours, theirs in zip(result, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0, "logit_scale": 0.5},
    "z-loss": {"lse_square_scale": 0.1},
    "smoothing": {"label_smoothing": 0.2, "lse_square_scale": 0.1, "softcap": 3.0},
    "entropy": {"return_entropy": True, "softcap": 3.0},
}


@pytest.mark.parametrize(("reduction", "chunk"), [("mean", {}), ("sum", {"chunk_tokens": 3}), ("none", {"chunk_tokens": 3})])
@pytest.mark.parametrize("what", OPTIONS)
def test_gradients_are_the_derivatives(what, reduction, chunk):
    x, weight, target = inputs()
    bias = torch.randn(11).double()

    def function(x, weight, bias):
        out = fused_linear_cross_entropy(x, weight, target, bias, reduction=reduction, **OPTIONS[what], **chunk)
        return (out.loss, out.entropy) if what == "entropy" else out

    # Fast mode: along one random direction, not one element after the other.
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in (x, weight, bias)], fast_mode=True)


def test_token_scaling_takes_its_factor_as_a_constant():
    x, weight, target = inputs()
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    scaled = fused_linear_cross_entropy(*leaves, target, token_scaling=True, reduction="sum")
    rows = fused_linear_cross_entropy(*leaves, target, reduction="none")
    expected = (rows * torch.exp(-rows).detach()).sum()
    assert torch.allclose(scaled, expected, rtol=1e-12)
    for ours, theirs in zip(*(torch.autograd.grad(loss, leaves) for loss in (scaled, expected)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_the_z_loss_is_divided_by_the_number_of_rows():
    """Also where class weights divide the rest."""
    x, weight, target = inputs()
    weights = torch.rand(11).double() + 0.5
    out = fused_linear_cross_entropy(
        x, weight, target, class_weight=weights, lse_square_scale=0.1, return_z_loss=True, return_lse=True
    )  # fmt: skip
    plain = fused_linear_cross_entropy(x, weight, target, class_weight=weights)
    counted = target != -100
    assert torch.allclose(out.z_loss, 0.1 * out.lse[counted].square().mean(), rtol=1e-12)
    assert torch.allclose(out.loss, plain + out.z_loss, rtol=1e-12)


def test_ignored_rows_change_nothing():
    x, weight, target = inputs(tokens=12)
    counted = target != -100
    whole = fused_linear_cross_entropy(x, weight, target)
    assert torch.allclose(whole, fused_linear_cross_entropy(x[counted], weight, target[counted]), rtol=1e-12)


def test_a_constant_added_to_every_logit_changes_nothing():
    x, weight, target = inputs()
    shifted = fused_linear_cross_entropy(x, weight, target, torch.full((11,), 1000.0).double())
    assert torch.allclose(shifted, fused_linear_cross_entropy(x, weight, target), rtol=1e-10)


def test_every_reduction_is_of_the_same_rows():
    x, weight, target = inputs()
    options = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 3.0, "return_z_loss": True}
    mean, total, rows = (
        fused_linear_cross_entropy(x, weight, target, reduction=r, **options) for r in ("mean", "sum", "none")
    )
    n = (target != -100).sum()
    for name in ("loss", "z_loss"):
        assert torch.allclose(getattr(total, name), getattr(rows, name).sum(), rtol=1e-12)
        assert torch.allclose(getattr(mean, name), getattr(total, name) / n, rtol=1e-12)


class TestWhatPeersGetWrong:
    """Each of these gave a wrong result, an error or a surprise elsewhere."""

    @pytest.mark.parametrize("vocabulary", [100, 129, 4097])
    def test_class_weights_with_smoothing_where_no_block_divides_the_vocabulary(self, device, vocabulary):
        case = losses.make(9, 16, vocabulary, torch.float32, class_weight=True, label_smoothing=0.1)
        losses.check(case, losses.run(case, device.torch))

    def test_softcap_is_not_applied_to_padding(self, device):
        for vocabulary in (129, 8200):
            case = losses.make(9, 16, vocabulary, torch.float32, softcap=1.0, return_lse=True)
            losses.check(case, losses.run(case, device.torch))

    def test_zero_tokens(self, device):
        x = torch.empty(0, 16, device=device.torch, requires_grad=True)
        weight = torch.randn(123, 16, device=device.torch, requires_grad=True)
        loss = fused_linear_cross_entropy(x, weight, torch.empty(0, dtype=torch.int64, device=device.torch))
        loss.backward()
        assert loss.item() == 0
        assert x.grad.shape == (0, 16)
        assert not weight.grad.any()

    def test_extras_are_constants(self, device):
        case = losses.make(5, 16, 123, torch.float32)
        x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
        flags = ("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_lse")
        out = fused_linear_cross_entropy(
            x, weight, case.target.to(device.torch), lse_square_scale=0.1, **dict.fromkeys(flags, True)
        )
        assert out.loss.requires_grad
        assert not any(extra.requires_grad for extra in out[1:] if extra is not None)
        assert out.entropy is None

    def test_a_trained_head_on_a_frozen_body_and_the_reverse(self, device):
        case = losses.make(5, 16, 123, torch.float32)
        for frozen_x, frozen_weight in itertools.product((False, True), repeat=2):
            x = case.x.to(device.torch).requires_grad_(not frozen_x)
            weight = case.weight.to(device.torch).requires_grad_(not frozen_weight)
            loss = fused_linear_cross_entropy(x.clone() if not frozen_x else x, weight, case.target.to(device.torch))
            assert loss.requires_grad == (not frozen_x or not frozen_weight)
            if loss.requires_grad:
                loss.backward()
            assert (x.grad is None) == frozen_x
            assert (weight.grad is None) == frozen_weight
            case.x, case.weight = case.x.detach(), case.weight.detach()
