"""reference.py is the definition: against PyTorch, and its derivatives."""

import lookup
import pytest
import torch
from npu_embedding import embedding


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": -1}, {"scale_grad_by_freq": True}])
def test_equals_torch(dtype, options):
    case = lookup.make(100, 20, 13, dtype, "zipf", **options)
    case.dy = torch.randint(-2, 3, case.dy.shape).to(dtype)  # sums that every order and dtype has exactly
    if case.scale_grad_by_freq:
        case.indices = torch.arange(16).repeat_interleave(2)  # and quotients
        case.dy = case.dy[:32]

    def theirs(indices, weight, vocab_range, **options):
        return torch.nn.functional.embedding(indices, weight, **options)

    for ours, expected in zip(lookup.run(case, "cpu"), lookup.run(case, "cpu", theirs), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 3},
        {"scale_grad_by_freq": True},
        {"vocab_range": (4, 9)},
        {"vocab_range": (4, 9), "padding_idx": 6},
    ],
)
def test_gradient_is_the_derivative(options):
    indices = torch.tensor([[1, 4, 4], [0, 8, 1]])
    weight = torch.randn(5, 3, dtype=torch.float64)
    if "vocab_range" in options:
        indices = indices + 3
    else:
        indices = indices % 5
    padded = options.get("padding_idx")
    rows = torch.arange(5) + options.get("vocab_range", (0,))[0]

    def look_up(weight):
        # What gets no gradient, or a divided one, is no derivative of the output: state it in the function.
        if padded is not None:
            weight = torch.where((rows == padded).unsqueeze(-1), weight.detach(), weight)
        if options.get("scale_grad_by_freq"):
            counts = torch.bincount(indices.flatten(), minlength=5).clamp(min=1).unsqueeze(-1)
            weight = weight / counts + (weight - weight / counts).detach()
        return embedding(indices, weight, vocab_range=options.get("vocab_range"))

    weight.requires_grad_()
    out = embedding(indices, weight, **options)
    dy = torch.randn_like(out)
    expected = torch.autograd.grad(look_up(weight), weight, dy)[0]
    assert torch.allclose(torch.autograd.grad(out, weight, dy)[0], expected, rtol=1e-12, atol=1e-14)


def test_order_of_indices_moves_the_output_and_not_the_gradient():
    case = lookup.make(200, 30, 8, torch.float64)
    out, dweight = lookup.run(case, "cpu")
    order = torch.randperm(200)
    moved = lookup.Case(case.indices[order], case.weight, case.dy[order])
    out_moved, dweight_moved = lookup.run(moved, "cpu")
    assert torch.equal(out_moved, out[order])
    assert torch.allclose(dweight_moved, dweight, rtol=1e-12, atol=1e-12)
