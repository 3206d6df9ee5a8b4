"""The fused residual add, wherever it runs, against its two steps in fp64."""

import formula
import pytest
import torch
from npu_rms_norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("npu_poisoned")


def run(case, residual, dsum, device, **options):
    leaves = [formula.leaf(tensor, device) for tensor in (case.x, residual, case.weight)]
    y, total = add_rms_norm(*leaves, **case.options, **options)
    gradients = torch.autograd.grad((y, total), leaves, (formula.copy(case.dy, device), formula.copy(dsum, device)))
    return [tensor.detach().cpu() for tensor in (y, total, *gradients)]


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float32)],
)
@pytest.mark.parametrize("width", [123, 1000, 4096, 16384])
def test_sum_output_and_gradients(device, dtype, residual_dtype, width):
    case = formula.make(37, width, dtype)
    residual, dsum = torch.randn(37, width).to(residual_dtype), torch.randn(37, width).to(residual_dtype)
    y, total, dx, dresidual, dweight = run(case, residual, dsum, device.torch)
    assert torch.equal(total, (case.x.float() + residual.float()).to(residual_dtype))

    # From the stored sum on it is RMSNorm; what reaches the sum from elsewhere is added.
    after = formula.Case(total, case.weight, case.dy, case.eps, case.offset, case.casting_mode)
    expected_y, expected_dtotal, expected_dweight = formula.exact(after)
    formula.assert_close(y, expected_y, roundings=2, length=width)
    rms = total.double().square().mean(-1, keepdim=True).sqrt()
    spread = (1 + total.double().abs() / rms) / rms + dsum.double().abs()
    expected_dresidual = expected_dtotal + dsum.double()
    formula.assert_close(dresidual, expected_dresidual, roundings=3, length=width, scale=4 * spread, rounded_to=dtype)
    assert torch.equal(dx, dresidual.to(dtype))
    added = (case.dy.double() * total.double() / rms).square().sum(0).sqrt()
    formula.assert_close(dweight, expected_dweight, roundings=3, length=37 + width, scale=added, rounded_to=dtype)


@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
def test_equals_the_two_steps(device, mode):
    case = formula.make(37, 512, torch.float16, casting_mode=mode, offset=0.5)
    residual = torch.randn(37, 512).half()
    y, total, *_ = run(case, residual, torch.zeros(37, 512).half(), device.torch)
    assert torch.equal(total, case.x + residual)
    steps = rms_norm(total.to(device.torch), case.weight.to(device.torch), **case.options).cpu()
    assert torch.equal(y, steps)


def test_either_output_may_be_unused(device):
    case = formula.make(37, 512, torch.float32)
    residual = torch.randn(37, 512)
    zero = torch.zeros(37, 512)
    both = run(case, residual, zero, device.torch)
    leaves = [formula.leaf(tensor, device.torch) for tensor in (case.x, residual, case.weight)]
    y, total = add_rms_norm(*leaves, **case.options)
    dx, dresidual, dweight = torch.autograd.grad(y, leaves, case.dy.to(device.torch), retain_graph=True)
    for actual, expected in zip((dx, dresidual, dweight), both[2:], strict=True):
        assert torch.allclose(actual.cpu(), expected, rtol=1e-6, atol=1e-6)
    dx, dresidual = torch.autograd.grad(total, leaves[:2], case.dy.to(device.torch))
    assert torch.equal(dx.cpu(), case.dy)
    assert torch.equal(dresidual.cpu(), case.dy)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_gradients_for_what_needs_them(device, needed):
    case = formula.make(37, 512, torch.float32)
    residual, dsum = torch.randn(37, 512), torch.randn(37, 512)
    expected = run(case, residual, dsum, device.torch)[2:]
    leaves = [formula.copy(tensor, device.torch) for tensor in (case.x, residual, case.weight)]
    for index in needed:
        leaves[index].requires_grad_()
    y, total = add_rms_norm(*leaves, **case.options)
    outputs, gradients = ((y, total), (case.dy, dsum)) if {0, 1} & set(needed) else ((y,), (case.dy,))
    actual = torch.autograd.grad(outputs, [leaves[i] for i in needed], [g.to(device.torch) for g in gradients])
    for gradient, index in zip(actual, needed, strict=True):
        assert torch.allclose(gradient.cpu(), expected[index], rtol=1e-6, atol=1e-6)


def test_no_rows(device):
    x = torch.empty(0, 64, device=device.torch, requires_grad=True)
    y, total = add_rms_norm(x, torch.empty(0, 64, device=device.torch))
    assert y.shape == total.shape == (0, 64)
    (y + total).sum().backward()
    assert x.grad.shape == (0, 64)


def test_strided_inputs(device):
    torch.manual_seed(0)
    wide = torch.randn(5, 7, 300, device=device.torch)
    x, residual = wide[..., :128], wide[..., 150:278]
    for actual, expected in zip(add_rms_norm(x, residual), add_rms_norm(x.contiguous(), residual.contiguous()), strict=True):
        assert torch.equal(actual, expected)
