"""The launch of the forward, and what it writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from .arguments import KERNELS, Gate, contiguous_or_none, dtypes_of, offset_argument
from .plan import Call, plan_strided_rows
from .rstd import allocate_rstd, has_heads

_KERNELS = {
    "rows": ("kernels.forward", "forward_kernel"),
    "chunks": ("kernels.forward_chunks", "forward_chunks_kernel"),
    "wide": ("kernels.forward_wide", "forward_wide_kernel"),
}


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


def launch_forward(
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
    weight, bias = contiguous_or_none(weight), contiguous_or_none(bias)
    values, gating = (None, None) if gate is None else (gate.values, gate[1:])
    second_output, read = return_fp32 or dtype != x.dtype, dtypes_of(x, residual, values)
    call = Call(read, y.dtype, x.dtype, casting_mode, gating, second_output, per_head, bias is not None)
    (p_x, p_residual, p_gate), plan = plan_strided_rows((x, residual, values), tiling.forward_launch, call, device)
    tensors = (p_x, p_residual, weight, bias, p_gate, *results)
    scalars = (*plan.rows, *plan.strides, eps, offset_argument(offset, weight, bias, device))

    def run(spec: LaunchSpec) -> None:
        module, kernel = _KERNELS[spec.launch.form]
        KERNELS.launch(module, kernel, spec, spec.launch.grid, tensors, scalars)

    launch_with_fallback("rms_norm forward", plan.spec, run, tiling.smaller)
    return results
