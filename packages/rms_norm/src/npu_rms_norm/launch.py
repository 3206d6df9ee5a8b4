"""From tensors to kernel launches: how the rows lie, tiling, allocation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from npu_tiling import Device, Kernels, Recipe, RowLayout, launch_with_fallback, row_layout
from torch import Tensor

from . import tiling

KERNELS = Kernels(__package__, "npu-rms-norm")


def allocate(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for a result or a workspace, contiguous, on the device of `like`."""
    return like.new_empty(shape, dtype=dtype)


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
    inputs, rows = follow_rows(x, residual)
    weight = None if weight is None else weight.contiguous()
    others = _dtypes(y, weight, total, rstd)
    recipe = choose_recipe(tiling.forward_launch, rows, x.shape[-1], _dtypes(*inputs), others, y.dtype, casting_mode, device)
    tensors = (*inputs, weight, y, total, rstd)
    scalars = (rows.n_outer, rows.n_inner, *rows.strides[0], *rows.strides[1], eps, offset)

    def run(recipe: Recipe) -> None:
        kernel = "forward_wide_kernel" if recipe.launch.wide else "forward_kernel"
        KERNELS.launch("kernels", kernel, recipe, recipe.launch.grid, tensors, scalars)

    launch_with_fallback("rms_norm forward", recipe, run, _smaller)
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
    (p_dy, p_dsum, p_x, p_dx), rows = follow_rows(dy, dsum, x, dx)
    weight, rstd = None if weight is None else weight.contiguous(), rstd.contiguous()
    strides = [number for pair in rows.strides for number in pair]
    read, others = _dtypes(dy, dsum, x), _dtypes(dx, weight, dweight)
    recipe = choose_recipe(tiling.backward_launch, rows, width, read, others, dy.dtype, casting_mode, device)

    def run(recipe: Recipe) -> Tensor | None:
        launch = recipe.launch
        partials = None
        if dweight is not None:
            partials = allocate(dy, (launch.splits, width), torch.float32)
        if not launch.wide:
            tensors = (p_dy, p_dsum, p_x, weight, rstd, p_dx, partials)
            scalars = (rows.n_outer, rows.n_inner, *strides, offset)
            KERNELS.launch("kernels_backward", "backward_kernel", recipe, launch.grid, tensors, scalars)
            return partials
        mean = None
        if dx is not None:
            mean = allocate(dy, rstd.shape, torch.float32)
            scalars = (rows.n_outer, rows.n_inner, *rows.strides[0], *rows.strides[2], offset)
            read = (p_dy, p_x, weight, rstd, mean)
            KERNELS.launch("kernels_backward", "backward_wide_mean_kernel", recipe, launch.grid, read, scalars)
        every = (p_dy, p_dsum, p_x, weight, rstd, mean, p_dx, partials)
        scalars = (rows.n_outer, rows.n_inner, launch.splits, *strides, offset)
        KERNELS.launch("kernels_backward", "backward_wide_kernel", recipe, launch.column_grid, every, scalars)
        return partials

    partials = launch_with_fallback("rms_norm backward", recipe, run, _smaller)
    if partials is not None and dweight is not None:
        recipe = _sum_recipe(width, dweight.dtype, device)
        tensors = (partials, dweight)
        KERNELS.launch("kernels_backward", "sum_partials_kernel", recipe, recipe.launch.grid, tensors, (partials.shape[0],))
    return dweight


def follow_rows(*tensors: Tensor | None) -> tuple[Sequence[Tensor | None], RowLayout]:
    """The tensors, copied only if their rows take more than two levels, and the layout with (0, 0) for each None."""
    present = [tensor for tensor in tensors if tensor is not None]
    layout = row_layout(*present)
    if layout is None:
        # A tensor that is written to (dx) is contiguous, or it is dy itself and so in `present` twice.
        tensors = tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)
        layout = row_layout(*(tensor for tensor in tensors if tensor is not None))
        assert layout is not None
    if len(present) < len(tensors):
        strides = iter(layout.strides)
        layout = layout._replace(strides=tuple((0, 0) if tensor is None else next(strides) for tensor in tensors))
    return tensors, layout


def _dtypes(*tensors: Tensor | None) -> tuple[torch.dtype | None, ...]:
    return tuple([None if tensor is None else tensor.dtype for tensor in tensors])


@functools.lru_cache(maxsize=4096)
def choose_recipe(
    choose: Callable[[tiling.Problem, Device], tiling.Launch],
    rows: RowLayout,
    width: int,
    read: tuple[torch.dtype | None, ...],
    others: tuple[torch.dtype | None, ...],
    y_dtype: torch.dtype,
    casting_mode: str,
    device: Device,
) -> Recipe:
    """The launch for tensors of rows with dtypes `read`, and `others`, of which the first is the result's."""
    itemsizes = tuple(dtype.itemsize for dtype in read if dtype is not None)
    outer_stride, inner_stride = (max(strides) for strides in zip(*rows.strides, strict=True))
    narrow = any(dtype is not None and dtype.itemsize < tiling.FP32 for dtype in (*read, others[0]))
    problem = tiling.Problem(rows.n_outer, rows.n_inner, width, inner_stride, outer_stride, itemsizes, narrow)
    rounds = y_dtype.itemsize < tiling.FP32 and casting_mode != "gemma"
    modes = {"ROUND_NORMALISED": rounds, "ROUND_FACTORS": rounds and casting_mode == "none"}
    # The JIT compiles another kernel for strides of 1, for multiples of 16 and for numbers past 32 bits.
    kinds = tuple((stride == 1, stride % 16 == 0, stride >= 2**31) for pair in rows.strides for stride in pair)
    large = (rows.n_outer >= 2**31, rows.n_inner >= 2**31)
    return Recipe.of(choose(problem, device), modes, (read, others, kinds, large))


@functools.lru_cache(maxsize=4096)
def _sum_recipe(width: int, dtype: torch.dtype, device: Device) -> Recipe:
    return Recipe.of(tiling.sum_launch(width, device), {}, (dtype,))


def _smaller(recipe: Recipe) -> Recipe | None:
    return recipe.smaller(tiling.smaller)
