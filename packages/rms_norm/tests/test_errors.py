"""Bad input is refused with one sentence that names the argument, what it was and what it must be."""

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

from testing.operators import *  # noqa: F403
from testing.operators import Wide

X = torch.ones(2, 8)
REFUSED = {
    TypeError: {
        "eps is a NoneType and must be a number": lambda: RMSNorm(9, eps=None),
        "in_place is 1 and must be True or False": lambda: RMSNorm(9, in_place=1),
        "x is a list and must be a tensor": lambda: rms_norm([1.0]),
        "x is torch.int64 .* must be torch.float32": lambda: rms_norm(X.long()),
        "weight is a float and must be a tensor or None": lambda: rms_norm(X, 2.0),
        "weight is torch.float16 and must be": lambda: rms_norm(X, torch.ones(8).half()),
        "bias is a float and must be a tensor": lambda: gated_rms_norm(X, X, bias=1.0),
        "bias is None and must be True or False": lambda: RMSNorm(8, bias=None),
        "^dtype is torch.int8 and must be": lambda: gated_rms_norm(X, X, dtype=torch.int8),
        "residual is a NoneType": lambda: add_rms_norm(X, None),
        "residual is torch.float16 and must be": lambda: add_rms_norm(X, X.half()),
        "dtype is 'bf16' and must be torch.float32, .* or None": lambda: rms_norm(X, dtype="bf16"),
        "dtype is torch.int8 and must be": lambda: add_rms_norm(X, X, dtype=torch.int8),
        "dtype is torch.uint8 and must be torch.int8 or torch.float8_e4m3fn": lambda: rms_norm_dynamic_quant(
            X, dtype=torch.uint8
        ),
        "dtype is torch.float64 and must be": lambda: rms_norm(X, dtype=torch.float64),
        "return_fp32 is 1 and must be True or False": lambda: rms_norm(X, return_fp32=1),
        "gate is a NoneType and must be a tensor": lambda: gated_rms_norm(X, None),
        "gate is torch.float16 and must be": lambda: gated_rms_norm(X, X.half()),
        "norm_before_gate is None": lambda: gated_rms_norm(X, X, norm_before_gate=None),
        "positional": lambda: rms_norm(X, None, 1e-6, 1.0),
        "^eps is a NoneType and must be a number.$": lambda: rms_norm(X, eps=None),
        "eps is a Tensor and must be a number": lambda: rms_norm(X, eps=X[0, 0]),
        "offset is a str and must be a number": lambda: rms_norm(X, offset="a"),
        "in_place is None and must be True or False": lambda: rms_norm(X, in_place=None),
        "eps is a NoneType": lambda: RMSNorm(8, eps=None)(X),
        "offset is a str": lambda: RMSNorm(8, offset="a"),
        "qkv is torch.int64": lambda: qk_rms_norm(X.long(), None, None, 2),
        "k_weight is torch.float16 and must be": lambda: qk_rms_norm(X, None, X[0, :2].half(), 2, 1),
        "^offset is a str": lambda: qk_rms_norm(X, None, None, 2, 1, offset="a"),
    },
    ValueError: {
        "casting_mode is 'x' and must be one of": lambda: RMSNorm(9, casting_mode="x"),
        "activation is 'gelu' and must be one": lambda: GatedRMSNorm(9, activation="gelu"),
        r"x has shape \(\) and must have a last dimension": lambda: rms_norm(torch.ones(())),
        r"x has shape \(3, 0\)": lambda: rms_norm(torch.ones(3, 0)),
        r"weight has shape \(9,\) and must have .*\(8,\)": lambda: rms_norm(X, torch.ones(9)),
        r"weight has shape \(1, 8\)": lambda: rms_norm(X, torch.ones(1, 8)),
        r"weight has shape \(3, 8\) and must have shape \(8,\) or \(2, 8\)": lambda: rms_norm(X, torch.ones(3, 8)),
        "heads is 0 and must be a whole number of at least 1": lambda: RMSNorm(8, heads=0),
        "weight is on meta": lambda: rms_norm(X, torch.ones(8, device="meta")),
        r"bias has shape \(9,\) and must have": lambda: rms_norm(X, bias=torch.ones(9)),
        r"bias has shape \(8,\) and must have shape \(2, 8\)": lambda: rms_norm(X, torch.ones(2, 8), bias=torch.ones(8)),
        "eps is -1e-06 and must be at least 0": lambda: rms_norm(X, eps=-1e-6),
        "eps is nan": lambda: rms_norm(X, eps=float("nan")),
        "offset is inf and must be finite": lambda: rms_norm(X, offset=float("inf")),
        "offset is 1e\\+39 and must be finite in fp32": lambda: rms_norm(X, offset=1e39),
        "casting_mode is 'bert' .* 'llama', 'gemma'": lambda: rms_norm(X, casting_mode="bert"),
        r"residual has shape \(1, 8\) .* \(2, 8\)": lambda: add_rms_norm(X, X[:1]),
        "residual is on meta": lambda: add_rms_norm(X, X.to("meta")),
        r"gate has shape \(1, 8\) .* \(2, 8\)": lambda: gated_rms_norm(X, X[:1]),
        "gate is on meta": lambda: gated_rms_norm(X, X.to("meta")),
        "'gelu' .* 'silu', 'sigmoid'": lambda: gated_rms_norm(X, X, activation="gelu"),
        "^casting_mode is 'bert'": lambda: gated_rms_norm(X, X, casting_mode="bert"),
        "hidden_size is 0 and must be a whole number": lambda: GatedRMSNorm(0),
        "casting_mode is None and must be one of": lambda: rms_norm(X, casting_mode=None),
        "hidden_size is 0 and must be a whole number of at least 1": lambda: RMSNorm(0),
        "n_heads is 0 and must be a whole number": lambda: qk_rms_norm(X, None, None, 0),
        "n_kv_heads is 0 and must be a whole number": lambda: qk_rms_norm(X, None, None, 2, 0),
        "qkv has a last dimension of 8 and must have a multiple of 3, the heads of q, k and v": lambda: qk_rms_norm(
            X, None, None, 1
        ),
        r"q_weight has shape \(3,\) and must have shape \(2,\) or \(4,\)": lambda: qk_rms_norm(X, torch.ones(3), None, 2, 1),
        "casting_mode is 1": lambda: qk_rms_norm(X, None, None, 2, 1, casting_mode=1),
        "eps is -1 and must be at least 0": lambda: qk_rms_norm(X, None, None, 2, 1, eps=-1),
        "casting_mode is 'bert'": lambda: RMSNorm(8, casting_mode="bert")(X),
    },
}
WIDE = (Wide("x", rms_norm, (X,)),)
