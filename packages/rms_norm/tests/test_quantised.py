"""The norm in int8 and fp8 with a scale for each row, wherever it runs, against fp64."""

import formula
import pytest
import torch
from npu_offline import emulate
from npu_rms_norm import AddedDynamicQuant, DynamicQuant, add_rms_norm_dynamic_quant, rms_norm, rms_norm_dynamic_quant

pytestmark = pytest.mark.usefixtures("npu_poisoned")

OPS = torch.ops.npu_rms_norm
FP8 = torch.float8_e4m3fn


def available(device, dtype):
    if dtype == FP8 and (device.name in ("emulated", "npu")):
        pytest.skip("there is no fp8 on an Ascend910B")
    if dtype == FP8 and device.name == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")


@pytest.mark.parametrize(
    ("shape", "x_dtype", "dtype", "mode"),
    [
        ((37, 128), torch.bfloat16, torch.int8, "gemma"),
        ((9, 123), torch.float32, torch.int8, "llama"),
        ((2, 5, 3, 64), torch.float32, torch.int8, "llama"),
        ((3, 2560), torch.float32, torch.int8, "llama"),
        ((3, 20000), torch.float32, torch.int8, "llama"),
        ((37, 128), torch.float32, FP8, "llama"),
        ((3, 2560), torch.bfloat16, FP8, "gemma"),
        ((3, 20000), torch.float32, FP8, "llama"),
    ],
)
@pytest.mark.parametrize("added", [False, True])
def test_every_row_is_in_steps_of_its_scale(device, shape, x_dtype, dtype, mode, added):
    available(device, dtype)
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(2, *shape, generator=generator) * 3).to(x_dtype)
    parameters = shape[-2:] if len(shape) == 4 else shape[-1:]
    weight, bias = torch.randn(2, *parameters, generator=generator).to(x_dtype)
    bias = bias if len(shape) == 4 else None
    total = (x.double() + residual.double()).to(x_dtype) if added else x
    total[0], x[0], residual[0] = 0, 0, 0
    exact = total.double() * torch.rsqrt(total.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    exact = exact if bias is None else exact + bias.double()
    given = [x, residual, weight] if added else [x, weight]
    call = add_rms_norm_dynamic_quant if added else rms_norm_dynamic_quant
    placed = [each.to(device.torch) for each in given]
    found = call(*placed, bias=None if bias is None else bias.to(device.torch), casting_mode=mode, dtype=dtype)
    assert isinstance(found, AddedDynamicQuant if added else DynamicQuant)
    if added:
        assert torch.equal(found.residual.cpu(), total)
    formula.check_quantised(found.y.cpu(), found.scale.cpu(), exact, dtype)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("width", [128, 2560, 20000])
def test_a_row_that_is_not_finite_has_the_scale_nan_and_no_other_row_has(device, width, dtype):
    available(device, dtype)
    x, weight = torch.randn(6, width), torch.ones(width)
    x[1, width // 2], x[2, width - 1], x[4, 0] = float("nan"), float("inf"), -float("inf")
    found = rms_norm_dynamic_quant(x.to(device.torch), weight.to(device.torch), dtype=dtype)
    finite = torch.tensor([True, False, False, True, False, True])
    assert torch.equal(found.scale.cpu().isnan(), ~finite)
    assert found.y.cpu().float()[finite].abs().amax(-1).min() == (127 if dtype == torch.int8 else 448)
    assert (found.y.cpu().float()[~finite] * found.scale.cpu()[~finite, None]).isnan().all()
    if dtype == torch.int8:
        assert (found.y.cpu()[~finite] == 0).all()


def test_a_weight_that_is_not_finite_makes_every_scale_nan(device):
    x, weight = torch.randn(3, 128, device=device.torch), torch.ones(128, device=device.torch)
    for value in ("nan", "inf"):
        weight[5] = float(value)
        found = rms_norm_dynamic_quant(x, weight)
        assert found.scale.isnan().all()
        assert (found.y == 0).all()


def test_halves_are_rounded_to_even(device):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.0, 0.0]], device=device.torch)
    steps = rms_norm_dynamic_quant(x, x.new_full((8,), 1.0), eps=0.0, casting_mode="gemma").y.cpu()
    assert steps[0, 0] == 127
    definition = (rms_norm(x, eps=0.0) / rms_norm(x, eps=0.0)[0, 0] * 127).round().cpu()
    assert (steps - definition).abs().max() <= 1  # how the row is normalised may move a half
    assert steps[0].tolist()[-2:] == [3, 0]


def test_the_residual_has_a_gradient_and_what_is_quantised_has_none(device):
    x, residual, weight = (torch.randn(5, 64, device=device.torch).requires_grad_() for _ in range(3))
    weight = weight[0].detach().requires_grad_()
    found = add_rms_norm_dynamic_quant(x, residual, weight)
    assert not found.y.requires_grad
    assert not found.scale.requires_grad
    dsum = torch.randn(5, 64, device=device.torch)
    dx, dresidual, dweight = torch.autograd.grad(found.residual, (x, residual, weight), dsum, allow_unused=True)
    assert torch.equal(dx, dsum)
    assert torch.equal(dresidual, dsum)
    assert dweight is None
    assert not any(each.requires_grad for each in rms_norm_dynamic_quant(x, weight))


@pytest.mark.compilers
@pytest.mark.parametrize("soc", ["Ascend910B4", "Ascend950PR_957b"])
def test_fp8_is_refused_on_ascend_by_name(soc):
    pytest.importorskip("triton.backends.ascend", reason="needs triton-ascend")
    with emulate(soc), pytest.raises(TypeError, match=f"float8_e4m3fn, which {soc} does not have, .* torch.int8 there"):
        rms_norm_dynamic_quant(torch.ones(2, 64), dtype=FP8)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_shapes_without_data(dtype):
    x = torch.empty(3, 8, device="meta")
    y, scale = rms_norm_dynamic_quant(x, dtype=dtype)
    added = add_rms_norm_dynamic_quant(x, x, dtype=dtype)
    assert (y.dtype, y.shape, scale.shape, added.y.dtype) == (dtype, (3, 8), (3,), dtype)
