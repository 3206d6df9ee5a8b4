"""An output dtype of its own, and the result in fp32 beside it, wherever they run."""

import formula
import pytest
import torch
from npu_rms_norm import AddedWithFP32, WithFP32, add_rms_norm, gated_rms_norm, rms_norm

pytestmark = pytest.mark.usefixtures("npu_poisoned")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def leaves_of(case, device):
    return formula.leaf(case.x, device.torch), formula.leaf(case.weight, device.torch)


@pytest.mark.parametrize("width", [128, 1000, 20000])
@pytest.mark.parametrize("mode", ["llama", "gemma"])
def test_fp32_is_the_result_before_it_is_rounded(device, mode, width):
    case = formula.make(9, width, torch.bfloat16, casting_mode=mode)
    x, weight = leaves_of(case, device)
    found = rms_norm(x, weight, **case.options, return_fp32=True)
    assert isinstance(found, WithFP32)
    assert (found.y.dtype, found.fp32.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found.y, rms_norm(x, weight, **case.options))
    assert torch.equal(found.fp32.to(torch.bfloat16), found.y)
    assert not torch.equal(found.fp32, found.y.float())
    normalised = rms_norm(x, None, case.eps, casting_mode=mode, dtype=torch.float32)
    expected = normalised * weight.float()  # llama rounds what meets the weight, gemma nothing
    # Compiled without a weight, a kernel for CUDA may sum a row in another order.
    tolerance = {"rtol": 2.0**-20 if device.name == "cuda" and mode == "gemma" else 0, "atol": 0}
    torch.testing.assert_close(found.fp32, expected, **tolerance)


@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_the_result(device, dtype, y_dtype):
    case = formula.make(37, 512, dtype)
    x, weight = leaves_of(case, device)
    y = rms_norm(x, weight, dtype=y_dtype)
    assert y.dtype == y_dtype
    assert torch.equal(y, rms_norm(x, weight, return_fp32=True).fp32.to(y_dtype))
    dy = formula.copy(case.dy, device.torch).to(y_dtype)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert (dx.dtype, dweight.dtype) == (dtype, dtype)
    expected = torch.autograd.grad(rms_norm(x, weight), (x, weight), dy.to(dtype))
    for found, wanted in zip((dx, dweight), expected, strict=True):
        if dy.to(dtype).to(y_dtype).equal(dy):
            # For CUDA, kernels that read dy in other dtypes lay it out otherwise, and sum in another order.
            off = float(wanted.abs().max()) * 2.0**-21 if device.name == "cuda" else 0
            torch.testing.assert_close(found, wanted, rtol=0, atol=off)
        else:
            assert torch.allclose(found.float(), wanted.float(), rtol=0.02, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.parametrize("used", ["y", "fp32", "both"])
@pytest.mark.parametrize("added", [False, True])
def test_gradients_of_both_results_are_added(device, used, added):
    case = formula.make(37, 512, torch.float32)
    dy = formula.copy(case.dy, device.torch)
    residual = torch.zeros_like(dy)
    x, weight = leaves_of(case, device)
    if added:
        found = add_rms_norm(x, residual, weight, return_fp32=True)
        assert isinstance(found, AddedWithFP32)
        assert torch.equal(found.residual, x)
    else:
        found = rms_norm(x, weight, return_fp32=True)
    outputs = {"y": [found.y], "fp32": [found.fp32], "both": [found.y, found.fp32]}[used]
    expected = torch.autograd.grad(rms_norm(x, weight), (x, weight), dy * len(outputs))
    for actual, wanted in zip(torch.autograd.grad(outputs, (x, weight), [dy] * len(outputs)), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_a_gated_norm_has_both_results_and_both_gradients(device, norm_before_gate):
    case = formula.make(37, 512, torch.bfloat16)
    gate = formula.leaf(case.x.flip(0), device.torch)
    leaves = (formula.leaf(case.x, device.torch), gate, formula.leaf(case.weight, device.torch))
    call = lambda **options: gated_rms_norm(*leaves, norm_before_gate=norm_before_gate, **options)  # noqa: E731
    found = call(dtype=torch.float16, return_fp32=True)
    assert isinstance(found, WithFP32)
    assert (found.y.dtype, found.fp32.dtype) == (torch.float16, torch.float32)
    assert torch.equal(found.fp32.half(), found.y)
    assert torch.equal(found.fp32.bfloat16(), call())
    dy = formula.copy(case.dy, device.torch)
    actual = torch.autograd.grad(found, leaves, [dy.half(), dy.float()])
    for one, wanted in zip(actual, torch.autograd.grad(call(), leaves, 2 * dy), strict=True):
        assert torch.allclose(one.float(), wanted.float(), rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def test_gradients_are_those_of_the_definition():
    x, residual, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), (3, 8), (8,)))
    assert torch.autograd.gradcheck(lambda x, w: tuple(rms_norm(x, w, return_fp32=True)), (x, weight))
    assert torch.autograd.gradcheck(lambda *given: tuple(add_rms_norm(*given, return_fp32=True)), (x, residual, weight))
