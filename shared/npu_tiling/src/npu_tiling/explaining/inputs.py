"""Inputs of a call that is explained: tensors on the meta device, which have shapes and no data. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from ..chips.detection import chip as chip_named
from ..chips.detection import device_for
from ..chips.devices import Device
from ..errors import UnknownDeviceError
from ..pytorch import arguments

Dtype = Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"]
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def check_sizes(**sizes: int | None) -> None:
    """Raises ValueError where one of these is given and is not a whole number of at least 1."""
    for name, size in sizes.items():
        if size is not None:
            arguments.whole(name, size, least=1)


def leaf(*shape: int, dtype: str, gradient: bool = True) -> Tensor:
    """A tensor on the meta device that needs a gradient, or none.

    Raises:
        ValueError: `dtype` is not a key of `DTYPES`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r} and must be one of {', '.join(DTYPES)}.")
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta", requires_grad=gradient)


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0]


def computed(tensor: Tensor) -> Tensor:
    """The same memory as something computed of the tensor, which may be written to where the tensor needs a gradient."""
    result: Tensor = _Computed.apply(tensor)
    return result


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the elements of all tensors; None has none."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)


def gradients(results: Iterable[Tensor | None], leaves: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Run the backward of the results that have one; returns the gradients of the leaves that need one."""
    recorded = [result for result in results if result is not None and result.requires_grad]
    inputs = [each for each in leaves if each is not None and each.requires_grad]
    return torch.autograd.grad(recorded, inputs, [torch.empty_like(result) for result in recorded])


def chosen_chip(name: str | Device | None) -> Device:
    """The chip itself, the chip of that name, or, for None, the one in this machine.

    Raises:
        UnknownDeviceError: there is no such chip, or none in this machine.
    """
    if isinstance(name, Device):
        return name
    if name is not None:
        return chip_named(name)
    found = None
    if torch.cuda.is_available():
        found = device_for(torch.device("cuda", torch.cuda.current_device()))
    elif hasattr(torch, "npu") and torch.npu.is_available():
        found = device_for(torch.device("npu", torch.npu.current_device()))
    if found is None:
        how = "as --chip Ascend910B4 or chip='Ascend910B4'"
        raise UnknownDeviceError(f"chip must be named, {how}: this machine has neither an NPU nor a GPU.")
    return found
