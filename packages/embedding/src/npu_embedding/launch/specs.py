"""The package's kernels, and what launches of them ask for: chosen once, then looked up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from npu_tiling import Device, Kernels, LaunchSpec
from torch import Tensor

from ..both.tiling import IndexLaunch
from ..shape import RowShape

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-embedding")


def dense_rows(rows: Tensor) -> Tensor:
    """The tensor [n, D], copied only if the elements of a row are not next to each other."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@functools.lru_cache(maxsize=4096)
def row_spec(
    choose: Callable[[RowShape], Any], width: int, itemsize: int, device: Device, flag: str = "", value: int = 0
) -> LaunchSpec:
    """A launch over rows, with a flag of its kernel."""
    return LaunchSpec.of(choose(RowShape(width=width, itemsize=itemsize, device=device)), {flag: value} if flag else {})


@functools.lru_cache(maxsize=256)
def index_spec(choose: Callable[[Device], IndexLaunch], device: Device, flag: str = "", value: bool = False) -> LaunchSpec:
    """A launch over numbers, with a flag of its kernel."""
    return LaunchSpec.of(choose(device), {flag: value} if flag else {})
