"""The operators on a CPU, in plain PyTorch: the definition, and tensors laid out as kernels return them."""

from __future__ import annotations

import torch
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from . import reference
from .launch.rstd import by_head, has_heads


def forward(
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
) -> tuple[Tensor | None, ...]:
    """As `launch_forward`."""
    u, total, options = x, None, (weight, bias, eps, offset, casting_mode)
    if residual is not None:
        wide = statistics_dtype(residual.dtype)
        u = total = (x.to(wide) + residual.to(wide)).to(residual.dtype).contiguous()
    if gate is None:
        result, rstd = reference.forward(u, *options, x.dtype)
    else:
        result, rstd = reference.gated_forward(u, gate, *options, activation, norm_before_gate)
    y, scale = reference.quantise(result, dtype) if dtype.itemsize == 1 else (result.to(dtype).contiguous(), None)
    fp32 = result.clone(memory_format=torch.contiguous_format) if return_fp32 else None
    return y, total, fp32, by_head(rstd, has_heads(weight, bias)) if save_rstd else None, scale


def backward(
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
    need_dx: bool,
    need_dgate: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor | None, ...]:
    """dx, dgate, dweight and dbias, each where it is needed."""
    options, needs, dgate = (weight, bias, rstd, offset, casting_mode), (need_dweight, need_dbias), None
    if gate is None:
        dx, *parameters = reference.backward(dy, x, *options, rounded_to, *needs)
    else:
        dx, dgate, *parameters = reference.gated_backward(dy, x, gate, *options, activation, norm_before_gate, *needs)
        dgate = dgate.to(gate.dtype).contiguous() if need_dgate else None
    result = (dx if dsum is None else dx + dsum).to(x.dtype).contiguous() if need_dx else None
    return result, dgate, *parameters
