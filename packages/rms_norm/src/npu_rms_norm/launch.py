"""From tensors to kernel launches: how the rows lie, tiling, allocation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from npu_tiling import Device, Kernels, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import FP32
from npu_tiling.pytorch.rows import RowLayout, layout_of
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from . import tiling

KERNELS = Kernels(__package__, "npu-rms-norm")
_FORWARD = {
    "rows": ("kernels.forward", "forward_kernel"),
    "chunks": ("kernels.chunks", "forward_chunks_kernel"),
    "wide": ("kernels.forward", "forward_wide_kernel"),
}
_BACKWARD = {"rows": ("kernels.backward", "backward_kernel"), "chunks": ("kernels.chunks", "backward_chunks_kernel")}


class Gate(NamedTuple):
    """A gate and what is done with it.

    Attributes:
        values: [..., D].
        silu: act is silu, else the sigmoid.
        first: x is gated, else the weighted result is.
    """

    values: Tensor
    silu: bool
    first: bool


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Gate | None,
    eps: float,
    offset: float,
    casting_mode: str,
    dtype: torch.dtype,
    return_fp32: bool,
    save_rstd: bool,
    device: Device,
) -> Results:
    """y in `dtype`, of one byte quantised, and what else is asked for."""
    y = allocate(x, x.shape, dtype)
    fp32 = allocate(x, x.shape, torch.float32) if return_fp32 else None
    total = None if residual is None else allocate(x, x.shape, residual.dtype)
    per_head = has_heads(weight, bias)
    rstd = allocate_rstd(x, per_head, torch.float32) if save_rstd else None
    scale = allocate_rstd(x, per_head, torch.float32) if dtype.itemsize == 1 else None
    results = Results(y, fp32, total, rstd, scale)
    if not y.numel():
        return results
    weight, bias = _contiguous(weight), _contiguous(bias)
    values, gating = (None, None) if gate is None else (gate.values, gate[1:])
    second_output, read = return_fp32 or dtype != x.dtype, _dtypes(x, residual, values)
    options = (y.dtype, x.dtype, casting_mode, gating, second_output, per_head, bias is not None, device)
    (p_x, p_residual, p_gate), plan = plan_strided_rows((x, residual, values), tiling.forward_launch, read, *options)
    tensors = (p_x, p_residual, weight, bias, p_gate, *results)
    scalars = (*plan.rows, *plan.strides, eps, _scalar(offset, weight, bias, device))

    def run(spec: LaunchSpec) -> None:
        module, kernel = _FORWARD[spec.launch.form]
        KERNELS.launch(module, kernel, spec, spec.launch.grid, tensors, scalars)

    launch_with_fallback("rms_norm forward", plan.spec, run, tiling.smaller)
    return results


def backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Gate | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    rounded_to: torch.dtype,
    dx: Tensor | None,
    dgate: Tensor | None,
    need_dweight: bool,
    need_dbias: bool,
    device: Device,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes the gradients of x, to `dx`, which may be dy itself, and of the gate, to `dgate`; returns the parameters'.

    None stands for one that is not needed; where x is gated, that of the gate takes that of x.
    """
    needed = [one if need else None for one, need in ((weight, need_dweight), (bias, need_dbias))]
    dweight, dbias = [None if one is None else allocate(one, one.shape, one.dtype) for one in needed]
    if not dy.numel():
        for empty in (dweight, dbias):
            if empty is not None:
                empty.zero_()
        return dweight, dbias
    per_head = has_heads(weight, bias)
    weight, bias, rstd = _contiguous(weight), _contiguous(bias), by_head(rstd, per_head)
    added = _scalar(offset, weight, bias, device)
    values, gating = (None, None) if gate is None else (gate.values, gate[1:])
    read, result = _dtypes(dy, dsum, x, values), None if dx is None else dx.dtype
    options = (result, rounded_to, casting_mode, gating, False, per_head, bias is not None, device)
    moved, plan = plan_strided_rows((dy, dsum, x, values, dx), tiling.backward_launch, read, *options)
    p_dy, p_dsum, p_x, p_gate, p_dx = moved

    def run(spec: LaunchSpec) -> list[Tensor | None]:
        launch = spec.launch
        partials = [dweight, dbias]
        if launch.splits > launch.heads or device.kind != "cuda":
            splits = launch.splits // launch.heads
            partials = [None if one is None else allocate(dy, (splits, one.numel()), torch.float32) for one in partials]
        if launch.share:  # neither gate nor bias
            slots = allocate(dy, (rstd.numel(), launch.share), torch.int64).zero_()
            shared = (p_dy, p_dsum, p_x, weight, rstd, p_dx, partials[0], slots)
            scalars = (*plan.rows, *plan.strides[0:6], *plan.strides[8:10], added)
            KERNELS.launch("kernels.shared", "backward_shared_kernel", spec, launch.grid, shared, scalars)
            return partials
        if not launch.wide:
            tensors = (p_dy, p_dsum, p_x, weight, bias, p_gate, rstd, p_dx, dgate, *partials)
            scalars = (*plan.rows, *plan.strides, added)
            module, kernel = _BACKWARD[launch.form]
            KERNELS.launch(module, kernel, spec, launch.grid, tensors, scalars)
            return partials
        mean = None
        if dx is not None:
            mean = allocate(dy, rstd.shape, torch.float32)
            scalars = (*plan.rows, *plan.strides[0:2], *plan.strides[4:8], added)  # of dy, x and the gate
            read = (p_dy, p_x, weight, p_gate, rstd, mean)
            KERNELS.launch("kernels.backward_wide", "backward_wide_mean_kernel", spec, launch.grid, read, scalars)
        every = (p_dy, p_dsum, p_x, weight, bias, p_gate, rstd, mean, p_dx, dgate, *partials)
        scalars = (*plan.rows, launch.splits, *plan.strides, added)
        KERNELS.launch("kernels.backward_wide", "backward_wide_kernel", spec, launch.column_grid, every, scalars)
        return partials

    partials = launch_with_fallback("rms_norm backward", plan.spec, run, tiling.smaller)
    for gradient, parts in zip((dweight, dbias), partials, strict=True):
        if gradient is not None and parts is not None and parts is not gradient:
            spec = _sum_spec(gradient.numel(), device)
            tensors = (parts, gradient)
            KERNELS.launch("kernels.backward", "sum_partials_kernel", spec, spec.launch.grid, tensors, (parts.shape[0],))
    return dweight, dbias


def has_heads(weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether each head has parameters of its own."""
    return (weight is not None and weight.dim() == 2) or (bias is not None and bias.dim() == 2)


def allocate_rstd(x: Tensor, per_head: bool, dtype: torch.dtype) -> Tensor:
    """[...], which lies head by head where each has its own parameters: a program stores those of one head."""
    if not per_head:
        return allocate(x, x.shape[:-1], dtype)
    return allocate(x, (x.shape[-2], *x.shape[:-2]), dtype).movedim(0, -1)


def by_head(rstd: Tensor, per_head: bool) -> Tensor:
    """rstd as `allocate_rstd` has it."""
    return rstd.movedim(-1, 0).contiguous().movedim(0, -1) if per_head else rstd.contiguous()


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


class Results(NamedTuple):
    """What the forward writes; None: nobody asked for it.

    Attributes:
        y: [..., D].
        fp32: y, not rounded.
        total: x + residual.
        rstd: [...].
        scale: fp32 [...], of y that is int8 or fp8.
    """

    y: Tensor
    fp32: Tensor | None
    total: Tensor | None
    rstd: Tensor | None
    scale: Tensor | None


def _scalar(offset: float, weight: Tensor | None, bias: Tensor | None, device: Device) -> float | None:
    """The offset as kernels take it: none on CUDA where it is 0, so that products with a weight of 16 bits stay such.

    Not with a bias: such a product would be added to it without being rounded.
    """
    narrow = weight is None or weight.itemsize < FP32
    return None if device.kind == "cuda" and offset == 0.0 and narrow and bias is None else offset


class Plan(NamedTuple):
    """All of a launch that follows from shapes, strides and dtypes: looked up at once in every call but the first.

    Attributes:
        spec: the tiling and what is compiled for it.
        rows: groups of rows, and rows of a group.
        strides: two for each tensor of rows, 0 for each None; on CUDA None where rows lie side by side.
    """

    spec: LaunchSpec
    rows: tuple[int, int]
    strides: tuple[int | None, ...]


def plan_strided_rows(
    tensors: tuple[Tensor | None, ...],
    choose: Callable[[tiling.Problem, Device], tiling.Launch],
    read: tuple[torch.dtype | None, ...],
    result: torch.dtype | None,
    rounded_to: torch.dtype,
    casting_mode: str,
    gating: tuple[bool, bool] | None,
    second_output: bool,
    per_head: bool,
    biased: bool,
    device: Device,
) -> tuple[tuple[Tensor | None, ...], Plan]:
    """The tensors of rows, copied only if their rows take more than two levels, and the plan; as `choose_plan`."""
    options = (read, result, rounded_to, casting_mode, gating, second_output, per_head, biased, device)
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
    rounded_to: torch.dtype,
    casting_mode: str,
    gating: tuple[bool, bool] | None,
    second_output: bool,
    per_head: bool,
    biased: bool,
    device: Device,
) -> Plan | None:
    """The plan for tensors of rows with these strides, inputs with dtypes `read`, the result's, what is rounded on the way,
    a gate's two options, whether y has another dtype than x or is wanted in fp32 too, whether each head has
    its own parameters, and whether there is a bias.

    Returns:
        None where a tensor must be copied first.
    """
    rows = (_layout_by_head if per_head else layout_of)(shape, [own for own in strides if own is not None])
    if rows is None:
        return None
    found = iter(rows.strides)
    pairs = [(0, 0) if own is None else next(found) for own in strides]
    itemsizes = tuple(dtype.itemsize for dtype in read if dtype is not None)
    outer_stride, inner_stride = (max(own) for own in zip(*pairs, strict=True))
    if per_head:  # in results, which are contiguous
        inner_stride = max(inner_stride, rows.n_outer * shape[-1])
    narrow = any(dtype is not None and dtype.itemsize < FP32 for dtype in (*read, result))
    rounds = rounded_to.itemsize < FP32 and casting_mode != "gemma"
    factors = rounds and casting_mode == "none"
    problem = tiling.Problem(
        rows.n_outer,
        rows.n_inner,
        shape[-1],
        inner_stride,
        outer_stride,
        itemsizes,
        narrow,
        factors,
        gating is not None,
        second_output,
        per_head,
        biased,
        result is not None and result.itemsize == 1,
        result is not None,
    )
    silu, first = gating or (False, False)
    rounding = {"ROUND_NORMALISED": rounds, "ROUND_FACTORS": factors, "ROUND_BF16": rounded_to == torch.bfloat16}
    launch = choose(problem, device)
    flags = rounding if launch.share else {**rounding, "GATE_SILU": silu, "GATE_FIRST": first, "PER_HEAD": per_head}
    side_by_side = shape[-1] if device.kind == "cuda" and launch.form in ("rows", "chunks") else None
    strided = tuple(stride for outer, inner in pairs for stride in (outer, None if inner == side_by_side else inner))
    return Plan(LaunchSpec.of(launch, flags), (rows.n_outer, rows.n_inner), strided)


def _layout_by_head(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> RowLayout | None:
    """The layout of tensors [..., H, D] whose groups are heads; None where other rows take more than one level."""
    rows = layout_of((*shape[:-2], shape[-1]), [(*own[:-2], own[-1]) for own in strides])
    if rows is None or rows.n_outer > 1:
        return None
    pairs = tuple((own[-2], inner) for own, (_, inner) in zip(strides, rows.strides, strict=True))
    return RowLayout(shape[-2], rows.n_inner, pairs)


@functools.lru_cache(maxsize=4096)
def _sum_spec(width: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.sum_launch(width, device), {})
