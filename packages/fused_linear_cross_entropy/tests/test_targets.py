"""Targets that are ignored, outside the vocabulary or narrow, and the tokens that are predicted in their place."""

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import (
    causal_lm_loss,
    fused_linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
)

pytestmark = pytest.mark.usefixtures("npu_poisoned")

ALL = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens", "return_lse"), True)


@pytest.mark.parametrize(("reduction", "weighted"), [("mean", True), ("sum", False), ("none", True)])
def test_all_rows_ignored(device, reduction, weighted):
    case = losses.make(5, 32, 123, ignored=2.0, class_weight=weighted, reduction=reduction, lse_square_scale=0.1, **ALL)
    results = losses.run(case, device.torch)
    for name, output in results.outputs.items():
        if output is not None:
            assert (output == (-1 if name == "predicted_tokens" else 0)).all(), name
    assert not any(gradient.any() for gradient in results.gradients.values())


@pytest.mark.parametrize("wrong", [-1, 123, 2**40])
def test_targets_outside_the_vocabulary(device, wrong):
    case = losses.make(5, 32, 123, reduction="none")
    case.target[2] = wrong
    if device.name == "cpu":
        with pytest.raises(IndexError, match=rf"target\[2\] is {wrong} and must be from 0 to 122, or ignore_index, -100"):
            losses.run(case, device.torch)
        return
    results = losses.run(case, device.torch)
    case.target[2] = -100
    case.options["ignore_index"] = -100
    without = losses.run(case, device.torch)
    assert torch.equal(results.outputs["loss"].isnan(), torch.arange(5) == 2)
    assert torch.equal(results.gradients["x"], without.gradients["x"])
    assert torch.equal(results.gradients["weight"], without.gradients["weight"])


@pytest.mark.parametrize("ignore_index", [2**32 + 5, -(2**40)])
def test_an_ignore_index_past_32_bits_ignores_no_target_of_32_bits(device, ignore_index):
    case = losses.make(9, 16, 123)
    case.target[:] = 5
    expected = losses.run(case, device.torch)
    case.target = case.target.int()
    found = losses.run(case.with_options(ignore_index=ignore_index), device.torch)
    assert torch.equal(found.outputs["loss"], expected.outputs["loss"])
    assert torch.equal(found.gradients["x"], expected.gradients["x"])


def test_int32_targets(device):
    case = losses.make(19, 32, 123)
    expected = losses.run(case, device.torch)
    case.target = case.target.int()
    assert torch.equal(losses.run(case, device.torch).outputs["loss"], expected.outputs["loss"])


TEACHER = torch.randn(123, 32, generator=torch.Generator().manual_seed(0))
OF_LABELS = {
    "loss": fused_linear_cross_entropy,
    "log probabilities": lambda *given, **options: linear_log_probs(*given, **options).sum(),
    "distillation": lambda x, weight, target, **options: linear_distillation_loss(
        x, weight, target, teacher=(x.detach(), TEACHER.to(x)), hard_weight=0.5, **options
    ),
    "of hidden states": causal_lm_loss,
}


@pytest.mark.parametrize("options", [{}, {"ignore_index": 255}, {"counted_tokens": 19}], ids=str)
@pytest.mark.parametrize("name", OF_LABELS)
def test_labels_of_a_byte(device, name, options):
    """PyTorch's cross_entropy takes int64 and uint8."""
    case = losses.make(19, 32, 123)
    found = []
    for dtype in (torch.int64, torch.uint8):
        x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
        target = case.target.masked_fill(torch.arange(19) == 3, 255 if options.get("ignore_index") else 7)
        loss = OF_LABELS[name](x, weight, target.to(dtype).to(device.torch), **options)
        found.append((loss, *torch.autograd.grad(loss, (x, weight))))
    assert all(map(torch.equal, *found))


def test_the_first_of_equal_maxima_is_predicted(device):
    target = torch.tensor([0, 1, -100], device=device.torch)
    options = {"return_predicted_tokens": True, "return_token_accuracy": True}
    for vocabulary, budget, places in ((9000, None, [8999, 4100, 8500]), (1024, 1, [1023, 500, 510, 600])):
        x, weight = torch.zeros(3, 8, device=device.torch), torch.zeros(vocabulary, 8, device=device.torch)
        bias = torch.zeros(vocabulary, device=device.torch)
        out = fused_linear_cross_entropy(x, weight, target, bias, memory_budget=budget, **options)
        assert out.predicted_tokens.tolist() == [0, 0, -1]
        assert out.token_accuracy.item() == 0.5
        bias[places] = 1.0
        out = fused_linear_cross_entropy(x, weight, target, bias, memory_budget=budget, **options)
        assert out.predicted_tokens.tolist() == [min(places), min(places), -1]


@pytest.mark.few(3)
@pytest.mark.parametrize("vocabulary", [123, 8500, 20000])
@pytest.mark.parametrize("part", ["all", "the first columns", "the last columns"])
def test_of_logits_that_are_no_numbers_a_token_of_the_vocabulary_is_predicted(device, vocabulary, part):
    case = losses.make(3, 16, vocabulary, torch.float32)
    weight = case.weight.clone()
    rows = {"all": slice(None), "the first columns": slice(0, 100), "the last columns": slice(-100, None)}[part]
    weight[rows] = torch.nan
    options = {"return_predicted_tokens": True, "return_token_accuracy": True}
    target = torch.full((3,), vocabulary - 1)
    found = fused_linear_cross_entropy(case.x.to(device.torch), weight.to(device.torch), target.to(device.torch), **options)
    assert torch.isnan(found.loss)
    predicted = found.predicted_tokens.cpu()
    assert (predicted >= 0).all()
    assert (predicted < vocabulary).all()
    if part == "all":
        assert found.token_accuracy == 0
