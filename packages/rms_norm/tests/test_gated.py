"""RMSNorm with a gate, wherever it runs, against fp64."""

import formula
import pytest
import torch
from npu_rms_norm import GatedRMSNorm, gated_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("npu_poisoned")

OPS = torch.ops.npu_rms_norm
WAYS = [("silu", True), ("silu", False), ("sigmoid", True), ("sigmoid", False)]


def exact(x, gate, weight, activation, norm_before_gate, offset=0.0, eps=1e-6):
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.sigmoid(gate)
    u = x if norm_before_gate else x * act
    y = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * (offset + weight)
    return y * act if norm_before_gate else y


def train(function, inputs, dy):
    """The result and the gradients of all inputs that there are."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in inputs]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)


def make(shape, dtype, weight_dtype=None, gate_dtype=None, weighted=True):
    generator = torch.Generator().manual_seed(0)
    random = lambda *sizes: torch.randn(*sizes, generator=generator)  # noqa: E731
    x, gate, dy = random(*shape).to(dtype), (2 * random(*shape)).to(gate_dtype or dtype), random(*shape).to(dtype)
    weight = (1 + 0.3 * random(shape[-1])).to(weight_dtype or dtype) if weighted else None
    return (x, gate, weight), dy


def check(device, inputs, dy, way, **options):
    """Against fp64: every element within some roundings of the largest terms of its row, or of what its column adds."""
    activation, first = way
    call = lambda x, gate, weight: gated_rms_norm(  # noqa: E731
        x, gate, weight, activation=activation, norm_before_gate=first, **options
    )
    placed = [None if each is None else each.to(device.torch) for each in inputs]
    actual = train(call, placed, dy.to(device.torch))
    wide = [None if each is None else each.double() for each in inputs]
    offset = options.get("offset", 0.0)
    expected = train(lambda *leaves: exact(*leaves, activation, first, offset), wide, dy.double())
    width, rows = dy.shape[-1], dy[..., 0].numel()
    for number, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        found, is_weight = found.cpu(), number == 3
        most = wanted.abs().amax() if is_weight else wanted.abs().amax(-1, keepdim=True)
        length = rows + width if is_weight else width
        formula.assert_close(found, wanted, roundings=6, length=length, scale=most, rounded_to=dy.dtype)
    return actual


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 3, 64), torch.bfloat16),
        ((301, 128), torch.bfloat16),
        ((7, 4, 192), torch.float16),
        ((37, 256), torch.float32),
        ((9, 123), torch.float32),
        ((3, 5120), torch.bfloat16),
        ((3, 20000), torch.float32),
    ],
)
def test_every_gate(device, way, shape, dtype):
    results = check(device, *make(shape, dtype), way)
    assert [result.dtype for result in results] == [dtype] * 4


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
def test_every_mode(device, way, mode):
    check(device, *make((37, 128), torch.bfloat16), way, casting_mode=mode, offset=1.0)


@pytest.mark.parametrize("way", WAYS[:2])
def test_gate_and_weight_may_be_fp32_and_the_weight_left_out(device, way):
    results = check(device, *make((37, 128), torch.bfloat16, torch.float32, torch.float32), way)
    assert [result.dtype for result in results] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    check(device, *make((37, 128), torch.bfloat16, weighted=False), way)


@pytest.mark.parametrize("way", WAYS[:2])
def test_x_and_gate_are_read_where_they_lie(device, way):
    (x, gate, weight), dy = make((6, 4, 128), torch.float32)
    fused = torch.full((6, 1200), float("nan"))
    fused[:, :512], fused[:, 600:1112] = x.flatten(1), gate.flatten(1)
    parts = fused[:, :512].unflatten(1, (4, 128)), fused[:, 600:1112].unflatten(1, (4, 128))
    strided, plain = check(device, (*parts, weight), dy, way), check(device, (x, gate, weight), dy, way)
    for one, other in zip(strided[:3], plain[:3], strict=True):
        assert torch.equal(one, other)


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_what_is_needed_is_computed(device, way, needed):
    inputs, dy = make((37, 128), torch.float32)
    inputs, dy = [each.to(device.torch) for each in inputs], dy.to(device.torch)
    call = lambda *leaves: gated_rms_norm(*leaves, activation=way[0], norm_before_gate=way[1])  # noqa: E731
    expected = train(call, inputs, dy)[1:]
    leaves = [each.clone().requires_grad_(number in needed) for number, each in enumerate(inputs)]
    found = torch.autograd.grad(call(*leaves), [leaves[number] for number in needed], dy)
    for gradient, number in zip(found, needed, strict=True):
        assert torch.equal(gradient, expected[number])


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_gate_of_one_or_a_half_is_the_plain_norm(device, way):
    (x, _, weight), _ = make((37, 128), torch.float32)
    x, weight = x.to(device.torch), weight.to(device.torch)
    far = torch.full_like(x, 200.0)
    y = gated_rms_norm(x, far, weight, activation="sigmoid", norm_before_gate=way[1])
    assert torch.equal(y, rms_norm(x, weight))
    y = gated_rms_norm(x, -far, weight, activation=way[0], norm_before_gate=True)
    assert (y == 0).all()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_definition(way):
    make_leaf = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    call = lambda x, gate, weight: gated_rms_norm(  # noqa: E731
        x, gate, weight, offset=0.5, activation=way[0], norm_before_gate=way[1]
    )
    assert torch.autograd.gradcheck(call, (make_leaf(3, 2, 8), make_leaf(3, 2, 8), make_leaf(8)))


def test_module(device):
    module = GatedRMSNorm(64, 1e-5, activation="sigmoid", norm_before_gate=False, offset=1.0, device=device.torch)
    (x, gate, _), _ = make((5, 64), torch.float32)
    x, gate = x.to(device.torch), gate.to(device.torch)
    options = {"activation": "sigmoid", "norm_before_gate": False}
    assert torch.equal(module(x, gate), gated_rms_norm(x, gate, None, 1e-5, **options))
    torch.nn.init.normal_(module.weight)
    assert torch.equal(module(x, gate), gated_rms_norm(x, gate, module.weight, 1e-5, offset=1.0, **options))
    assert list(module.state_dict()) == ["weight"]
    assert list(GatedRMSNorm(8, elementwise_affine=False).parameters()) == []
    assert "norm_before_gate=False" in repr(module)
