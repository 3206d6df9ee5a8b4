"""What the launches of both directions share."""

from __future__ import annotations

import torch
from npu_tiling import Device, Kernels
from npu_tiling.budget.arithmetic import FP32
from torch import Tensor

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-rms-norm")


def contiguous_or_none(parameter: Tensor | None) -> Tensor | None:
    """The weight or bias as kernels take it."""
    return None if parameter is None else parameter.contiguous()


def offset_argument(offset: float, weight: Tensor | None, bias: Tensor | None, device: Device) -> float | None:
    """The offset as kernels take it: None on CUDA for 0, so that a product with a 16-bit weight is of 16 bits.

    Not with a bias: such a product would be added to it without being rounded.
    """
    narrow = weight is None or weight.itemsize < FP32
    return None if device.kind == "cuda" and offset == 0.0 and narrow and bias is None else offset


def dtypes_of(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    """Of each tensor; None for each None."""
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype
