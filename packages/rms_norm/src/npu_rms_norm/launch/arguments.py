"""What the launches of both directions pass to kernels: the gate, parameters, the offset."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling import Device, Kernels
from npu_tiling.budget.arithmetic import FP32
from torch import Tensor

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-rms-norm")


class Gate(NamedTuple):
    """A gate and what is done with it.

    Attributes:
        values: [..., D].
        silu: act is silu, else the sigmoid.
        first: x is gated, else the weighted result is.
    """

    values: Tensor
    silu: bool
    first: bool


def contiguous_or_none(parameter: Tensor | None) -> Tensor | None:
    """The weight or bias as kernels take it."""
    return None if parameter is None else parameter.contiguous()


def offset_argument(offset: float, weight: Tensor | None, bias: Tensor | None, device: Device) -> float | None:
    """The offset as kernels take it: none on CUDA where it is 0, so that products with a weight of 16 bits stay such.

    Not with a bias: such a product would be added to it without being rounded.
    """
    narrow = weight is None or weight.itemsize < FP32
    return None if device.kind == "cuda" and offset == 0.0 and narrow and bias is None else offset


def dtypes_of(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    """Of each tensor; None for each None."""
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])
