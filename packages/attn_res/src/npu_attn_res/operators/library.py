"""What the operators share: their library, and functions on gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from npu_tiling.pytorch import schemas
from npu_tiling.pytorch.library import OperatorLibrary
from torch import Tensor

OPERATORS = OperatorLibrary("npu_attn_res")
DWEIGHTS = "Tensor dquery, Tensor drms_weight, Tensor doutput_rms_weight"

schema = functools.partial(schemas.schema, symbolic=True)  # how many blocks there are is a size


def split_gradient(
    gradient: Tensor | None, need_prefix: bool, need_output: bool, dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a prefix and of the layer's output, in its dtype, from that of their sum."""
    d_output = gradient.to(dtype) if need_output and gradient is not None and dtype is not None else None
    return gradient if need_prefix else None, d_output


def fake_gradients(tensors: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Contiguous tensors without data, for those that need a gradient."""
    return [tensor.new_empty(tensor.shape) if need else None for tensor, need in zip(tensors, needed, strict=True)]
