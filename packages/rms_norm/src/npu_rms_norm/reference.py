"""RMSNorm in plain PyTorch: the definition, and what runs on a CPU.

    rstd = 1 / sqrt(mean(x^2) + eps)        y = x rstd (offset + weight) + bias

over the last dimension, in fp32 (fp64 for fp64 input). Weight and bias are [D], or, of x [..., H, D], [H, D]: for each head.
The casting mode says what is rounded on the way:

    "llama"   x rstd is rounded to x's dtype before it is multiplied by the weight (Hugging Face's Llama)
    "gemma"   nothing is rounded before the result
    "none"    the statistics are fp32; rstd, offset + weight, bias and x rstd are rounded to x's dtype

A gate multiplies either the result, y = (x rstd (offset + weight) + bias) act(gate), or x: then x act(gate) takes the place
of x in the formula. act is silu(g) = g sigmoid(g) or the sigmoid. act(gate) is not rounded. Before a bias is added to the
product with the weight, or a gate multiplies the result, "llama" rounds it to the weight's dtype, and "none" to x's.

The backward treats each rounding as the identity: its derivative is 1. It uses the rounded x rstd and the rounded weight.
The rstd that multiplies dx is not rounded.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

from __future__ import annotations

import math

import torch
from npu_tiling.calls import statistics_dtype
from npu_tiling.dispatch import forward_mode
from torch import Tensor

from .call import QK, Backward, Forward, QKBackward, To, casting

# A new activation is a name here and
#
#     its formula and derivative in `_activate` below and in `activate` of formula.py
#     its name in the docstrings of reference.py, `gated_rms_norm` (api.py), `GatedRMSNorm` (module.py) and `Shape`
#     (call.py), and in the README
#     its name in the `Literal` of explain.py
#     its formula in tests/test_gated.py (`WAYS`), tests/test_option_properties.py and tests/test_patching.py, its name in
#     tests/test_errors.py
ACTIVATIONS = ("silu", "sigmoid")


def compute_forward(call: Forward) -> tuple[Tensor | None, ...]:
    """y, the sum, y in fp32, rstd and the scales of a quantised y; None for what is not asked for."""
    if call.dtype.itemsize == 1 and forward_mode(call):
        raise NotImplementedError("a quantised rms_norm has no forward-mode derivative: y and scale are constants.")
    u, total = call.x, None
    if call.residual is not None:
        wide = statistics_dtype(call.residual.dtype)
        u = total = (call.x.to(wide) + call.residual.to(wide)).to(call.residual.dtype).contiguous()
    result, rstd = _normalised(call, u)
    quantised = call.dtype.itemsize == 1
    y, scale = quantise(result, call.dtype) if quantised else (result.to(call.dtype).contiguous(), None)
    fp32 = result.clone(memory_format=torch.contiguous_format) if call.return_fp32 else None
    return y, total, fp32, _by_head(rstd, call) if call.save_rstd else None, scale


def compute_backward(call: Backward) -> tuple[Tensor | None, ...]:
    """dx, dgate, dweight and dbias; None for what is not asked for."""
    exact, dtype, dgate = call.rstd.dtype, call.rounded_to, None
    u = wide = call.x.to(exact)
    g = call.dy.to(exact)
    if call.gate is not None:
        act, slope = _activate(call.gate.to(exact), call.activation)
        if call.norm_before_gate:
            z = _round_weighted(_weighted(call, wide, call.rstd, dtype), call, dtype)
            g, dgate = g * act, g * z * slope
        else:
            u = wide * act
    n = _normalise(u, call.rstd, call.casting_mode, dtype)
    dweight = _sum_rows(g * n, call.weight) if call.need_dweight else None
    dbias = _sum_rows(g, call.bias) if call.need_dbias else None
    if call.weight is not None:
        g = g * _scale(call.weight, call.offset, call.casting_mode, dtype, exact)
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * call.rstd.unsqueeze(-1)
    if call.gate is not None and not call.norm_before_gate:
        dx, dgate = dx * act, dx * wide * slope
    if call.gate is not None and dgate is not None:
        dgate = dgate.to(call.gate.dtype).contiguous() if call.need_dgate else None
    total = dx if call.dsum is None else dx + call.dsum
    return total.to(call.x.dtype).contiguous() if call.need_dx else None, dgate, dweight, dbias


def compute_backward_(call: Backward) -> tuple[Tensor | None, ...]:
    """dweight and dbias, None for what is not asked for; dx is written to dy."""
    dx, _, *parameters = compute_backward(call)
    assert dx is not None
    call.dy.copy_(dx)
    return tuple(parameters)


def split(qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [..., n_heads, D], k and v [..., n_kv_heads, D]: views."""
    width = qkv.shape[-1] // (n_heads + 2 * n_kv_heads)
    q, k = (
        qkv.narrow(-1, first * width, own * width).unflatten(-1, (own, width))
        for first, own in ((0, n_heads), (n_heads, n_kv_heads))
    )
    return q, k, values(qkv, n_heads, n_kv_heads)


def values(qkv: Tensor, n_heads: int, n_kv_heads: int) -> Tensor:
    """v [..., n_kv_heads, D]: a view."""
    width = qkv.shape[-1] // (n_heads + 2 * n_kv_heads)
    return qkv.narrow(-1, (n_heads + n_kv_heads) * width, n_kv_heads * width).unflatten(-1, (n_kv_heads, width))


def compute_qk_forward(call: QK) -> tuple[Tensor | None, ...]:
    """q and k, and rstd of both."""
    results = []
    q, k, _ = split(call.qkv, call.n_heads, call.n_kv_heads)
    for part, weight in ((q, call.q_weight), (k, call.k_weight)):
        y, _, _, rstd, _ = compute_forward(call.norm(_rows(part, weight), weight))
        assert y is not None
        results.append((y.view(part.shape), rstd))
    (q, q_rstd), (k, k_rstd) = results
    return q, k, q_rstd, k_rstd


def compute_qk_backward(call: QKBackward) -> tuple[Tensor | None, ...]:
    """The gradients of the projection and of both weights; None for what is not asked for."""
    dqkv = torch.empty_like(call.qkv, memory_format=torch.contiguous_format) if call.need_dqkv else None
    heads = call.n_heads, call.n_kv_heads
    parts = zip(
        split(call.qkv, *heads)[:2],
        (call.dq, call.dk),
        (call.q_weight, call.k_weight),
        (call.q_rstd, call.k_rstd),
        (call.need_dq_weight, call.need_dk_weight),
        strict=True,
    )
    gradients: list[Tensor | None] = []
    dweights: list[Tensor | None] = []
    for part, dy, weight, rstd, need_dweight in parts:
        if dy is None:
            gradients.append(None)
            dweights.append(None)
            continue
        norm = call.norm(_rows(dy, weight), _rows(part, weight), weight, rstd, need_dweight and weight is not None)
        dx, _, dweight, _ = compute_backward(norm)
        gradients.append(None if dx is None else dx.view(part.shape))
        dweights.append(dweight)
    if dqkv is not None:
        for into, gradient in zip(split(dqkv, *heads), (*gradients, call.dv), strict=True):
            if gradient is None:
                into.zero_()
            else:
                into.copy_(gradient)
    return dqkv, *dweights


def _rows(part: Tensor, weight: Tensor | None) -> Tensor:
    """The rows that are normalised: each head or, where a weight is as wide as all heads, the heads of a token together."""
    return part if weight is None or weight.shape[0] == part.shape[-1] else part.flatten(-2)


def _by_head(rstd: Tensor, call: Forward) -> Tensor:
    """rstd with the strides that kernels write: head by head where each head has parameters of its own."""
    return rstd.movedim(-1, 0).contiguous().movedim(0, -1) if call.has_heads() else rstd.contiguous()


def _normalised(call: Forward, u: Tensor) -> tuple[Tensor, Tensor]:
    """y [..., D], not rounded yet, and rstd [...] of u [..., D]: the call's x, or its sum."""
    act, wide, dtype = None, u.to(statistics_dtype(u.dtype)), call.x.dtype
    if call.gate is not None:
        act, _ = _activate(call.gate.to(wide.dtype), call.activation)
        wide = wide if call.norm_before_gate else wide * act
    rstd = torch.rsqrt(_mean(wide.square()) + call.eps)
    y = _weighted(call, wide, rstd, dtype)
    return y if act is None or not call.norm_before_gate else _round_weighted(y, call, dtype) * act, rstd


def quantise(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y / scale of its row, rounded to the nearest, half to even, and the scales [...], fp32.

    A scale is the largest |y| of its row, at least 1e-30, divided by 127 for int8 or by 448 for fp8 e4m3. In a row with NaN
    or inf the scale is NaN, and so is the quantised y, which the conversion to int8 turns into 0.
    """
    most = 127.0 if dtype == torch.int8 else 448.0
    largest = y.abs().amax(-1).clamp_min(1e-30)
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    steps = y * (most / largest).unsqueeze(-1)
    if dtype == torch.int8:
        steps = steps.round().nan_to_num(0.0)
    return steps.to(dtype).contiguous(), (largest / most).float().contiguous()


def _activate(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act(gate) and its derivative."""
    sigmoid = torch.sigmoid(gate)
    if activation == "sigmoid":
        return sigmoid, sigmoid * (1 - sigmoid)
    assert activation == "silu", activation
    return torch.nn.functional.silu(gate), sigmoid + gate * sigmoid * (1 - sigmoid)


def _weighted(call: Forward | Backward, wide: Tensor, rstd: Tensor, dtype: torch.dtype) -> Tensor:
    """x rstd (offset + weight) + bias, in the arithmetic's dtype. `dtype`: what To.X stands for; x may be wider."""
    y = _normalise(wide, rstd, call.casting_mode, dtype)
    if call.weight is not None:
        y = y * _scale(call.weight, call.offset, call.casting_mode, dtype, wide.dtype)
    if call.bias is not None:
        y = _round_weighted(y, call, dtype) + _scale(call.bias, 0.0, call.casting_mode, dtype, wide.dtype)
    return y


def _round_weighted(y: Tensor, call: Forward | Backward, dtype: torch.dtype) -> Tensor:
    """The product with the weight, rounded for the addition of a bias or the product with a gate."""
    return y if call.weight is None else _round(y, casting(call.casting_mode).weighted, dtype, call.weight)


def _sum_rows(terms: Tensor, parameter: Tensor | None) -> Tensor:
    """The gradient of a parameter: the sum of the terms of all rows."""
    assert parameter is not None
    rows = math.prod(terms.shape[: terms.dim() - parameter.dim()])
    return terms.reshape(rows, *parameter.shape).sum(0).to(parameter.dtype)


def _mean(squares: Tensor) -> Tensor:
    """The mean of each row. A single row is averaged as one of two: alone, PyTorch would add it in another order."""
    if squares.numel() == squares.shape[-1]:
        return squares.reshape(1, -1).expand(2, -1).mean(-1)[0].view(squares.shape[:-1])
    return squares.mean(-1)


def _normalise(wide: Tensor, rstd: Tensor, casting_mode: str, dtype: torch.dtype) -> Tensor:
    mode = casting(casting_mode)
    return _round(wide * _round(rstd, mode.factors, dtype).unsqueeze(-1), mode.normalised, dtype)


def _scale(weight: Tensor, offset: float, casting_mode: str, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    return _round(weight.to(wide) + offset, casting(casting_mode).factors, dtype)


def _round(value: Tensor, to: To, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    """`value`, rounded to x's dtype (`dtype`) or to the weight's, and widened again."""
    if to is To.FP32 or (to is To.WEIGHT and weight is None):
        return value
    return value.to(weight.dtype if to is To.WEIGHT and weight is not None else dtype).to(value.dtype)
