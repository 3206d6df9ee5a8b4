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
    options = (call.weight, call.bias, call.eps, call.offset, call.casting_mode)
    if call.gate is None:
        result, rstd = forward(u, *options, call.x.dtype)
    else:
        result, rstd = gated_forward(u, call.gate, *options, call.activation, call.norm_before_gate)
    quantised = call.dtype.itemsize == 1
    y, scale = quantise(result, call.dtype) if quantised else (result.to(call.dtype).contiguous(), None)
    fp32 = result.clone(memory_format=torch.contiguous_format) if call.return_fp32 else None
    return y, total, fp32, _by_head(rstd, call) if call.save_rstd else None, scale


def compute_backward(call: Backward) -> tuple[Tensor | None, ...]:
    """dx, dgate, dweight and dbias; None for what is not asked for."""
    options = (call.weight, call.bias, call.rstd, call.offset, call.casting_mode)
    needs, dgate = (call.need_dweight, call.need_dbias), None
    if call.gate is None:
        dx, *parameters = backward(call.dy, call.x, *options, call.rounded_to, *needs)
    else:
        gating = (call.activation, call.norm_before_gate)
        dx, dgate, *parameters = gated_backward(call.dy, call.x, call.gate, *options, *gating, *needs)
        dgate = dgate.to(call.gate.dtype).contiguous() if call.need_dgate else None
    total = dx if call.dsum is None else dx + call.dsum
    return total.to(call.x.dtype).contiguous() if call.need_dx else None, dgate, *parameters


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
        x = _rows(part, weight)
        y, rstd = forward(x, weight, None, call.eps, call.offset, call.casting_mode, x.dtype)
        results.append((y.to(x.dtype).contiguous().view(part.shape), rstd.contiguous() if call.save_rstd else None))
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
        x, options = _rows(part, weight), (call.offset, call.casting_mode, part.dtype)
        dx, dweight, _ = backward(
            _rows(dy, weight), x, weight, None, rstd, *options, need_dweight and weight is not None, False
        )
        gradients.append(dx.view(part.shape))
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


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y [..., D], not rounded yet, and rstd [...] of x [..., D]. `dtype`: what To.X stands for; x may be wider."""
    wide = x.to(statistics_dtype(x.dtype))
    rstd = torch.rsqrt(_mean(wide.square()) + eps)
    return _weighted(wide, weight, bias, rstd, offset, casting_mode, dtype), rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    dtype: torch.dtype,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx in the arithmetic's dtype (not rounded yet), dweight and dbias in their own, None where not needed."""
    g, wide = dy.to(rstd.dtype), x.to(rstd.dtype)
    normalised = _normalise(wide, rstd, casting_mode, dtype)
    dweight = _sum_rows(g * normalised, weight) if need_dweight else None
    dbias = _sum_rows(g, bias) if need_dbias else None
    if weight is not None:
        g = g * _scale(weight, offset, casting_mode, dtype, rstd.dtype)
    dx = (g - normalised * (g * normalised).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx, dweight, dbias


def gated_forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor]:
    """y [..., D], not rounded yet, and rstd [...] of x and gate [..., D]."""
    act, _ = _activate(gate.to(statistics_dtype(x.dtype)), activation)
    wide = x.to(act.dtype)
    if not norm_before_gate:
        return forward(wide * act, weight, bias, eps, offset, casting_mode, x.dtype)
    y, rstd = forward(wide, weight, bias, eps, offset, casting_mode, x.dtype)
    return _round_weighted(y, weight, casting_mode, x.dtype) * act, rstd


def gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """dx and dgate in the arithmetic's dtype (not rounded yet), dweight and dbias in their own, None where not needed."""
    act, slope = _activate(gate.to(rstd.dtype), activation)
    wide, g = x.to(rstd.dtype), dy.to(rstd.dtype)
    options = (weight, bias, rstd, offset, casting_mode, x.dtype)
    if norm_before_gate:
        z = _round_weighted(_weighted(wide, *options), weight, casting_mode, x.dtype)
        dx, dweight, dbias = backward(g * act, wide, *options, need_dweight, need_dbias)
        return dx, g * z * slope, dweight, dbias
    du, dweight, dbias = backward(g, wide * act, *options, need_dweight, need_dbias)
    return du * act, du * wide * slope, dweight, dbias


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


def _weighted(
    wide: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    dtype: torch.dtype,
) -> Tensor:
    """x rstd (offset + weight) + bias, in the arithmetic's dtype."""
    y = _normalise(wide, rstd, casting_mode, dtype)
    if weight is not None:
        y = y * _scale(weight, offset, casting_mode, dtype, wide.dtype)
    if bias is not None:
        y = _round_weighted(y, weight, casting_mode, dtype) + _scale(bias, 0.0, casting_mode, dtype, wide.dtype)
    return y


def _round_weighted(y: Tensor, weight: Tensor | None, casting_mode: str, dtype: torch.dtype) -> Tensor:
    """The product with the weight, rounded for the addition of a bias or the product with a gate."""
    return y if weight is None else _round(y, casting(casting_mode).weighted, dtype, weight)


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
