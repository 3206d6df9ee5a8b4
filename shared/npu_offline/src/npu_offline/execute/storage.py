"""The storages that a launch's arguments lie in: addresses, bounds, lengths of rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..errors import OfflineError

if TYPE_CHECKING:
    import torch


def bytes_of(pointer: str) -> int:
    """The bytes of an element that a pointer type such as "*bf16" points to."""
    found = re.search(r"\d+", pointer)
    return max(1, int(found[0]) // 8) if found else 1


def row_bytes(value: Any) -> int:
    """The bytes of a tensor's rows, 0 if their elements are not contiguous."""
    tensor = getattr(value, "base", value)
    if not hasattr(tensor, "shape"):  # it stands for several tensors
        return 0
    return tensor.shape[-1] * tensor.itemsize if tensor.dim() and tensor.stride(-1) == 1 else 0


def bounds_of(value: Any) -> list[int]:
    """First address and end of each storage of an argument, which may stand for several tensors."""
    tensor = getattr(value, "base", value)
    bounds: list[int] = []
    for one in tensor if isinstance(tensor, tuple) else (tensor,):  # `npu_tiling.pytorch.tensors.Neighbours` is one
        storage = one.untyped_storage()
        bounds += (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    return bounds


def storage_of(name: str, value: Any) -> tuple[int, int, int]:
    """A tensor's address, and the first address and end of its storage; of several tensors, of all their storages.

    Raises:
        OfflineError: it is not a CPU tensor.
    """
    tensor: torch.Tensor = getattr(value, "base", value)
    first = tensor[0] if isinstance(tensor, tuple) else tensor
    if first.untyped_storage().device.type != "cpu":  # tensors of `npu-offline run -- python` say that they lie on an NPU
        raise OfflineError(f"argument {name} is on {tensor.device}, must be a CPU tensor under emulation")
    bounds = bounds_of(value)
    return tensor.data_ptr(), min(bounds), max(bounds)
