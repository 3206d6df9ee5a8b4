"""The operators without a gate: schema, implementation, fake function.

`rms_norm`, `add_rms_norm`, `rms_norm_backward` and its in-place twin `rms_norm_backward_`; kernels on accelerators,
reference.py on a CPU. A result that is not asked for is an empty tensor. Gradients are in autograd.py, which alone reads
`in_place`.
"""

from __future__ import annotations

import torch
from npu_tiling import device_for, row_layout
from npu_tiling.pytorch.tensors import allocate, statistics_dtype
from torch import Tensor

from .. import reference
from ..launch.backward import launch_backward
from ..launch.forward import launch_forward
from ..launch.rstd import by_head, has_heads
from .library import OPERATORS, fake_fp32, fake_parameters, fake_rstd, outputs


def _rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    in_place: bool,
    dtype: torch.dtype,
    return_fp32: bool,
    save_rstd: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    device = device_for(x.device)
    if device is None:
        wide, rstd = reference.forward(x, weight, bias, eps, offset, casting_mode, x.dtype)
        y, fp32 = outputs(wide, dtype, return_fp32)
        return y, fp32, by_head(rstd, has_heads(weight, bias)) if save_rstd else None
    options = (eps, offset, casting_mode, dtype, return_fp32, save_rstd, device)
    found = launch_forward(x, None, weight, bias, None, *options)
    return found.y, found.fp32, found.rstd


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    in_place: bool,
    dtype: torch.dtype,
    return_fp32: bool,
    save_rstd: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    device = device_for(x.device)
    if device is None:
        wide = statistics_dtype(residual.dtype)
        total = (x.to(wide) + residual.to(wide)).to(residual.dtype).contiguous()
        result, rstd = reference.forward(total, weight, bias, eps, offset, casting_mode, x.dtype)
        y, fp32 = outputs(result, dtype, return_fp32)
        return y, total, fp32, by_head(rstd, has_heads(weight, bias)) if save_rstd else None
    options = (eps, offset, casting_mode, dtype, return_fp32, save_rstd, device)
    found = launch_forward(x, residual, weight, bias, None, *options)
    assert found.total is not None
    return found.y, found.total, found.fp32, found.rstd


def _rms_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    rounded_to: torch.dtype,
    need_dweight: bool,
    need_dbias: bool,
    need_dx: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    device = device_for(dy.device)
    if device is None:
        options = (rstd, offset, casting_mode, rounded_to, need_dweight, need_dbias)
        wide, dweight, dbias = reference.backward(dy, x, weight, bias, *options)
        dx = (wide if dsum is None else wide + dsum).to(x.dtype).contiguous() if need_dx else None
        return dx, dweight, dbias
    result = allocate(x, x.shape, x.dtype) if need_dx else None
    outputs = (result, None, need_dweight, need_dbias, device)
    return result, *launch_backward(dy, dsum, x, weight, bias, None, rstd, offset, casting_mode, rounded_to, *outputs)


def _rms_norm_backward_(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    rounded_to: torch.dtype,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor | None, Tensor | None]:
    device = device_for(dy.device)
    if device is None or row_layout(*(tensor for tensor in (dy, dsum, x) if tensor is not None)) is None:
        options = (offset, casting_mode, rounded_to, need_dweight, need_dbias)
        dx, *parameters = _rms_norm_backward(dy, dsum, x, weight, bias, rstd, *options, True)
        assert dx is not None
        dy.copy_(dx)
        return parameters[0], parameters[1]
    outputs = (dy, None, need_dweight, need_dbias, device)
    return launch_backward(dy, dsum, x, weight, bias, None, rstd, offset, casting_mode, rounded_to, *outputs)


def _fake_rms_norm(  # type: ignore[no-untyped-def]
    x, weight, bias, eps, offset, casting_mode, in_place, dtype, return_fp32, save_rstd
):
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, fake_fp32(x, x.dtype, return_fp32), fake_rstd(x, weight, bias, x.dtype, save_rstd)


def _fake_add_rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, bias, eps, offset, casting_mode, in_place, dtype, return_fp32, save_rstd
):
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    return y, total, fake_fp32(x, residual.dtype, return_fp32), fake_rstd(x, weight, bias, residual.dtype, save_rstd)


def _fake_backward(  # type: ignore[no-untyped-def]
    dy, dsum, x, weight, bias, rstd, offset, casting_mode, rounded_to, need_dweight, need_dbias, need_dx
):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_dx else None
    return dx, *fake_parameters(weight, bias, need_dweight, need_dbias)


def _fake_backward_(  # type: ignore[no-untyped-def]
    dy, dsum, x, weight, bias, rstd, offset, casting_mode, rounded_to, need_dweight, need_dbias
):
    return fake_parameters(weight, bias, need_dweight, need_dbias)


OPERATORS.define(
    "rms_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset, str casting_mode, bool in_place,"
    " ScalarType dtype, bool return_fp32, bool save_rstd) -> (Tensor y, Tensor fp32, Tensor rstd)",
    _rms_norm,
    _fake_rms_norm,
    forward_mode=True,
)
OPERATORS.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, float offset, str casting_mode,"
    " bool in_place, ScalarType dtype, bool return_fp32, bool save_rstd)"
    " -> (Tensor y, Tensor sum, Tensor fp32, Tensor rstd)",
    _add_rms_norm,
    _fake_add_rms_norm,
    forward_mode=True,
)
_BACKWARD = (
    "Tensor? dsum, Tensor x, Tensor? weight, Tensor? bias, Tensor rstd, float offset, str casting_mode,"
    " ScalarType rounded_to, bool need_dweight, bool need_dbias"
)
OPERATORS.define(
    f"rms_norm_backward(Tensor dy, {_BACKWARD}, bool need_dx) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _rms_norm_backward,
    _fake_backward,
    forward_mode=True,
)
OPERATORS.define(
    f"rms_norm_backward_(Tensor(a!) dy, {_BACKWARD}) -> (Tensor dweight, Tensor dbias)", _rms_norm_backward_, _fake_backward_
)
