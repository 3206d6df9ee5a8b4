"""rstd, which the forward saves for the backward: it is stored head by head where each head has its own parameters."""

from __future__ import annotations

import torch
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor


def has_heads(weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether each head has parameters of its own."""
    return (weight is not None and weight.dim() == 2) or (bias is not None and bias.dim() == 2)


def allocate_rstd(x: Tensor, per_head: bool, dtype: torch.dtype) -> Tensor:
    """Memory for rstd [...]. Head by head where each head has its own parameters: a program stores those of one head."""
    if not per_head:
        return allocate(x, x.shape[:-1], dtype)
    return allocate(x, (x.shape[-2], *x.shape[:-2]), dtype).movedim(0, -1)


def by_head(rstd: Tensor, per_head: bool) -> Tensor:
    """rstd, copied unless it lies as `allocate_rstd` makes it."""
    return rstd.movedim(-1, 0).contiguous().movedim(0, -1) if per_head else rstd.contiguous()
