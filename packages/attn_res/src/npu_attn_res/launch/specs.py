"""Which launch runs what, remembered for equal shapes; and how a launch is made, where a compiler may refuse its tile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
from npu_tiling import Device, Kernels, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from ..reference import Weights
from ..tiling import Kind

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-attn-res")

Arguments = tuple[Sequence[Any], tuple[int | float, ...]]  # of a kernel: tensors, and numbers


@functools.lru_cache(maxsize=4096)
def row_spec(
    kind: Kind,
    width: int,
    dtype: torch.dtype,
    row_stride: int,
    device: Device,
    layers: int = 1,
    n_sources: int = 0,
    aligned: bool | None = None,
    listed: tuple[int, ...] = (),
    by_token: bool | None = None,
) -> LaunchSpec | None:
    """The launch of a kernel for whole rows, see `tiling.Problem`; None where none fit.

    Args:
        aligned: None for no sources.
        listed: on CUDA, of the sources, and of their gradients, how many are arguments of the kernel.
        by_token: whether a forward of one layer stores statistics [tokens, sources]; None for other kernels, and on CUDA.
    """
    problem = tiling.Problem(kind, width, dtype.itemsize, layers, row_stride, n_sources)
    launch = tiling.row_launch(problem, device)
    flags: dict[str, int] = {} if aligned is None else {"ALIGNED": aligned}
    flags |= zip(("LISTED", "LISTED_GRADIENTS"), listed, strict=False)
    if by_token is not None:
        flags["BY_TOKEN"] = by_token
    return None if launch is None else LaunchSpec.of(launch, flags)


@functools.lru_cache(maxsize=4096)
def column_spec(
    kind: Kind, width: int, dtype: torch.dtype, row_stride: int, device: Device, layers: int, aligned: bool
) -> LaunchSpec:
    """The launch of a kernel that takes blocks of columns."""
    problem = tiling.Problem(kind, width, dtype.itemsize, layers, row_stride)
    return LaunchSpec.of(tiling.columns_launch(problem, device), {"ALIGNED": aligned})


@functools.lru_cache(maxsize=4096)
def _weights_spec(width: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.weights_launch(width, device), {})


def run_rows(spec: LaunchSpec | None, n_tokens: int, arguments: Callable[[tiling.Launch, int], Arguments]) -> bool:
    """Launch a kernel for whole rows with its arguments for a launch and its grid; False where whole rows do not fit."""

    def run(spec: LaunchSpec) -> bool:
        launch = spec.launch
        if launch.whole_rows:
            grid = launch.grid(n_tokens)
            module, name, _ = launch.kernel
            KERNELS.launch(module, name, spec, grid, *arguments(launch, grid))
        return launch.whole_rows

    return spec is not None and launch_with_fallback("attn_res " + spec.launch.problem.kind, spec, run, tiling.smaller)


def run_columns(spec: LaunchSpec, arguments: Callable[[tiling.Launch], tuple[int, Arguments]]) -> None:
    """Launch a kernel that takes blocks of columns, with its grid and arguments for a launch."""

    def run(spec: LaunchSpec) -> None:
        module, name, _ = spec.launch.kernel
        grid, (tensors, scalars) = arguments(spec.launch)
        KERNELS.launch(module, name, spec, grid, tensors, scalars)

    launch_with_fallback("attn_res " + spec.launch.problem.kind, spec, run, tiling.smaller)


def weights_gradient(
    partials: Tensor | None, weights: Weights, needed: tuple[bool, bool], device: Device
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of query and rms_weight, where needed, from partial sums of dg [n, D]."""
    if partials is None:
        return None, None
    query, norm, _ = weights
    dquery = allocate(query, query.shape, query.dtype) if needed[0] else None
    dnorm = allocate(norm, norm.shape, norm.dtype) if needed[1] else None
    n_partials, width = partials.shape
    spec = _weights_spec(width, device)
    tensors = (partials, query, norm, dquery, dnorm)
    KERNELS.launch("both.weights", "attn_res_weights_kernel", spec, spec.launch.grid, tensors, (n_partials,))
    return dquery, dnorm


def sources_on_chip(n_sources: int, device: Device) -> int:
    """`n_sources` of a `row_spec`: tilings for CUDA depend on it, up to a power of two, or an eighth of one."""
    if device.kind != "cuda":
        return 0
    step = max(1, power_of_two(max(1, n_sources)) // 8)
    return ceil(n_sources / step) * step if n_sources > 8 else power_of_two(max(1, n_sources))


def widest(*tensors: Tensor | None) -> torch.dtype:
    """The dtype with the largest elements, which a tile is sized for."""
    return max((one.dtype for one in tensors if one is not None), key=lambda dtype: dtype.itemsize)


def contiguous_weights(weights: Weights) -> Weights:
    """The weights as kernels read them."""
    query, norm, output = weights
    if query.is_contiguous() and norm.is_contiguous() and (output is None or output.is_contiguous()):  # most are
        return weights
    return Weights(query.contiguous(), norm.contiguous(), None if output is None else output.contiguous())
