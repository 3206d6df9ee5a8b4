"""The package's kernels, what launches of them ask for, and a gradient that is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from npu_tiling import Device, Kernels, LaunchSpec
from torch import Tensor

from ..both.tiling import Launch
from ..shape import RowShape

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-embedding")


NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def as_bits(tensor: Tensor) -> Tensor:
    """The elements as integers of their size, for kernels that copy them."""
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


class Gradient(NamedTuple):
    """A gradient that is asked for.

    Attributes:
        dy: [n, D], or [P, n / P, D] where rows lie in P parts; the elements of a row next to each other.
        indices: [n], contiguous.
        n_rows: of the table at hand.
        padding: the row that gets no gradient, NO_ROW for none.
        scale_by_count: whether the gradient of a row is divided by how many indices name it.
        first_row: the row of the whole table that the table at hand begins with.
        device: whose kernels run.
    """

    dy: Tensor
    indices: Tensor
    n_rows: int
    padding: int
    scale_by_count: bool
    first_row: int
    device: Device

    @property
    def dy_strides(self) -> tuple[int, int, int]:
        """Rows of a part of dy, from a part to the next, and from a row to the next."""
        rows = self.dy.shape[-2]
        return rows, self.dy.stride(0) if self.in_parts else 0, self.dy.stride(-2)

    @property
    def in_parts(self) -> bool:
        """Whether dy lies in parts."""
        return self.dy.dim() == 3

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """What kernels that read indices ask for."""
        return self.indices.numel(), self.n_rows, self.first_row, self.padding


def dense_rows(rows: Tensor) -> Tensor:
    """The tensor [..., D], copied only if the elements of a row are not next to each other."""
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


@functools.lru_cache(maxsize=4096)
def row_spec(choose: Callable[[RowShape], Launch], width: int, itemsize: int, device: Device, **flags: int) -> LaunchSpec:
    """A launch over rows, with the flags of its kernel."""
    return LaunchSpec.of(choose(RowShape(width=width, itemsize=itemsize, device=device)), flags)


@functools.lru_cache(maxsize=256)
def index_spec(choose: Callable[[Device], Launch], device: Device, flags: tuple[tuple[str, bool], ...] = ()) -> LaunchSpec:
    """A launch over numbers, with the flags of its kernel."""
    return LaunchSpec.of(choose(device), dict(flags))
