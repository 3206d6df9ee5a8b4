"""RMSNorm in plain PyTorch: the definition, and what runs on a CPU.

    rstd = 1 / sqrt(mean(x^2) + eps)        y = x rstd (offset + weight)

over the last dimension, in fp32 (fp64 for fp64 input). Where the result is rounded on the way depends on the casting mode:

    "llama"   x rstd is rounded to x's dtype before it is multiplied by the weight (Hugging Face's Llama)
    "gemma"   nothing is rounded before the result
    "none"    the statistics are fp32; rstd, offset + weight and both products are rounded to x's dtype

The backward takes each rounding as the identity and uses the rounded values where the forward did.
Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
"""

from __future__ import annotations

import torch
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

CASTING_MODES = ("llama", "gemma", "none")


def forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """y [..., D] and rstd [...] of x [..., D]; y, and what the mode rounds, in `dtype`, which x may be wider than."""
    wide = x.to(statistics_dtype(x.dtype))
    rstd = torch.rsqrt(_mean(wide.square()) + eps)
    normalised = _normalise(wide, rstd, casting_mode, dtype)
    if weight is None:
        return normalised.to(dtype), rstd
    return (normalised * _scale(weight, offset, casting_mode, dtype, wide.dtype)).to(dtype), rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, casting_mode: str, need_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    """dx in the arithmetic's dtype (not rounded yet) and dweight [D] in weight's dtype, None where not needed."""
    wide = x.to(rstd.dtype)
    g = dy.to(rstd.dtype)
    normalised = _normalise(wide, rstd, casting_mode, dy.dtype)
    dweight = None
    if need_dweight:
        assert weight is not None
        dweight = (g * normalised).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if weight is not None:
        g = g * _scale(weight, offset, casting_mode, dy.dtype, rstd.dtype)
    dx = (g - normalised * (g * normalised).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx, dweight


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
