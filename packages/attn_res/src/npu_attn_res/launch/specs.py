"""The tiling of a launch, cached by its shape, and the widest of several dtypes."""

from __future__ import annotations

import functools
from math import ceil
from operator import attrgetter
from typing import Any

import torch
from npu_tiling import Device, Kernels, LaunchSpec
from npu_tiling.budget.arithmetic import power_of_two

from .. import tiling
from ..shape import Shape, Task

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-attn-res")

_ITEMSIZE = attrgetter("itemsize")


@functools.lru_cache(maxsize=4096)
def launch_spec(
    device: Device, task: Task, width: int, dtype: torch.dtype, *, n_sources: int | None = None, **options: Any
) -> LaunchSpec | None:
    """The launch of a `Shape`, whose fields these are; None where it takes whole rows and none fit."""
    on_chip = 0 if n_sources is None else sources_on_chip(n_sources, device)
    chosen = tiling.choose(Shape(task=task, width=width, itemsize=dtype.itemsize, n_sources=on_chip, **options), device)
    return None if chosen is None else LaunchSpec.of(chosen, {})


def sources_on_chip(n_sources: int, device: Device) -> int:
    """`Shape.n_sources`: tilings for CUDA depend on it, up to a power of two, or an eighth of one."""
    if device.kind != "cuda":
        return 0
    step = max(1, power_of_two(max(1, n_sources)) // 8)
    return ceil(n_sources / step) * step if n_sources > 8 else power_of_two(max(1, n_sources))


def widest(*dtypes: torch.dtype) -> torch.dtype:
    """The one with the largest elements, which a tile is sized for."""
    return max(dtypes, key=_ITEMSIZE)
