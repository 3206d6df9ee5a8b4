"""A weight for each head, wherever it runs, against fp64."""

import formula
import pytest
import torch
from npu_rms_norm import GatedRMSNorm, RMSNorm, add_rms_norm, gated_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("npu_poisoned")

OPS = torch.ops.npu_rms_norm
NORMS = {
    "plain": lambda x, other, weight, **options: rms_norm(x, weight, **options),
    "add": lambda x, other, weight, **options: add_rms_norm(x, other, weight, **options).y,
    "gated": lambda x, other, weight, **options: gated_rms_norm(x, other, weight, **options),
    "gated first": lambda x, other, weight, **options: gated_rms_norm(x, other, weight, norm_before_gate=False, **options),
}
LEADING = {"cpu": (5, 7), "emulated": (5, 7), "cuda": (50, 70), "npu": (50, 70)}


def exact(name, x, other, weight, offset=0.0):
    act = torch.nn.functional.silu(other)
    x = x + other if name == "add" else x * act if name == "gated first" else x
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (offset + weight)
    return y * act if name == "gated" else y


def make(leading, heads, width, dtype):
    """x and a second tensor as heads of one fused projection, a weight for each head, and dy."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(*leading, 3 * heads * width, generator=generator).to(dtype)
    x, other, _ = fused.unflatten(-1, (3, heads, width)).unbind(-3)
    weight = (1 + 0.3 * torch.randn(heads, width, generator=generator)).to(dtype)
    return [x, other, weight], torch.randn(*leading, heads, width, generator=generator).to(dtype)


def train(function, inputs, dy):
    leaves = [each.detach().requires_grad_() for each in inputs]
    y = function(*leaves)
    found = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    return y.detach(), *(gradient for gradient in found if gradient is not None)


def check(device, call, definition, inputs, dy):
    """Every element within some roundings of the largest terms of its row, or of what its column adds."""
    placed = [each.to(device.torch) for each in inputs]
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
def test_each_head_has_its_weight(device, name, heads, width, dtype):
    inputs, dy = make(LEADING[device.name], heads, width, dtype)
    call = lambda *leaves: NORMS[name](*leaves, offset=0.5)  # noqa: E731
    check(device, call, lambda *leaves: exact(name, *leaves, 0.5), inputs, dy)


@pytest.mark.parametrize(
    ("leading", "heads", "width"), [((3,), 2, 20000), ((1,), 4, 64), ((2,), 150, 16), ((), 3, 8), ((4,), 1, 8)]
)
def test_heads_of_every_number_and_width(device, leading, heads, width):
    inputs, dy = make(leading, heads, width, torch.float32)
    check(device, NORMS["add"], lambda *leaves: exact("add", *leaves), inputs, dy)
    nothing = rms_norm(torch.empty(0, heads, width, device=device.torch), torch.ones(heads, width, device=device.torch))
    assert nothing.shape == (0, heads, width)


def test_gradients_are_those_of_the_definition():
    leaf = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    for name, norm in NORMS.items():
        inputs = leaf(3, 2, 8), leaf(3, 2, 8), leaf(2, 8)
        torch.testing.assert_close(norm(*inputs), exact(name, *inputs))
        assert torch.autograd.gradcheck(norm, inputs)


def test_operators_are_registered_properly(device, npu_opcheck):
    tensor = lambda *shape: torch.randn(*shape, device=device.torch)  # noqa: E731
    leaf = lambda *shape: tensor(*shape).requires_grad_()  # noqa: E731
    options = (0.0, "llama", False, torch.float32, False)
    npu_opcheck(OPS.rms_norm.default, (leaf(3, 2, 64), leaf(2, 64), 1e-6, *options, True))
    x, dy, weight, rstd = tensor(3, 2, 64), tensor(3, 2, 64), tensor(2, 64), torch.rand(3, 2, device=device.torch)
    npu_opcheck(OPS.rms_norm_backward.default, (dy, None, x, weight, rstd, 0.0, "llama", torch.float32, True, True))
    layer = torch.compile(lambda x, weight: rms_norm(x.sin(), weight) * 2, fullgraph=True, backend="aot_eager")
    found, expected = (train(each, (x, weight), dy) for each in (layer, lambda x, weight: rms_norm(x.sin(), weight) * 2))
    for traced, eager in zip(found, expected, strict=True):
        assert torch.allclose(traced, eager, rtol=1e-5, atol=1e-6)


def test_modules(device):
    (x, other, weight), _ = make((5,), 3, 64, torch.float32)
    x, other, weight = x.to(device.torch), other.to(device.torch), weight.to(device.torch)
    plain, gated = RMSNorm(64, heads=3, offset=0.5, device=device.torch), GatedRMSNorm(64, heads=3, device=device.torch)
    assert torch.equal(plain(x), rms_norm(x))
    for module in (plain, gated):
        module.load_state_dict({"weight": weight})
        assert "heads=3" in repr(module)
    assert torch.equal(plain(x, other).y, add_rms_norm(x, other, weight, offset=0.5).y)
    assert torch.equal(gated(x, other), gated_rms_norm(x, other, weight))
