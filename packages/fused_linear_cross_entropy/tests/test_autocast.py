"""The loss under autocast."""

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1, "weighted": True},
        {"chunk_tokens": 3, "accum_dtype": torch.float32},
        {"reduction": "none"},
    ],
    ids=str,
)
def test_autocast_casts_as_a_linear_layer_does_and_nothing_on_the_way(device, options):
    case = losses.make(5, 32, 123, torch.float32, ignored=0.2)
    x, weight, target = (tensor.to(device.torch) for tensor in (case.x, case.weight, case.target))
    bias = torch.randn(123, device=device.torch)
    options = dict(options)
    if options.pop("weighted", False):
        options["class_weight"] = torch.rand(123, device=device.torch)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    with torch.autocast(device.torch.type, dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy(x, weight, target, bias, **options)
        gradients = torch.autograd.grad(loss.sum(), leaves)
    narrow = [t.detach().bfloat16().requires_grad_() for t in leaves]
    expected = fused_linear_cross_entropy(narrow[0], narrow[1], target, narrow[2], **options)
    assert torch.equal(loss, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected.sum(), narrow), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float())


def test_autocast_leaves_fp64_and_what_comes_with_it():
    x, weight, target = torch.randn(3, 4).double(), torch.randn(9, 4), torch.tensor([1, 2, 8])
    bias = torch.randn(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fused_linear_cross_entropy(x, weight, target, bias)
    assert torch.equal(loss, fused_linear_cross_entropy(x, weight, target, bias))
