"""From tensors to kernel launches: how the rows lie, tiling, allocation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from npu_tiling import Device, Kernels, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import FP32
from npu_tiling.pytorch.rows import layout_of
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from . import tiling

KERNELS = Kernels(__package__, "npu-rms-norm")


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    save_rstd: bool,
    device: Device,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y, x + residual (None without a residual) and rstd (None unless `save_rstd`)."""
    y = allocate(x, x.shape, x.dtype)
    total = None if residual is None else allocate(x, x.shape, residual.dtype)
    rstd = allocate(x, x.shape[:-1], torch.float32) if save_rstd else None
    if not y.numel():
        return y, total, rstd
    weight = None if weight is None else weight.contiguous()
    read = _dtypes(x, residual)
    inputs, plan = plan_strided_rows((x, residual), tiling.forward_launch, read, y.dtype, y.dtype, casting_mode, device)
    tensors = (*inputs, weight, y, total, rstd)
    scalars = (*plan.rows, *plan.strides, eps, offset)

    def run(spec: LaunchSpec) -> None:
        kernel = "forward_wide_kernel" if spec.launch.wide else "forward_kernel"
        KERNELS.launch("kernels.forward", kernel, spec, spec.launch.grid, tensors, scalars)

    launch_with_fallback("rms_norm forward", plan.spec, run, tiling.smaller)
    return y, total, rstd


def backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    dx: Tensor | None,
    need_dweight: bool,
    device: Device,
) -> Tensor | None:
    """Writes the gradient of x to `dx`, which may be dy itself (None: not needed), and returns that of the weight."""
    dweight = allocate(weight, weight.shape, weight.dtype) if need_dweight and weight is not None else None
    if not dy.numel():
        return None if dweight is None else dweight.zero_()
    width = x.shape[-1]
    weight, rstd = None if weight is None else weight.contiguous(), rstd.contiguous()
    read, result = _dtypes(dy, dsum, x), None if dx is None else dx.dtype
    moved, plan = plan_strided_rows((dy, dsum, x, dx), tiling.backward_launch, read, result, dy.dtype, casting_mode, device)
    p_dy, p_dsum, p_x, p_dx = moved

    def run(spec: LaunchSpec) -> Tensor | None:
        launch = spec.launch
        partials = dweight
        if dweight is not None and (launch.splits > 1 or device.kind != "cuda"):
            partials = allocate(dy, (launch.splits, width), torch.float32)
        if not launch.wide:
            tensors = (p_dy, p_dsum, p_x, weight, rstd, p_dx, partials)
            scalars = (*plan.rows, *plan.strides, offset)
            KERNELS.launch("kernels.backward", "backward_kernel", spec, launch.grid, tensors, scalars)
            return partials
        mean = None
        if dx is not None:
            mean = allocate(dy, rstd.shape, torch.float32)
            scalars = (*plan.rows, *plan.strides[0:2], *plan.strides[4:6], offset)  # of dy and x
            read = (p_dy, p_x, weight, rstd, mean)
            KERNELS.launch("kernels.backward", "backward_wide_mean_kernel", spec, launch.grid, read, scalars)
        every = (p_dy, p_dsum, p_x, weight, rstd, mean, p_dx, partials)
        scalars = (*plan.rows, launch.splits, *plan.strides, offset)
        KERNELS.launch("kernels.backward", "backward_wide_kernel", spec, launch.column_grid, every, scalars)
        return partials

    partials = launch_with_fallback("rms_norm backward", plan.spec, run, tiling.smaller)
    if dweight is not None and partials is not None and partials is not dweight:
        spec = _sum_spec(width, device)
        tensors = (partials, dweight)
        KERNELS.launch("kernels.backward", "sum_partials_kernel", spec, spec.launch.grid, tensors, (partials.shape[0],))
    return dweight


class Plan(NamedTuple):
    """All of a launch that follows from shapes, strides and dtypes: looked up at once in every call but the first.

    Attributes:
        spec: the tiling and what is compiled for it.
        rows: groups of rows, and rows of a group.
        strides: two for each tensor of rows, 0 for each None.
    """

    spec: LaunchSpec
    rows: tuple[int, int]
    strides: tuple[int, ...]


def plan_strided_rows(
    tensors: tuple[Tensor | None, ...],
    choose: Callable[[tiling.Problem, Device], tiling.Launch],
    read: tuple[torch.dtype | None, ...],
    result: torch.dtype | None,
    y_dtype: torch.dtype,
    casting_mode: str,
    device: Device,
) -> tuple[tuple[Tensor | None, ...], Plan]:
    """The tensors of rows, copied only if their rows take more than two levels, and the plan; as `choose_plan`."""
    options = (read, result, y_dtype, casting_mode, device)
    plan = choose_plan(choose, *_geometry(tensors), *options)
    if plan is None:
        # A tensor that is written to (dx) is contiguous, or it is dy itself and so among them twice.
        tensors = tuple([None if tensor is None else tensor.contiguous() for tensor in tensors])
        plan = choose_plan(choose, *_geometry(tensors), *options)
        assert plan is not None
    return tensors, plan


def _geometry(tensors: tuple[Tensor | None, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...] | None, ...]]:
    assert tensors[0] is not None
    return tensors[0].shape, tuple([None if tensor is None else tensor.stride() for tensor in tensors])


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


@functools.lru_cache(maxsize=4096)
def choose_plan(
    choose: Callable[[tiling.Problem, Device], tiling.Launch],
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...] | None, ...],
    read: tuple[torch.dtype | None, ...],
    result: torch.dtype | None,
    y_dtype: torch.dtype,
    casting_mode: str,
    device: Device,
) -> Plan | None:
    """The plan for tensors of rows with these strides, inputs with dtypes `read`, and the result's.

    Returns:
        None where a tensor must be copied first.
    """
    rows = layout_of(shape, [own for own in strides if own is not None])
    if rows is None:
        return None
    found = iter(rows.strides)
    pairs = [(0, 0) if own is None else next(found) for own in strides]
    itemsizes = tuple(dtype.itemsize for dtype in read if dtype is not None)
    outer_stride, inner_stride = (max(own) for own in zip(*pairs, strict=True))
    narrow = any(dtype is not None and dtype.itemsize < FP32 for dtype in (*read, result))
    rounds = y_dtype.itemsize < FP32 and casting_mode != "gemma"
    factors = rounds and casting_mode == "none"
    problem = tiling.Problem(rows.n_outer, rows.n_inner, shape[-1], inner_stride, outer_stride, itemsizes, narrow, factors)
    flags = {"ROUND_NORMALISED": rounds, "ROUND_FACTORS": factors}
    strided = tuple(stride for pair in pairs for stride in pair)
    return Plan(LaunchSpec.of(choose(problem, device), flags), (rows.n_outer, rows.n_inner), strided)


@functools.lru_cache(maxsize=4096)
def _sum_spec(width: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.sum_launch(width, device), {})
