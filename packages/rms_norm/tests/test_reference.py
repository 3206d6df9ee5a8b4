"""reference.py is the definition: against PyTorch, and the models' own formulas; its gradients: test_operators.py."""

import pytest
import torch
from npu_rms_norm import rms_norm


def hugging_face_llama(x, weight, eps):
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def hugging_face_gemma(x, weight, eps):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (1.0 + weight.float())).type_as(x)


def all_in_the_input_dtype(x, weight, eps):
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return x * rstd.to(x.dtype) * weight


FORMULAS = {
    ("llama", 0.0): hugging_face_llama,
    ("gemma", 1.0): hugging_face_gemma,
    ("none", 0.0): all_in_the_input_dtype,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mode", "offset"), FORMULAS)
def test_modes_are_the_models_formulas_bit_for_bit(mode, offset, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 1000).to(dtype) * 3, torch.randn(1000).to(dtype)
    y = rms_norm(x, weight, 1e-5, offset=offset, casting_mode=mode)
    assert torch.equal(y, FORMULAS[mode, offset](x, weight, 1e-5))


@pytest.mark.parametrize("width", [1, 7, 1000])
def test_equals_torch_in_fp64(width):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, width).double(), torch.randn(width).double()
    assert torch.allclose(
        rms_norm(x, weight, 1e-3), torch.nn.functional.rms_norm(x, (width,), weight, 1e-3), rtol=1e-13, atol=0
    )
    assert torch.allclose(rms_norm(x, eps=1e-3), torch.nn.functional.rms_norm(x, (width,), None, 1e-3), rtol=1e-13, atol=0)


def test_scaling_a_row_changes_nothing_but_its_gradient():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 64).double(), torch.randn(64).double()
    a, b = x.clone().requires_grad_(), (8 * x).requires_grad_()
    ya, yb = rms_norm(a, weight, 0.0), rms_norm(b, weight, 0.0)
    assert torch.allclose(ya, yb, rtol=1e-13)
    (da,), (db,) = torch.autograd.grad(ya.sum(), a), torch.autograd.grad(yb.sum(), b)
    assert torch.allclose(da, 8 * db, rtol=1e-10, atol=1e-13)
