"""The operators on a CPU, in plain PyTorch: the definition, and tensors laid out as kernels return them."""

from __future__ import annotations

import torch
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from . import reference
from .calls import Backward, Forward
from .launch.rstd import by_head, has_heads


def forward(call: Forward) -> tuple[Tensor | None, ...]:
    """As `launch_forward`."""
    u, total = call.x, None
    if call.residual is not None:
        wide = statistics_dtype(call.residual.dtype)
        u = total = (call.x.to(wide) + call.residual.to(wide)).to(call.residual.dtype).contiguous()
    options = (call.weight, call.bias, call.eps, call.offset, call.casting_mode)
    if call.gate is None:
        result, rstd = reference.forward(u, *options, call.x.dtype)
    else:
        result, rstd = reference.gated_forward(u, call.gate, *options, call.activation, call.norm_before_gate)
    quantised = call.dtype.itemsize == 1
    y, scale = reference.quantise(result, call.dtype) if quantised else (result.to(call.dtype).contiguous(), None)
    fp32 = result.clone(memory_format=torch.contiguous_format) if call.return_fp32 else None
    return y, total, fp32, by_head(rstd, has_heads(call.weight, call.bias)) if call.save_rstd else None, scale


def backward(call: Backward) -> tuple[Tensor | None, ...]:
    """dx, dgate, dweight and dbias, each where it is needed."""
    options = (call.weight, call.bias, call.rstd, call.offset, call.casting_mode)
    needs, dgate = (call.need_dweight, call.need_dbias), None
    if call.gate is None:
        dx, *parameters = reference.backward(call.dy, call.x, *options, call.rounded_to, *needs)
    else:
        gating = (call.activation, call.norm_before_gate)
        dx, dgate, *parameters = reference.gated_backward(call.dy, call.x, call.gate, *options, *gating, *needs)
        dgate = dgate.to(call.gate.dtype).contiguous() if call.need_dgate else None
    total = dx if call.dsum is None else dx + call.dsum
    return total.to(call.x.dtype).contiguous() if call.need_dx else None, dgate, *parameters
