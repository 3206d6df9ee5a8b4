"""The operators with a gate, `gated_rms_norm` and `gated_rms_norm_backward`: schema, implementation, fake function."""

from __future__ import annotations

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference
from ..launch.arguments import Gate
from ..launch.backward import launch_backward
from ..launch.forward import launch_forward
from ..launch.rstd import by_head, has_heads
from .library import OPERATORS, fake_fp32, fake_parameters, fake_rstd, outputs


def _gated_rms_norm(
    x: Tensor,
    gate: Tensor,
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
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    device = device_for(x.device)
    if device is None:
        options = (eps, offset, casting_mode, activation, norm_before_gate)
        wide, rstd = reference.gated_forward(x, gate, weight, bias, *options)
        y, fp32 = outputs(wide, dtype, return_fp32)
        return y, fp32, by_head(rstd, has_heads(weight, bias)) if save_rstd else None
    gating = Gate(gate, activation == "silu", not norm_before_gate)
    results = (dtype, return_fp32, save_rstd, device)
    found = launch_forward(x, None, weight, bias, gating, eps, offset, casting_mode, *results)
    return found.y, found.fp32, found.rstd


def _gated_rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
    need_dweight: bool,
    need_dbias: bool,
    need_dx: bool,
    need_dgate: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    device = device_for(dy.device)
    if device is None:
        options = (rstd, offset, casting_mode, activation, norm_before_gate, need_dweight, need_dbias)
        wide, wide_gate, dweight, dbias = reference.gated_backward(dy, x, gate, weight, bias, *options)
        dx = wide.to(x.dtype).contiguous() if need_dx else None
        dgate = wide_gate.to(gate.dtype).contiguous() if need_dgate else None
        return dx, dgate, dweight, dbias
    with_dx = need_dx or (need_dgate and not norm_before_gate)
    dx = allocate(x, x.shape, x.dtype) if with_dx else None
    dgate = allocate(gate, gate.shape, gate.dtype) if need_dgate else None
    gating = Gate(gate, activation == "silu", not norm_before_gate)
    written = (dx, dgate, need_dweight, need_dbias, device)
    parameters = launch_backward(dy, None, x, weight, bias, gating, rstd, offset, casting_mode, x.dtype, *written)
    return dx if need_dx else None, dgate, *parameters


def _fake_gated_rms_norm(  # type: ignore[no-untyped-def]
    x, gate, weight, bias, eps, offset, casting_mode, activation, norm_before_gate, dtype, return_fp32, save_rstd
):
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, fake_fp32(x, x.dtype, return_fp32), fake_rstd(x, weight, bias, x.dtype, save_rstd)


def _fake_gated_backward(  # type: ignore[no-untyped-def]
    dy, x, gate, weight, bias, rstd, offset, mode, activation, before, need_dweight, need_dbias, need_dx, need_dgate
):
    dx, dgate = (
        torch.empty(one.shape, dtype=one.dtype, device=one.device) if needed else None
        for one, needed in ((x, need_dx), (gate, need_dgate))
    )
    return dx, dgate, *fake_parameters(weight, bias, need_dweight, need_dbias)


_OPTIONS = "float offset, str casting_mode, str activation, bool norm_before_gate"
OPERATORS.define(
    f"gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, Tensor? bias, float eps, {_OPTIONS}, ScalarType dtype,"
    " bool return_fp32, bool save_rstd) -> (Tensor y, Tensor fp32, Tensor rstd)",
    _gated_rms_norm,
    _fake_gated_rms_norm,
    forward_mode=True,
)
OPERATORS.define(
    f"gated_rms_norm_backward(Tensor dy, Tensor x, Tensor gate, Tensor? weight, Tensor? bias, Tensor rstd, {_OPTIONS},"
    " bool need_dweight, bool need_dbias, bool need_dx, bool need_dgate)"
    " -> (Tensor dx, Tensor dgate, Tensor dweight, Tensor dbias)",
    _gated_rms_norm_backward,
    _fake_gated_backward,
    forward_mode=True,
)
