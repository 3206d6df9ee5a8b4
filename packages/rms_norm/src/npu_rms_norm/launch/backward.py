"""The launches of the backward: gradients of rows, and the parameters' from partial sums."""

from __future__ import annotations

import functools

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from .arguments import KERNELS, Gate, contiguous_or_none, dtypes_of, offset_argument
from .plan import Call, plan_strided_rows
from .rstd import by_head, has_heads

_KERNELS = {
    "rows": ("kernels.backward", "backward_kernel"),
    "chunks": ("kernels.backward_chunks", "backward_chunks_kernel"),
}


def launch_backward(
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
    weight, bias, rstd = contiguous_or_none(weight), contiguous_or_none(bias), by_head(rstd, per_head)
    added = offset_argument(offset, weight, bias, device)
    values, gating = (None, None) if gate is None else (gate.values, gate[1:])
    read, result = dtypes_of(dy, dsum, x, values), None if dx is None else dx.dtype
    call = Call(read, result, rounded_to, casting_mode, gating, False, per_head, bias is not None)
    moved, plan = plan_strided_rows((dy, dsum, x, values, dx), tiling.backward_launch, call, device)
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
            module, kernel = _KERNELS[launch.form]
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


@functools.lru_cache(maxsize=4096)
def _sum_spec(width: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.sum_launch(width, device), {})
