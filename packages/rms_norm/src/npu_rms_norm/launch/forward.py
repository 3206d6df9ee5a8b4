"""The launch of the forward."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from ..calls import Forward
from ..tiling import smaller
from .plan import KERNELS, contiguous, plan_forward
from .rstd import allocate_rstd, has_heads


def launch_forward(call: Forward, device: Device) -> tuple[Tensor | None, ...]:
    """y [..., D] in `dtype`, x + residual, y in fp32, rstd [...] and the scale [...] of a quantised y.

    None of what is not asked for.
    """
    x, residual, gate, weight, bias = call[:5]
    per_head, dtype = has_heads(weight, bias), call.dtype
    y = allocate(x, x.shape, dtype)
    total = None if residual is None else allocate(x, x.shape, residual.dtype)
    fp32 = allocate(x, x.shape, torch.float32) if call.return_fp32 else None
    rstd = allocate_rstd(x, per_head, torch.float32) if call.save_rstd else None
    scale = allocate_rstd(x, per_head, torch.float32) if dtype.itemsize == 1 else None
    if not y.numel():
        return y, total, fp32, rstd, scale
    plan = plan_forward(call, device)
    rows = contiguous(x, residual, gate) if plan.copies else (x, residual, gate)
    tensors = (*rows, *contiguous(weight, bias), y, total, fp32, rstd, scale)
    scalars = (*plan.rows, *plan.strides, call.eps, plan.offset)

    def run(spec: LaunchSpec) -> None:
        tiling = spec.launch
        if tiling.kernel == "wide":
            KERNELS.launch("both.forward_wide", "forward_wide_kernel", spec, tiling.grid, tensors, scalars)
        else:
            KERNELS.launch(f"{device.kind}.forward", "forward_kernel", spec, tiling.grid, tensors, scalars)

    launch_with_fallback("rms_norm forward", plan.spec, run, smaller)
    return y, total, fp32, rstd, None if scale is None else scale.contiguous()
