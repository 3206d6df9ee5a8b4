"""The package's kernels, and what launches of them ask for."""

from __future__ import annotations

import functools
from collections.abc import Callable

from npu_tiling import Device, Kernels, LaunchSpec
from torch import Tensor

from .. import tiling

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-embedding")


def rows_side_by_side(rows: Tensor) -> Tensor:
    """The tensor [n, D], copied only if the elements of a row are not next to each other."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@functools.lru_cache(maxsize=4096)
def spec_of(
    choose: Callable[[int, int, Device], tiling.Launch],
    width: int,
    itemsize: int,
    device: Device,
    flags: tuple[tuple[str, int], ...],
) -> LaunchSpec:
    return LaunchSpec.of(choose(width, itemsize, device), dict(flags))


@functools.lru_cache(maxsize=256)
def index_spec(
    choose: Callable[[Device], tiling.IndexLaunch], device: Device, flags: tuple[tuple[str, int], ...] = ()
) -> LaunchSpec:
    return LaunchSpec.of(choose(device), dict(flags))
