"""The operator, wherever it runs, against fp64."""

import formula
import pytest
import torch
from npu_rms_norm import rms_norm

from testing import memory

pytestmark = pytest.mark.usefixtures("npu_poisoned")

WIDTHS = [1, 7, 123, 512, 1000, 2048, 4096, 5120, 7168, 8192, 16384, 65536]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 3, 83])
def test_every_width_in_bf16(device, width, rows):
    case = formula.make(rows, width, torch.bfloat16)
    formula.check(case, formula.run(case, rms_norm, device.torch))


@pytest.mark.parametrize("width", [7, 123, 1000, 8192, 16384, 20011])
def test_ragged_and_wide_rows_in_fp32(device, width):
    case = formula.make(37, width, torch.float32)
    formula.check(case, formula.run(case, rms_norm, device.torch))


@pytest.mark.parametrize("mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_mode_and_dtype(device, mode, dtype):
    case = formula.make(37, 1000, dtype, casting_mode=mode, offset=1.0, eps=1e-5)
    formula.check(case, formula.run(case, rms_norm, device.torch))


@pytest.mark.parametrize("mode", ["llama", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modes_round_where_the_definition_does(device, mode, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(37, 512).to(dtype), torch.randn(512).to(dtype)
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    rounded = (wide * rstd).to(dtype) * weight if mode == "llama" else x * rstd.to(dtype) * weight

    def differing(mode):
        y = rms_norm(x.to(device.torch), weight.to(device.torch), casting_mode=mode).cpu()
        assert ((y - rounded).abs() <= 4 * torch.finfo(dtype).eps * rounded.abs()).all()
        return (y != rounded).float().mean()

    # Where a sum or a square root differs in its last bit, a rounding may tip over; another mode tips over far more.
    assert differing(mode) < 0.01
    assert differing("gemma") > 0.1


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None])
def test_weight_may_be_fp32_or_left_out(device, weight_dtype):
    case = formula.make(37, 512, torch.bfloat16, weight_dtype)
    if weight_dtype is None:
        case.weight = None
    results = formula.run(case, rms_norm, device.torch)
    formula.check(case, results)
    assert results[0].dtype == results[1].dtype == torch.bfloat16
    assert weight_dtype is None or results[2].dtype == weight_dtype


def test_weight_may_be_strided(device):
    case = formula.make(37, 512, torch.float32)
    expected = formula.run(case, rms_norm, device.torch)
    columns = torch.stack((case.weight, torch.full((512,), 1e9)), 1).to(device.torch)
    x, weight = formula.leaf(case.x, device.torch), columns[:, 0].requires_grad_()
    assert weight.stride() == (2,)
    y = rms_norm(x, weight, **case.options)
    gradients = torch.autograd.grad(y, (x, weight), formula.copy(case.dy, device.torch))
    for actual, wanted in zip((y, *gradients), expected, strict=True):
        assert torch.equal(actual.cpu(), wanted)


@pytest.mark.parametrize("width", [64, 20000])
def test_a_bad_row_spoils_no_other(device, width):
    case = formula.make(9, width, torch.float32)
    expected = formula.run(case, rms_norm, device.torch)
    case.x[4, 7], case.dy[6, 3] = float("nan"), float("inf")
    y, dx, _ = formula.run(case, rms_norm, device.torch)
    assert torch.isnan(y[4]).all()
    assert torch.equal(y[[0, 1, 2, 3, 5, 6, 7, 8]], expected[0][[0, 1, 2, 3, 5, 6, 7, 8]])
    assert torch.equal(dx[[0, 1, 2, 3, 5, 7, 8]], expected[1][[0, 1, 2, 3, 5, 7, 8]])


def test_frozen_weight_and_frozen_input(device):
    case = formula.make(37, 512, torch.float32)
    y, dx, dweight = formula.run(case, rms_norm, device.torch)
    x, weight, dy = (formula.copy(tensor, device.torch) for tensor in (case.x, case.weight, case.dy))
    only_x = x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(rms_norm(only_x, weight, **case.options), only_x, dy)[0].cpu(), dx)
    only_weight = weight.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(rms_norm(x, only_weight, **case.options), only_weight, dy)[0].cpu(), dweight)
    assert not rms_norm(x, weight).requires_grad


@pytest.mark.parametrize("shape", [(0,), (0, 7), (3, 0)])
def test_no_rows(device, shape):
    x = torch.empty(*shape, 512, dtype=torch.bfloat16, device=device.torch, requires_grad=True)
    weight = torch.ones(512, device=device.torch, requires_grad=True)
    y = rms_norm(x, weight)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_one_dimensional_input(device):
    case = formula.make((), 1000, torch.float32)
    results = formula.run(case, rms_norm, device.torch)
    assert results[0].shape == (1000,)
    formula.check(case, results)


STRIDED = {
    "slice of a wider tensor": lambda: torch.randn(9, 13, 700)[..., 50:562],
    "heads of a fused projection": lambda: torch.randn(2, 21, 3 * 4 * 64)[..., 256:512].view(2, 21, 4, 64),
    "every second row": lambda: torch.randn(3, 40, 256)[:, ::2],
    "transposed rows": lambda: torch.randn(5, 40, 256).transpose(0, 1),
    "one row for all": lambda: torch.randn(1, 256).expand(33, 256),
    "columns not side by side": lambda: torch.randn(256, 33).t(),
    "three levels": lambda: torch.randn(3, 6, 6, 100)[:, ::2, ::2, :64],
}


@pytest.mark.few(4)
@pytest.mark.parametrize("view", STRIDED)
def test_strided_input_and_gradient(device, view):
    torch.manual_seed(0)
    x = STRIDED[view]().to(device.torch)
    dy = torch.randn(*x.shape[:-1], 2 * x.shape[-1], device=device.torch)[..., : x.shape[-1]]
    weight = torch.randn(x.shape[-1], device=device.torch)

    def results(x, dy):
        leaves = x.detach().requires_grad_(), weight.clone().requires_grad_()
        y = rms_norm(*leaves)
        return y, *torch.autograd.grad(y, leaves, dy)

    for strided, copied in zip(results(x, dy), results(x.contiguous(), dy.contiguous()), strict=True):
        assert torch.allclose(strided, copied, rtol=1e-4, atol=1e-4)


def test_gradient_that_is_one_number_everywhere(device):
    x = torch.randn(5, 64, device=device.torch, requires_grad=True)
    rms_norm(x).sum().backward()
    expected = torch.autograd.grad(rms_norm(x), x, torch.ones_like(x))[0]
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("rows", [200, 2048])
def test_same_bits_every_time(device, rows):
    case = formula.make(rows, 512, torch.bfloat16)
    first = formula.run(case, rms_norm, device.torch)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, formula.run(case, rms_norm, device.torch), strict=True))


def test_large_and_small_values(device):
    x = torch.tensor([[3e4] * 64, [1e-4] * 64, [0.0] * 64, [6e4] * 64]).half().to(device.torch)
    y = rms_norm(x, eps=1e-6).cpu()
    assert torch.equal(y[2], torch.zeros(64).half())
    assert torch.allclose(y[[0, 3]].float(), torch.ones(2, 64), rtol=1e-3)


@pytest.mark.uncollected("takes more memory than a test should on an NPU", lambda place: place == "npu")
@pytest.mark.slow
def test_rows_further_apart_than_32_bits_reach(device):
    stride = 2**31 + 64
    storage = memory.untouched(stride + 256, torch.bfloat16, device.torch)
    x = storage.as_strided((2, 256), (stride, 1))
    values = torch.randn(2, 256).bfloat16()
    x.copy_(values)
    assert torch.equal(rms_norm(x).cpu(), rms_norm(values.to(device.torch)).cpu())
