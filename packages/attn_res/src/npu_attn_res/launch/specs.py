"""Looking up the tiling of a launch, once for equal shapes, and launching it, or a smaller one that the compiler takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import ceil
from operator import attrgetter
from typing import Any

import torch
from npu_tiling import Device, Kernels, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.launching.partials import choose_sum
from npu_tiling.pytorch.tensors import allocate_like
from torch import Tensor

from .. import tiling
from ..both.tiling import Tiling
from ..reference import Weights
from ..shape import Shape, Task

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-attn-res")

_ITEMSIZE = attrgetter("itemsize")

Arguments = tuple[Sequence[Any], tuple[int | float, ...]]  # of a kernel: tensors, and numbers


@functools.lru_cache(maxsize=4096)
def launch_spec(
    device: Device, task: Task, width: int, dtype: torch.dtype, *, n_sources: int | None = None, **options: Any
) -> LaunchSpec | None:
    """The launch of a `Shape`, whose fields these are; None where it takes whole rows and none fit."""
    on_chip = 0 if n_sources is None else sources_on_chip(n_sources, device)
    chosen = tiling.choose(Shape(task=task, width=width, itemsize=dtype.itemsize, n_sources=on_chip, **options), device)
    return None if chosen is None else LaunchSpec.of(chosen, {})


@functools.lru_cache(maxsize=4096)
def _weights_spec(width: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(choose_sum(width, device), {})


def run_rows(spec: LaunchSpec | None, n_tokens: int, arguments: Callable[[Any, int], Arguments]) -> bool:
    """Launch a kernel for whole rows with its arguments for a tiling and its grid; False where whole rows do not fit."""

    def run(spec: LaunchSpec) -> bool:
        chosen: Tiling = spec.launch
        if chosen.has_whole_rows:
            grid = chosen.grid(n_tokens)
            module, name, _ = chosen.kernel
            KERNELS.launch(module, name, spec, grid, *arguments(chosen, grid))
        return chosen.has_whole_rows

    return spec is not None and launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller)


def run_columns(spec: LaunchSpec | None, arguments: Callable[[Tiling], tuple[int, Arguments]]) -> None:
    """Launch a kernel that takes blocks of columns, with its grid and arguments for a tiling."""
    assert spec is not None

    def run(spec: LaunchSpec) -> None:
        module, name, _ = spec.launch.kernel
        grid, (tensors, scalars) = arguments(spec.launch)
        KERNELS.launch(module, name, spec, grid, tensors, scalars)

    launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller)


def weights_gradient(
    partials: Tensor | None, weights: Weights, needed: tuple[bool, bool], device: Device
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of query and rms_weight, where needed, from partial sums of dg [n, D]."""
    if partials is None:
        return None, None
    query, norm, _ = weights
    dquery = allocate_like(query) if needed[0] else None
    dnorm = allocate_like(norm) if needed[1] else None
    n_partials, width = partials.shape
    spec = _weights_spec(width, device)
    tensors = (partials, query, norm, dquery, dnorm)
    KERNELS.launch("both.weights", "attn_res_add_partials_kernel", spec, spec.launch.grid, tensors, (n_partials,))
    return dquery, dnorm


def sources_on_chip(n_sources: int, device: Device) -> int:
    """`Shape.n_sources`: tilings for CUDA depend on it, up to a power of two, or an eighth of one."""
    if device.kind != "cuda":
        return 0
    step = max(1, power_of_two(max(1, n_sources)) // 8)
    return ceil(n_sources / step) * step if n_sources > 8 else power_of_two(max(1, n_sources))


def widest(*tensors: Tensor | None) -> torch.dtype:
    """The dtype with the largest elements, which a tile is sized for."""
    return max([tensor.dtype for tensor in tensors if tensor is not None], key=_ITEMSIZE)


def contiguous_weights(weights: Weights) -> Weights:
    """The weights, copied where they are not contiguous."""
    query, norm, output = weights
    if query.is_contiguous() and norm.is_contiguous() and (output is None or output.is_contiguous()):  # usually
        return weights
    return Weights(query.contiguous(), norm.contiguous(), None if output is None else output.contiguous())
