"""The launch of the forward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from ..tiling import smaller
from .arguments import KERNELS, contiguous_or_none, dtype_of, dtypes_of, offset_argument
from .plan import Call, plan_rows
from .rstd import allocate_rstd, has_heads


class Results(NamedTuple):
    """What the forward writes; None: not asked for.

    Attributes:
        y: [..., D].
        total: x + residual.
        fp32: y in fp32.
        rstd: [...].
        scale: fp32 [...], of y in int8 or fp8.
    """

    y: Tensor
    total: Tensor | None
    fp32: Tensor | None
    rstd: Tensor | None
    scale: Tensor | None


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
    dtype: torch.dtype,
    return_fp32: bool,
    save_rstd: bool,
    device: Device,
) -> Results:
    """y in `dtype`, of one byte quantised, and what else is asked for."""
    per_head, quantised = has_heads(weight, bias), dtype.itemsize == 1
    results = Results(
        y=allocate(x, x.shape, dtype),
        total=None if residual is None else allocate(x, x.shape, residual.dtype),
        fp32=allocate(x, x.shape, torch.float32) if return_fp32 else None,
        rstd=allocate_rstd(x, per_head, torch.float32) if save_rstd else None,
        scale=allocate_rstd(x, per_head, torch.float32) if quantised else None,
    )
    if not results.y.numel():
        return results
    weight, bias = contiguous_or_none(weight), contiguous_or_none(bias)
    added = offset_argument(offset, weight, bias, device)
    call = Call(
        backward=False,
        device=device,
        read=dtypes_of(x, residual, gate),
        result=dtype,
        rounded_to=x.dtype,
        weight=dtype_of(weight),
        casting_mode=casting_mode,
        activation="" if gate is None else activation,
        gate_first=gate is not None and not norm_before_gate,
        second_output=return_fp32 or dtype != x.dtype,
        per_head=per_head,
        biased=bias is not None,
        adds_offset=added is not None,
    )
    rows, plan = plan_rows((x, residual, gate), call)
    tensors = (*rows, weight, bias, *results)
    scalars = (*plan.rows, *plan.strides, eps, added)

    def run(spec: LaunchSpec) -> None:
        if spec.launch.kernel == "wide":
            KERNELS.launch("both.forward_wide", "forward_wide_kernel", spec, spec.launch.grid, tensors, scalars)
        else:
            KERNELS.launch(f"{device.kind}.forward", "forward_kernel", spec, spec.launch.grid, tensors, scalars)

    launch_with_fallback("rms_norm forward", plan.spec, run, smaller)
    return results if results.scale is None else results._replace(scale=results.scale.contiguous())
