"""The operators with a gate, `gated_rms_norm` and `gated_rms_norm_backward`: schema, implementation, fake function."""

from __future__ import annotations

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.tensors import allocate, nothing, statistics_dtype
from torch import Tensor

from .. import launch, reference
from .library import OPERATORS


def _gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
    save_rstd: bool,
) -> tuple[Tensor, Tensor]:
    device = device_for(x.device)
    if device is None:
        y, rstd = reference.gated_forward(x, gate, weight, eps, offset, casting_mode, activation, norm_before_gate)
        return y.contiguous(), launch.by_head(rstd, weight) if save_rstd else nothing(x)
    gating = launch.Gate(gate, activation == "silu", not norm_before_gate)
    y, _, _, saved = launch.forward(x, None, weight, gating, eps, offset, casting_mode, x.dtype, False, save_rstd, device)
    return y, nothing(x) if saved is None else saved


def _gated_rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    activation: str,
    norm_before_gate: bool,
    need_dweight: bool,
    need_dx: bool,
    need_dgate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    device = device_for(dy.device)
    if device is None:
        options = (offset, casting_mode, activation, norm_before_gate, need_dweight)
        wide, wide_gate, dweight = reference.gated_backward(dy, x, gate, weight, rstd, *options)
        dx = wide.to(x.dtype).contiguous() if need_dx else None
        dgate = wide_gate.to(gate.dtype).contiguous() if need_dgate else None
    else:
        with_dx = need_dx or (need_dgate and not norm_before_gate)
        dx = allocate(x, x.shape, x.dtype) if with_dx else None
        dgate = allocate(gate, gate.shape, gate.dtype) if need_dgate else None
        gating = launch.Gate(gate, activation == "silu", not norm_before_gate)
        outputs = (dx, dgate, need_dweight, device)
        dweight = launch.backward(dy, None, x, weight, gating, rstd, offset, casting_mode, x.dtype, *outputs)
    found = (dx if need_dx else None, dgate, dweight)
    dx, dgate, dweight = (nothing(dy) if one is None else one for one in found)
    return dx, dgate, dweight


def _fake_gated_rms_norm(  # type: ignore[no-untyped-def]
    x, gate, weight, eps, offset, casting_mode, activation, norm_before_gate, save_rstd
):
    rstd = launch.allocate_rstd(x, weight, statistics_dtype(x.dtype)) if save_rstd else nothing(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), rstd


def _fake_gated_backward(  # type: ignore[no-untyped-def]
    dy, x, gate, weight, rstd, offset, casting_mode, activation, norm_before_gate, need_dweight, need_dx, need_dgate
):
    dx, dgate = (
        torch.empty(one.shape, dtype=one.dtype, device=one.device) if needed else nothing(dy)
        for one, needed in ((x, need_dx), (gate, need_dgate))
    )
    return dx, dgate, torch.empty_like(weight) if need_dweight else nothing(dy)


_OPTIONS = "float offset, str casting_mode, str activation, bool norm_before_gate"
OPERATORS.define(
    f"gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, float eps, {_OPTIONS}, bool save_rstd)"
    " -> (Tensor y, Tensor rstd)",
    _gated_rms_norm,
    _fake_gated_rms_norm,
    forward_mode=True,
)
OPERATORS.define(
    f"gated_rms_norm_backward(Tensor dy, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, {_OPTIONS}, bool need_dweight,"
    " bool need_dx, bool need_dgate) -> (Tensor dx, Tensor dgate, Tensor dweight)",
    _gated_rms_norm_backward,
    _fake_gated_backward,
    forward_mode=True,
)
