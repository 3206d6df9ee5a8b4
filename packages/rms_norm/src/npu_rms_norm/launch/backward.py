"""The launches of the backward: gradients of rows, and the parameters' from partial sums."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.launching.partials import add_partials
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from ..calls import Backward
from ..tiling import smaller
from .plan import KERNELS, Plan, contiguous, plan_backward, writes_dx
from .rstd import by_head


def launch_backward(call: Backward, device: Device, into: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """dx, dgate, dweight and dbias, None for each that is not needed. dx is written to `into`, which may be dy."""
    dy, dsum, x, gate, weight, bias, rstd = call[:7]
    dx = allocate_like(x) if into is None and writes_dx(call) else into
    dgate = allocate_like(gate) if call.need_dgate and gate is not None else None
    dweight = allocate_like(weight) if call.need_dweight and weight is not None else None
    dbias = allocate_like(bias) if call.need_dbias and bias is not None else None
    results = (dx if call.need_dx else None, dgate, dweight, dbias)
    if not dy.numel():
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
        return results
    plan = plan_backward(call, into, device)
    if into is not None and plan.copies:
        if into is not dy and not dy.is_contiguous():
            return launch_backward(call._replace(dy=dy.contiguous()), device, into)
        dx, *others = launch_backward(call, device)
        assert dx is not None
        return into.copy_(dx), *others
    read = contiguous(dy, dsum, x, gate) if plan.copies else (dy, dsum, x, gate)
    weight, bias = contiguous(weight, bias)
    rstd = by_head(rstd, plan.per_head)

    def run(spec: LaunchSpec) -> tuple[Tensor | None, Tensor | None]:
        tiling = spec.launch
        sums = (dweight, dbias)
        if not tiling.stores_sums:
            splits = tiling.splits // tiling.heads
            sums = (_partials(dweight, splits), _partials(dbias, splits))
        if tiling.kernel == "rows":
            scalars = (*plan.rows, *plan.strides, plan.offset)
            arguments: tuple[Any, ...] = (*read, weight, bias, rstd, dx, dgate, *sums)
            KERNELS.launch(f"{device.kind}.backward", "backward_kernel", spec, tiling.grid, arguments, scalars)
        elif tiling.kernel == "shared":
            words = allocate(dy, (rstd.numel() * tiling.share,), torch.int64).zero_()
            scalars = (*plan.rows, *plan.strides[:6], *plan.strides[8:], plan.offset)  # without the gate's
            arguments = (*read[:3], weight, rstd, dx, sums[0], words)
            KERNELS.launch("cuda.backward_shared", "backward_shared_kernel", spec, tiling.grid, arguments, scalars)
        else:
            mean = None if dx is None else _launch_mean(read, weight, rstd, plan, spec)
            scalars = (*plan.rows, tiling.splits, *plan.strides, plan.offset)
            arguments = (*read, weight, bias, rstd, mean, dx, dgate, *sums)
            KERNELS.launch("both.backward_wide", "backward_wide_kernel", spec, tiling.column_grid, arguments, scalars)
        return sums

    sums = launch_with_fallback("rms_norm backward", plan.spec, run, smaller)
    for gradient, partials in zip((dweight, dbias), sums, strict=True):
        if gradient is not None and partials is not None and partials is not gradient:
            add_partials(partials, gradient, device)
    return results


def _partials(gradient: Tensor | None, splits: int) -> Tensor | None:
    """[splits, D], or [splits, H D]"""
    return None if gradient is None else allocate(gradient, (splits, gradient.numel()), torch.float32)


def _launch_mean(
    read: tuple[Tensor | None, ...], weight: Tensor | None, rstd: Tensor, plan: Plan, spec: LaunchSpec
) -> Tensor:
    """fp32 [rows]: mean(g n)."""
    dy, _, x, gate = read
    mean = allocate(rstd, rstd.shape, torch.float32)
    scalars = (*plan.rows, *plan.strides[0:2], *plan.strides[4:8], plan.offset)  # without dsum's and dx's
    arguments = (dy, x, gate, weight, rstd, mean)
    KERNELS.launch("both.backward_wide", "backward_wide_mean_kernel", spec, spec.launch.grid, arguments, scalars)
    return mean
