"""`in_place`: the gradient of x takes the memory of the gradient of y, or is what it would be without."""

import formula
import pytest
import torch
from npu_rms_norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("npu_poisoned")


def test_dx_is_in_the_memory_of_dy(device):
    case = formula.make(37, 512, torch.float32)
    expected = formula.run(case, rms_norm, device.torch)
    x, weight = formula.leaf(case.x, device.torch), formula.leaf(case.weight, device.torch)
    dy = formula.copy(case.dy, device.torch)
    y = rms_norm(x, weight, **case.options, in_place=True)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert dx.data_ptr() == dy.data_ptr()
    assert torch.equal(dx.cpu(), expected[1])
    assert torch.equal(dweight.cpu(), expected[2])


def test_dy_is_left_alone_unless_in_place(device):
    case = formula.make(37, 512, torch.float32)
    dy = formula.copy(case.dy, device.torch)
    x = formula.leaf(case.x, device.torch)
    torch.autograd.grad(rms_norm(x), x, dy)
    assert torch.equal(dy.cpu(), case.dy)


@pytest.mark.parametrize("view", ["wide rows", "strided dy"])
def test_wide_rows_and_a_strided_dy(device, view):
    width = 20000 if view == "wide rows" else 512
    case = formula.make(9, width, torch.bfloat16)
    expected = formula.run(case, rms_norm, device.torch)
    x = formula.leaf(case.x, device.torch)
    dy = torch.empty(width, 9, dtype=torch.bfloat16, device=device.torch).t()
    dy = dy.copy_(case.dy) if view == "strided dy" else formula.copy(case.dy, device.torch)
    y = rms_norm(x, case.weight.to(device.torch), **case.options, in_place=True)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0].cpu(), expected[1])


@pytest.mark.parametrize("reduce", [lambda y: y.sum(), lambda y: y.sum(0)], ids=["number", "row"])
def test_an_expanded_gradient_is_not_written_over(device, reduce):
    x, weight, dy = torch.randn(3, 5, 32), torch.randn(32), torch.randn(5, 32)
    expected = x.double().requires_grad_()
    y = expected / (expected.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.autograd.backward(reduce(y), dy[0, 0] if reduce(y).dim() == 0 else dy)
    own = x.to(device.torch).requires_grad_()
    out = reduce(rms_norm(own, weight.to(device.torch), in_place=True))
    seed = (dy[0, 0] if out.dim() == 0 else dy).to(device.torch)
    kept = seed.clone()
    torch.autograd.backward(out, seed)
    assert torch.equal(seed, kept)
    torch.testing.assert_close(own.grad.cpu().double(), expected.grad, rtol=1e-5, atol=1e-5)


def test_heads_of_dy_on_more_levels_than_kernels_follow(device):
    x, dy, weight = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8), torch.randn(2, 8)
    wider = torch.zeros(3, 6, 2, 8, device=device.torch)
    gradients = []
    for in_place in (False, True):
        leaf = x.to(device.torch).requires_grad_()
        y = rms_norm(leaf, weight.to(device.torch), in_place=in_place)
        gradients += torch.autograd.grad(y, leaf, wider[:, :4].copy_(dy))
    assert torch.equal(*gradients)


def test_a_residual_that_has_a_gradient_of_its_own(device):
    case = formula.make(37, 512, torch.float32)
    found = []
    for in_place in (True, False):
        leaves = [formula.leaf(each, device.torch) for each in (case.x, case.x.flip(0), case.weight)]
        outputs = add_rms_norm(*leaves, **case.options, in_place=in_place)
        dy, dsum = formula.copy(case.dy, device.torch), formula.copy(case.dy.flip(0), device.torch)
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, (dy, dsum))])
    for actual, expected in zip(*found, strict=True):
        assert torch.equal(actual, expected)
