"""The package's kernels, what launches of them ask for, and a gradient that is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from npu_tiling import Device, Kernels, LaunchSpec
from torch import Tensor

from ..both.tiling import Launch
from ..shape import RowShape

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-embedding")


class Gradient(NamedTuple):
    """A gradient that is asked for.

    Attributes:
        dy: [n, D], the elements of a row next to each other.
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
    def numbers(self) -> tuple[int, int, int, int]:
        """What kernels that read indices ask for."""
        return self.indices.numel(), self.n_rows, self.first_row, self.padding


def dense_rows(rows: Tensor) -> Tensor:
    """The tensor [n, D], copied only if the elements of a row are not next to each other."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@functools.lru_cache(maxsize=4096)
def row_spec(
    choose: Callable[[RowShape], Launch], width: int, itemsize: int, device: Device, flag: str, value: int
) -> LaunchSpec:
    """A launch over rows, with a flag of its kernel."""
    return LaunchSpec.of(choose(RowShape(width=width, itemsize=itemsize, device=device)), {flag: value})


@functools.lru_cache(maxsize=256)
def index_spec(choose: Callable[[Device], Launch], device: Device, flag: str = "", value: bool = False) -> LaunchSpec:
    """A launch over numbers, with a flag of its kernel."""
    return LaunchSpec.of(choose(device), {flag: value} if flag else {})
