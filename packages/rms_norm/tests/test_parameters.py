"""A bias, and a weight and a bias for each head, wherever they run, against fp64."""

import formula
import pytest
import torch
from npu_rms_norm import GatedRMSNorm, RMSNorm, add_rms_norm, gated_rms_norm, rms_norm

from testing import properties

pytestmark = pytest.mark.usefixtures("npu_poisoned")

OPS = torch.ops.npu_rms_norm
NORMS = {
    "plain": lambda x, other, weight, bias, **options: rms_norm(x, weight, bias=bias, **options),
    "add": lambda x, other, weight, bias, **options: add_rms_norm(x, other, weight, bias=bias, **options).y,
    "gated": lambda x, other, weight, bias, **options: gated_rms_norm(x, other, weight, bias=bias, **options),
    "gated first": lambda x, other, weight, bias, **options: gated_rms_norm(
        x, other, weight, bias=bias, norm_before_gate=False, **options
    ),
}
LEADING = {"cpu": (5, 7), "emulated": (5, 7), "cuda": (50, 70), "npu": (50, 70)}


def exact(name, x, other, weight, bias=None, offset=0.0):
    act = torch.nn.functional.silu(other)
    x = x + other if name == "add" else x * act if name == "gated first" else x
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (offset + weight)
    y = y if bias is None else y + bias
    return y * act if name == "gated" else y


def make(leading, heads, width, dtype, per_head=True):
    """x and a second tensor as heads of one fused projection, weight and bias, for each head its own or not, and dy."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(*leading, 3 * heads * width, generator=generator).to(dtype)
    x, other, _ = fused.unflatten(-1, (3, heads, width)).unbind(-3)
    weight, bias = 0.3 * torch.randn(2, *((heads,) if per_head else ()), width, generator=generator)
    return [x, other, (1 + weight).to(dtype), bias.to(dtype)], torch.randn(*leading, heads, width, generator=generator).to(
        dtype
    )


def train(function, inputs, dy):
    leaves = [each.detach().requires_grad_() for each in inputs]
    y = function(*leaves)
    found = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    return y.detach(), *(gradient for gradient in found if gradient is not None)


def check(device, call, definition, inputs, dy):
    """Every element within some roundings of the largest terms of its row, or of what its column adds."""
    placed = [properties.ways.place(each, device.torch) for each in inputs]
    assert [each.stride() for each in placed] == [each.stride() for each in inputs]
    actual = train(call, placed, dy.to(device.torch))
    expected = train(definition, [each.double() for each in inputs], dy.double())
    rows = dy[..., 0].numel()
    for found, wanted in zip(actual, expected, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, dy.dtype)
        parameter = wanted.shape != dy.shape
        most = wanted.abs().amax() if parameter else wanted.abs().amax(-1, keepdim=True)
        length = (rows if parameter else 0) + dy.shape[-1]
        formula.assert_close(found.cpu(), wanted, roundings=6, length=length, scale=most, rounded_to=dy.dtype)


@pytest.mark.parametrize(
    ("name", "heads", "width", "dtype"),
    [
        ("plain", 3, 128, torch.bfloat16),
        ("add", 3, 128, torch.bfloat16),
        ("gated", 5, 123, torch.float32),
        ("gated first", 5, 123, torch.float32),
        ("gated", 2, 2560, torch.float16),
        ("gated first", 2, 2560, torch.float16),
    ],
)
@pytest.mark.parametrize("per_head", [True, False])
def test_weight_and_bias(device, name, heads, width, dtype, per_head):
    inputs, dy = make(LEADING[device.name], heads, width, dtype, per_head)
    call = lambda *leaves: NORMS[name](*leaves, offset=0.5)  # noqa: E731
    check(device, call, lambda *leaves: exact(name, *leaves, offset=0.5), inputs, dy)


@pytest.mark.parametrize(
    ("leading", "heads", "width"), [((3,), 2, 20000), ((1,), 4, 64), ((2,), 150, 16), ((), 3, 8), ((4,), 1, 8)]
)
def test_heads_of_every_number_and_width(device, leading, heads, width):
    (*inputs, _), dy = make(leading, heads, width, torch.float32)
    check(device, lambda *leaves: NORMS["add"](*leaves, None), lambda *leaves: exact("add", *leaves), inputs, dy)
    nothing = rms_norm(torch.empty(0, heads, width, device=device.torch), torch.ones(heads, width, device=device.torch))
    assert nothing.shape == (0, heads, width)


def test_no_heads(device):
    x, weight = (torch.empty(*shape, device=device.torch, requires_grad=True) for shape in ((2, 0, 8), (0, 8)))
    rms_norm(x, weight).sum().backward()
    assert (x.grad.shape, weight.grad.shape) == ((2, 0, 8), (0, 8))


def test_gradients_are_those_of_the_definition():
    leaf = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    for name, norm in NORMS.items():
        inputs = leaf(3, 2, 8), leaf(3, 2, 8), leaf(2, 8), leaf(2, 8)
        torch.testing.assert_close(norm(*inputs), exact(name, *inputs))
        assert torch.autograd.gradcheck(norm, inputs)


def test_modules(device):
    inputs, _ = make((5,), 3, 64, torch.float32)
    x, other, weight, bias = (each.to(device.torch) for each in inputs)
    plain = RMSNorm(64, heads=3, bias=True, offset=0.5, device=device.torch)
    gated = GatedRMSNorm(64, heads=3, bias=True, device=device.torch)
    torch.testing.assert_close(plain(x), rms_norm(x), rtol=2.0**-20, atol=1e-6)  # two kernels
    for module in (plain, gated):
        module.load_state_dict({"weight": weight, "bias": bias})
        assert "heads=3, elementwise_affine=True, bias=True" in repr(module)
    assert torch.equal(plain(x, other).y, add_rms_norm(x, other, weight, bias=bias, offset=0.5).y)
    assert torch.equal(gated(x, other), gated_rms_norm(x, other, weight, bias=bias))
    assert RMSNorm(64, bias=True, elementwise_affine=False).bias.shape == (64,)


@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
def test_the_bias_meets_what_the_mode_rounds(device, mode):
    """To the bit, but where a device's sum of squares differs in its last bit."""
    (x, _, weight, bias), _ = make((5,), 3, 128, torch.bfloat16, per_head=False)
    x = x.mul(4).round().clamp(-9, 9)  # sums of squares are exact in any order
    y = rms_norm(x.to(device.torch), weight.to(device.torch), 0.0, bias=bias.to(device.torch), casting_mode=mode).cpu()
    product = rms_norm(x, weight, 0.0, casting_mode=mode, dtype=torch.bfloat16 if mode != "gemma" else torch.float32)
    assert torch.equal(y, (product.float() + bias.float()).bfloat16())
