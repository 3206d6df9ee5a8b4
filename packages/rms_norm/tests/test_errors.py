"""Bad input is refused with one sentence that names the argument, what it was and what it must be."""

import pytest
import torch
from npu_rms_norm import (
    GatedRMSNorm,
    RMSNorm,
    add_rms_norm,
    gated_rms_norm,
    qk_rms_norm,
    rms_norm,
    rms_norm_dynamic_quant,
)

X = torch.ones(2, 8)
REFUSED = {
    "a module's eps": (lambda: RMSNorm(9, eps=None), TypeError, "eps is a NoneType and must be a number"),
    "a module's casting_mode": (lambda: RMSNorm(9, casting_mode="x"), ValueError, "casting_mode is 'x' and must be one of"),
    "a module's in_place": (lambda: RMSNorm(9, in_place=1), TypeError, "in_place is 1 and must be True or False"),
    "a module's activation": (
        lambda: GatedRMSNorm(9, activation="gelu"),
        ValueError,
        "activation is 'gelu' and must be one",
    ),
    "x is no tensor": (lambda: rms_norm([1.0]), TypeError, "x is a list and must be a tensor"),
    "x is integer": (lambda: rms_norm(X.long()), TypeError, "x is torch.int64 .* must be torch.float32"),
    "x is a scalar": (lambda: rms_norm(torch.ones(())), ValueError, r"x has shape \(\) and must have a last dimension"),
    "x has no columns": (lambda: rms_norm(torch.ones(3, 0)), ValueError, r"x has shape \(3, 0\)"),
    "weight is no tensor": (lambda: rms_norm(X, 2.0), TypeError, "weight is a float and must be a tensor or None"),
    "weight is too long": (
        lambda: rms_norm(X, torch.ones(9)),
        ValueError,
        r"weight has shape \(9,\) and must have .*\(8,\)",
    ),
    "weight has two dimensions": (lambda: rms_norm(X, torch.ones(1, 8)), ValueError, r"weight has shape \(1, 8\)"),
    "a weight for too many heads": (
        lambda: rms_norm(X, torch.ones(3, 8)),
        ValueError,
        r"weight has shape \(3, 8\) and must have shape \(8,\) or \(2, 8\)",
    ),
    "heads of a module": (lambda: RMSNorm(8, heads=0), ValueError, "heads is 0 and must be a whole number of at least 1"),
    "weight is narrower": (lambda: rms_norm(X, torch.ones(8).half()), TypeError, "weight is torch.float16 and must be"),
    "weight is elsewhere": (lambda: rms_norm(X, torch.ones(8, device="meta")), ValueError, "weight is on meta"),
    "bias is too long": (lambda: rms_norm(X, bias=torch.ones(9)), ValueError, r"bias has shape \(9,\) and must have"),
    "bias is not like the weight": (
        lambda: rms_norm(X, torch.ones(2, 8), bias=torch.ones(8)),
        ValueError,
        r"bias has shape \(8,\) and must have shape \(2, 8\)",
    ),
    "bias of a gated norm": (lambda: gated_rms_norm(X, X, bias=1.0), TypeError, "bias is a float and must be a tensor"),
    "bias of a module": (lambda: RMSNorm(8, bias=None), TypeError, "bias is None and must be True or False"),
    "dtype of a gated norm": (lambda: gated_rms_norm(X, X, dtype=torch.int8), TypeError, "dtype is torch.int8 and must be"),
    "eps is negative": (lambda: rms_norm(X, eps=-1e-6), ValueError, "eps is -1e-06 and must be at least 0"),
    "eps is no number": (lambda: rms_norm(X, eps=float("nan")), ValueError, "eps is nan"),
    "offset is infinite": (lambda: rms_norm(X, offset=float("inf")), ValueError, "offset is inf and must be finite"),
    "mode is unknown": (lambda: rms_norm(X, casting_mode="bert"), ValueError, "casting_mode is 'bert' .* 'llama', 'gemma'"),
    "residual is no tensor": (lambda: add_rms_norm(X, None), TypeError, "residual is a NoneType"),
    "residual has another shape": (lambda: add_rms_norm(X, X[:1]), ValueError, r"residual has shape \(1, 8\) .* \(2, 8\)"),
    "residual is narrower": (lambda: add_rms_norm(X, X.half()), TypeError, "residual is torch.float16 and must be"),
    "residual is elsewhere": (lambda: add_rms_norm(X, X.to("meta")), ValueError, "residual is on meta"),
    "dtype is no dtype": (
        lambda: rms_norm(X, dtype="bf16"),
        TypeError,
        "dtype is 'bf16' and must be torch.float32, .* or None",
    ),
    "dtype is int8": (lambda: add_rms_norm(X, X, dtype=torch.int8), TypeError, "dtype is torch.int8 and must be"),
    "dtype of a quantised norm": (
        lambda: rms_norm_dynamic_quant(X, dtype=torch.uint8),
        TypeError,
        "dtype is torch.uint8 and must be torch.int8 or torch.float8_e4m3fn",
    ),
    "dtype is wider": (lambda: rms_norm(X, dtype=torch.float64), TypeError, "dtype is torch.float64 and must be"),
    "return_fp32": (lambda: rms_norm(X, return_fp32=1), TypeError, "return_fp32 is 1 and must be True or False"),
    "gate is no tensor": (lambda: gated_rms_norm(X, None), TypeError, "gate is a NoneType and must be a tensor"),
    "gate has another shape": (lambda: gated_rms_norm(X, X[:1]), ValueError, r"gate has shape \(1, 8\) .* \(2, 8\)"),
    "gate is narrower": (lambda: gated_rms_norm(X, X.half()), TypeError, "gate is torch.float16 and must be"),
    "gate is elsewhere": (lambda: gated_rms_norm(X, X.to("meta")), ValueError, "gate is on meta"),
    "activation is unknown": (lambda: gated_rms_norm(X, X, activation="gelu"), ValueError, "'gelu' .* 'silu', 'sigmoid'"),
    "order of the gate": (lambda: gated_rms_norm(X, X, norm_before_gate=None), TypeError, "norm_before_gate is None"),
    "mode of a gated norm": (lambda: gated_rms_norm(X, X, casting_mode="bert"), ValueError, "casting_mode is 'bert'"),
    "width of a gated module": (lambda: GatedRMSNorm(0), ValueError, "hidden_size is 0 and must be a whole number"),
    "options are keywords": (lambda: rms_norm(X, None, 1e-6, 1.0), TypeError, "positional"),
    "eps is None": (lambda: rms_norm(X, eps=None), TypeError, "^eps is a NoneType and must be a number.$"),
    "eps is a tensor": (lambda: rms_norm(X, eps=X[0, 0]), TypeError, "eps is a Tensor and must be a number"),
    "offset is a word": (lambda: rms_norm(X, offset="a"), TypeError, "offset is a str and must be a number"),
    "in_place": (lambda: rms_norm(X, in_place=None), TypeError, "in_place is None and must be True or False"),
    "mode is None": (lambda: rms_norm(X, casting_mode=None), ValueError, "casting_mode is None and must be one of"),
    "hidden_size of a module": (lambda: RMSNorm(0), ValueError, "hidden_size is 0 and must be a whole number of at least 1"),
    "eps of a module": (lambda: RMSNorm(8, eps=None)(X), TypeError, "eps is a NoneType"),
    "offset of a module": (lambda: RMSNorm(8, offset="a"), TypeError, "offset is a str"),
    "qkv is integer": (lambda: qk_rms_norm(X.long(), None, None, 2), TypeError, "qkv is torch.int64"),
    "heads of q": (
        lambda: qk_rms_norm(X, None, None, 0),
        ValueError,
        "n_heads is 0 and must be a whole number",
    ),
    "heads of k": (lambda: qk_rms_norm(X, None, None, 2, 0), ValueError, "n_kv_heads is 0 and must be a whole number"),
    "heads of another projection": (
        lambda: qk_rms_norm(X, None, None, 1),
        ValueError,
        "qkv has a last dimension of 8 and must have a multiple of 3, the heads of q, k and v",
    ),
    "weight of q": (
        lambda: qk_rms_norm(X, torch.ones(3), None, 2, 1),
        ValueError,
        r"q_weight has shape \(3,\) and must have shape \(2,\) or \(4,\)",
    ),
    "weight of k": (lambda: qk_rms_norm(X, None, X[0, :2].half(), 2, 1), TypeError, "k_weight is torch.float16 and must be"),
    "mode of q and k": (lambda: qk_rms_norm(X, None, None, 2, 1, casting_mode=1), ValueError, "casting_mode is 1"),
    "eps of q and k": (lambda: qk_rms_norm(X, None, None, 2, 1, eps=-1), ValueError, "eps is -1 and must be at least 0"),
    "offset of q and k": (lambda: qk_rms_norm(X, None, None, 2, 1, offset="a"), TypeError, "offset is a str"),
    "mode of a module": (lambda: RMSNorm(8, casting_mode="bert")(X), ValueError, "casting_mode is 'bert'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        call()


def test_fp64_is_for_the_cpu_alone(device):
    if device.name == "cpu":
        assert rms_norm(X.double()).dtype == torch.float64
    else:
        with pytest.raises(TypeError, match="x is torch.float64"):
            rms_norm(X.double().to(device.torch))
