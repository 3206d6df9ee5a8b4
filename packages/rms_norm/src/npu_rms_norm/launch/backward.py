"""The launches of the backward: gradients of rows, and the parameters' from partial sums."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.launching.partials import add_partials
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from ..tiling import smaller
from .arguments import KERNELS, contiguous_or_none, dtype_of, dtypes_of, offset_argument
from .plan import Call, Plan, plan_rows
from .rstd import by_head, has_heads


def launch_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
    rounded_to: torch.dtype,
    *,
    dx: Tensor | None,
    dgate: Tensor | None,
    need_dweight: bool,
    need_dbias: bool,
    device: Device,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes the gradients of x, to `dx`, which may be dy itself, and of the gate, to `dgate`; returns the parameters'.

    None stands for a gradient that is not needed; where x is gated, the gate's gradient takes that of x.
    """
    needed = [parameter if need else None for parameter, need in ((weight, need_dweight), (bias, need_dbias))]
    gradients = [
        None if parameter is None else allocate(parameter, parameter.shape, parameter.dtype) for parameter in needed
    ]
    dweight, dbias = gradients
    if not dy.numel():
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        return dweight, dbias
    per_head = has_heads(weight, bias)
    weight, bias, rstd = contiguous_or_none(weight), contiguous_or_none(bias), by_head(rstd, per_head)
    added = offset_argument(offset, weight, bias, device)
    call = Call(
        backward=True,
        device=device,
        read=dtypes_of(dy, dsum, x, gate),
        result=dtype_of(dx),
        rounded_to=rounded_to,
        weight=dtype_of(weight),
        casting_mode=casting_mode,
        activation="" if gate is None else activation,
        gate_first=gate is not None and not norm_before_gate,
        second_output=False,
        per_head=per_head,
        biased=bias is not None,
        adds_offset=added is not None,
    )
    (*read, dx), plan = plan_rows((dy, dsum, x, gate, dx), call)

    def run(spec: LaunchSpec) -> list[Tensor | None]:
        tiling = spec.launch
        sums = gradients
        if not tiling.stores_sums:
            splits = tiling.splits // tiling.heads
            sums = [None if each is None else allocate(dy, (splits, each.numel()), torch.float32) for each in gradients]
        tensors = (*read, weight, bias, rstd)
        if tiling.kernel == "rows":
            scalars = (*plan.rows, *plan.strides, added)
            arguments = (*tensors, dx, dgate, *sums)
            KERNELS.launch(f"{device.kind}.backward", "backward_kernel", spec, tiling.grid, arguments, scalars)
        elif tiling.kernel == "shared":
            words = allocate(dy, (rstd.numel() * tiling.share,), torch.int64).zero_()
            scalars = (*plan.rows, *plan.strides[:6], *plan.strides[8:], added)  # without the gate's
            arguments = (*read[:3], weight, rstd, dx, sums[0], words)
            KERNELS.launch("cuda.backward_shared", "backward_shared_kernel", spec, tiling.grid, arguments, scalars)
        else:
            mean = None if dx is None else _launch_mean(read, weight, rstd, plan, spec, added)
            scalars = (*plan.rows, tiling.splits, *plan.strides, added)
            arguments = (*tensors, mean, dx, dgate, *sums)
            KERNELS.launch("both.backward_wide", "backward_wide_kernel", spec, tiling.column_grid, arguments, scalars)
        return sums

    sums = launch_with_fallback("rms_norm backward", plan.spec, run, smaller)
    for gradient, partials in zip(gradients, sums, strict=True):
        if gradient is not None and partials is not None and partials is not gradient:
            add_partials(partials, gradient, device)
    return dweight, dbias


def _launch_mean(
    read: list[Tensor | None], weight: Tensor | None, rstd: Tensor, plan: Plan, spec: LaunchSpec, added: float | None
) -> Tensor:
    """fp32 [rows]: mean(g n)."""
    dy, _, x, gate = read
    mean = allocate(rstd, rstd.shape, torch.float32)
    scalars = (*plan.rows, *plan.strides[0:2], *plan.strides[4:8], added)  # without dsum's and dx's
    arguments = (dy, x, gate, weight, rstd, mean)
    KERNELS.launch("both.backward_wide", "backward_wide_mean_kernel", spec, spec.launch.grid, arguments, scalars)
    return mean
