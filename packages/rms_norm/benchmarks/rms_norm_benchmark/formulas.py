"""What is computed, in plain PyTorch: the definition, and as models and servers write it."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6


def reference(x: Tensor, weight: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
    """y, with a gate [T, H, D] or a bias [D]; of x + residual [T, D] y and the sum.

    Where nothing has a gradient: steps, the sum and scales.
    """
    if not x.requires_grad:
        most, *added = others
        return quantised_formula(None, x, weight, most, *added)
    if others and others[0].dim() == x.dim() == 2:
        total = x + others[0]
        return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight, total
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    if not others:
        return y
    return y + others[0] if others[0].dim() == 1 else y * torch.nn.functional.silu(others[0])


def hugging_face(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The forward of transformers' LlamaRMSNorm."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    y = weight * wide.to(x.dtype)
    return y if bias is None else y + bias


def hugging_face_gated(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """The forward of transformers' Qwen3NextRMSNormGated."""
    return (hugging_face(x, weight) * torch.nn.functional.silu(gate.to(torch.float32))).to(x.dtype)


def quantised_formula(
    dtype: torch.dtype | None, x: Tensor, weight: Tensor, most: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, ...]:
    """As vLLM defines rms_norm_dynamic_per_token_quant, but that n is not rounded before; `dtype` None rounds nothing."""
    total = x if residual is None else x + residual
    wide = total.to(torch.promote_types(x.dtype, torch.float32))
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.to(wide.dtype)
    scale = y.abs().amax(-1, keepdim=True) / most
    steps = y / scale
    if dtype is not None:
        steps = (steps.round() if dtype == torch.int8 else steps).to(dtype)
    return (steps, *([] if residual is None else [total]), scale.squeeze(-1))
