"""The storages that a launch's arguments lie in: addresses, bounds, lengths of rows."""

from __future__ import annotations

import gc
import itertools
import re
from typing import TYPE_CHECKING, Any

from ..errors import OfflineError

if TYPE_CHECKING:
    import torch


def bytes_of(pointer: str) -> int:
    """The bytes of an element that a pointer type such as "*bf16" points to."""
    found = re.search(r"\d+", pointer)
    return max(1, int(found[0]) // 8) if found else 1


def memory_of(value: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The tensor that an argument points into, or the tensors that it stands for.

    Triton takes whatever has `data_ptr()` and `dtype` for a pointer: then it is the tensor with that address in its storage.

    Raises:
        OfflineError: there is no such tensor.
    """
    import torch

    base = getattr(value, "base", value)  # `triton.reinterpret` wraps a tensor
    if isinstance(base, (torch.Tensor, tuple)):  # `npu_tiling.tensors.Neighbours` is a tuple
        return base
    address = value.data_ptr()
    for one in itertools.chain(getattr(value, "__dict__", {}).values(), gc.get_objects()):
        if issubclass(type(one), torch.Tensor) and _holds(one, address):
            return one
    raise OfflineError(
        f"an argument of type {type(value).__name__} points to {address:#x}, which is in no CPU tensor's storage"
    )


def _holds(tensor: torch.Tensor, address: int) -> bool:
    try:
        storage = tensor.untyped_storage()
        return storage.device.type == "cpu" and 0 <= address - storage.data_ptr() < storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a tensor without memory, of functional transforms or sparse
        return False


def tensor_of(value: Any) -> torch.Tensor | None:
    """The tensor that an argument is, or that `triton.reinterpret` has wrapped; None for what stands for others."""
    import torch

    base = getattr(value, "base", value)
    return base if isinstance(base, torch.Tensor) else None


def row_bytes(value: Any) -> int:
    """The bytes of a tensor's rows, 0 if their elements are not contiguous."""
    tensor = tensor_of(value)
    if tensor is None:
        return 0
    return tensor.shape[-1] * tensor.itemsize if tensor.dim() and tensor.stride(-1) == 1 else 0


def bounds_of(value: Any) -> list[int]:
    """First address and end of each storage of an argument, which may stand for several tensors."""
    memory = memory_of(value)
    bounds: list[int] = []
    for one in memory if isinstance(memory, tuple) else (memory,):
        storage = one.untyped_storage()
        bounds += (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    return bounds


def storage_of(name: str, value: Any) -> tuple[int, int, int]:
    """An argument's address, and the first address and end of its storage; of several tensors, of all their storages.

    Raises:
        OfflineError: it is not a CPU tensor, or points into none.
    """
    memory = memory_of(value)
    first = memory[0] if isinstance(memory, tuple) else memory
    if first.untyped_storage().device.type != "cpu":  # tensors of `npu-offline run -- python` say that they lie on an NPU
        raise OfflineError(f"argument {name} is on {first.device}, must be a CPU tensor under emulation")
    bounds = bounds_of(value)
    return value.data_ptr(), min(bounds), max(bounds)
