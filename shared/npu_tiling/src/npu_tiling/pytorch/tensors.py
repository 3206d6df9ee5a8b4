"""Memory that operators ask PyTorch for, and the dtype that they compute in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and arithmetic for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def allocate(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for a result or a workspace, contiguous, on the device of `like`."""
    return like.new_empty(*shape or (shape,), dtype=dtype)  # one by one: half of the time that PyTorch takes for a tuple


def nothing(like: Tensor) -> Tensor:
    """What an operator returns for a result that was not asked for: an empty tensor on the device of `like`."""
    return like.new_empty(0, dtype=torch.float32)


class Neighbours(tuple[Tensor, ...]):
    """Tensors on a CPU that an emulated kernel reaches through one pointer, that of the first.

    An emulation checks that a kernel stays inside the tensors that it is given; a pointer on a device reaches anything.
    """

    @property
    def dtype(self) -> torch.dtype:
        return self[0].dtype

    @property
    def device(self) -> torch.device:
        return self[0].device

    def data_ptr(self) -> int:
        return self[0].data_ptr()
