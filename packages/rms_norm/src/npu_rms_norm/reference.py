"""RMSNorm in plain PyTorch: the definition, and what runs on a CPU.

    rstd = 1 / sqrt(mean(x^2) + eps)        y = x rstd (offset + weight)

over the last dimension, in fp32 (fp64 for fp64 input). The weight is [D], or, of x [..., H, D], [H, D]: one for each head.
Where the result is rounded on the way depends on the casting mode:

    "llama"   x rstd is rounded to x's dtype before it is multiplied by the weight (Hugging Face's Llama)
    "gemma"   nothing is rounded before the result
    "none"    the statistics are fp32; rstd, offset + weight and both products are rounded to x's dtype

A gate multiplies either the result, y = x rstd (offset + weight) act(gate), or x before all else, x act(gate) for x. act is
silu(g) = g sigmoid(g) or the sigmoid. It is not rounded; in the first case the modes but "gemma" round what it multiplies:
"llama" to the weight's dtype, "none" to x's.

The backward takes each rounding as the identity and uses the rounded values where the forward did.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

from __future__ import annotations

import torch
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

CASTING_MODES = ("llama", "gemma", "none")
ACTIVATIONS = ("silu", "sigmoid")


def forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """y [..., D], not rounded yet, and rstd [...] of x [..., D]; what the mode rounds, to `dtype`, which x may exceed."""
    wide = x.to(statistics_dtype(x.dtype))
    rstd = torch.rsqrt(_mean(wide.square()) + eps)
    normalised = _normalise(wide, rstd, casting_mode, dtype)
    if weight is None:
        return normalised, rstd
    return normalised * _scale(weight, offset, casting_mode, dtype, wide.dtype), rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    dtype: torch.dtype,
    need_dweight: bool,
) -> tuple[Tensor, Tensor | None]:
    """dx in the arithmetic's dtype (not rounded yet) and dweight in weight's, None where not needed."""
    return _backward(dy.to(rstd.dtype), x.to(rstd.dtype), weight, rstd, offset, casting_mode, dtype, need_dweight)


def _backward(
    g: Tensor,
    wide: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    dtype: torch.dtype,
    need_dweight: bool,
) -> tuple[Tensor, Tensor | None]:
    normalised = _normalise(wide, rstd, casting_mode, dtype)
    dweight = None
    if need_dweight:
        assert weight is not None
        dweight = (g * normalised).reshape(-1, *weight.shape).sum(0).to(weight.dtype)
    if weight is not None:
        g = g * _scale(weight, offset, casting_mode, dtype, rstd.dtype)
    dx = (g - normalised * (g * normalised).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx, dweight


def gated_forward(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor]:
    """y [..., D] and rstd [...] of x and gate [..., D]."""
    act, _ = _activate(gate.to(statistics_dtype(x.dtype)), activation)
    wide = x.to(act.dtype)
    if not norm_before_gate:
        y, rstd = forward(wide * act, weight, eps, offset, casting_mode, x.dtype)
        return y.to(x.dtype), rstd
    rstd = torch.rsqrt(_mean(wide.square()) + eps)
    return (_weighted(wide, weight, rstd, offset, casting_mode, x.dtype) * act).to(x.dtype), rstd


def gated_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx and dgate in the arithmetic's dtype (not rounded yet) and dweight in weight's, None where not needed."""
    act, slope = _activate(gate.to(rstd.dtype), activation)
    wide, g = x.to(rstd.dtype), dy.to(rstd.dtype)
    if norm_before_gate:
        dgate = g * _weighted(wide, weight, rstd, offset, casting_mode, dy.dtype) * slope
        dx, dweight = _backward(g * act, wide, weight, rstd, offset, casting_mode, dy.dtype, need_dweight)
        return dx, dgate, dweight
    du, dweight = _backward(g, wide * act, weight, rstd, offset, casting_mode, dy.dtype, need_dweight)
    return du * act, du * wide * slope, dweight


def _activate(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act(gate) and its derivative."""
    sigmoid = torch.sigmoid(gate)
    if activation == "sigmoid":
        return sigmoid, sigmoid * (1 - sigmoid)
    return torch.nn.functional.silu(gate), sigmoid + gate * sigmoid * (1 - sigmoid)


def _weighted(
    wide: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, casting_mode: str, dtype: torch.dtype
) -> Tensor:
    """What a gate multiplies."""
    normalised = _normalise(wide, rstd, casting_mode, dtype)
    if weight is None:
        return normalised
    weighted = normalised * _scale(weight, offset, casting_mode, dtype, wide.dtype)
    if casting_mode == "gemma":
        return weighted
    return weighted.to(dtype if casting_mode == "none" else weight.dtype).to(wide.dtype)


def _mean(squares: Tensor) -> Tensor:
    """Of each row; several threads would add the parts of a single row in another order than the rows of many."""
    if squares.numel() == squares.shape[-1]:
        return squares.reshape(1, -1).expand(2, -1).mean(-1)[0].view(squares.shape[:-1])
    return squares.mean(-1)


def _normalise(wide: Tensor, rstd: Tensor, casting_mode: str, dtype: torch.dtype) -> Tensor:
    if casting_mode == "gemma":
        return wide * rstd.unsqueeze(-1)
    if casting_mode == "none":
        rstd = rstd.to(dtype).to(wide.dtype)
    return (wide * rstd.unsqueeze(-1)).to(dtype).to(wide.dtype)


def _scale(weight: Tensor, offset: float, casting_mode: str, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    scale = weight.to(wide) + offset
    return scale.to(dtype).to(wide) if casting_mode == "none" else scale
