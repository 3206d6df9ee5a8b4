"""The operators without a gate: schema, implementation, fake function.

`rms_norm`, `add_rms_norm`, `rms_norm_backward` and its in-place twin `rms_norm_backward_`; kernels on accelerators,
reference.py on a CPU. A result that is not asked for is an empty tensor. Gradients are in autograd.py, which alone reads
`in_place`.
"""

from __future__ import annotations

import torch
from npu_tiling import device_for, row_layout
from npu_tiling.pytorch.tensors import allocate, nothing, statistics_dtype
from torch import Tensor

from .. import launch, reference
from .library import OPERATORS


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, in_place: bool, save_rstd: bool
) -> tuple[Tensor, Tensor]:
    device = device_for(x.device)
    if device is None:
        y, rstd = reference.forward(x, weight, eps, offset, casting_mode, x.dtype)
        return y.contiguous(), rstd.contiguous() if save_rstd else nothing(x)
    y, _, saved = launch.forward(x, None, weight, None, eps, offset, casting_mode, save_rstd, device)
    return y, nothing(x) if saved is None else saved


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    in_place: bool,
    save_rstd: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    device = device_for(x.device)
    if device is None:
        wide = statistics_dtype(residual.dtype)
        total = (x.to(wide) + residual.to(wide)).to(residual.dtype).contiguous()
        y, rstd = reference.forward(total, weight, eps, offset, casting_mode, x.dtype)
        return y, total, rstd if save_rstd else nothing(x)
    y, new_residual, saved = launch.forward(x, residual, weight, None, eps, offset, casting_mode, save_rstd, device)
    assert new_residual is not None
    return y, new_residual, nothing(x) if saved is None else saved


def _rms_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    need_dweight: bool,
    need_dx: bool,
) -> tuple[Tensor, Tensor]:
    device = device_for(dy.device)
    if device is None:
        wide, dweight = reference.backward(dy, x, weight, rstd, offset, casting_mode, need_dweight)
        dx = (wide if dsum is None else wide + dsum).to(x.dtype).contiguous() if need_dx else nothing(dy)
        return dx, nothing(dy) if dweight is None else dweight
    result = allocate(x, x.shape, x.dtype) if need_dx else None
    dweight = launch.backward(dy, dsum, x, weight, None, rstd, offset, casting_mode, result, None, need_dweight, device)
    return nothing(dy) if result is None else result, nothing(dy) if dweight is None else dweight


def _rms_norm_backward_(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    need_dweight: bool,
) -> Tensor:
    device = device_for(dy.device)
    if device is None or row_layout(*(tensor for tensor in (dy, dsum, x) if tensor is not None)) is None:
        dx, computed = _rms_norm_backward(dy, dsum, x, weight, rstd, offset, casting_mode, need_dweight, True)
        dy.copy_(dx)
        return computed
    written = launch.backward(dy, dsum, x, weight, None, rstd, offset, casting_mode, dy, None, need_dweight, device)
    return nothing(dy) if written is None else written


def _fake_rms_norm(x, weight, eps, offset, casting_mode, in_place, save_rstd):  # type: ignore[no-untyped-def]
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), _fake_rstd(x, x.dtype, save_rstd)


def _fake_add_rms_norm(x, residual, weight, eps, offset, casting_mode, in_place, save_rstd):  # type: ignore[no-untyped-def]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    return y, total, _fake_rstd(x, residual.dtype, save_rstd)


def _fake_backward(dy, dsum, x, weight, rstd, offset, casting_mode, need_dweight, need_dx):  # type: ignore[no-untyped-def]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_dx else nothing(dy)
    return dx, torch.empty_like(weight) if need_dweight else nothing(dy)


def _fake_backward_(dy, dsum, x, weight, rstd, offset, casting_mode, need_dweight):  # type: ignore[no-untyped-def]
    return torch.empty_like(weight) if need_dweight else nothing(dy)


def _fake_rstd(x: Tensor, dtype: torch.dtype, save_rstd: bool) -> Tensor:
    if not save_rstd:
        return nothing(x)
    return torch.empty(x.shape[:-1], dtype=statistics_dtype(dtype), device=x.device)


OPERATORS.define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str casting_mode, bool in_place, bool save_rstd)"
    " -> (Tensor y, Tensor rstd)",
    _rms_norm,
    _fake_rms_norm,
    forward_mode=True,
)
OPERATORS.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting_mode, bool in_place,"
    " bool save_rstd) -> (Tensor y, Tensor sum, Tensor rstd)",
    _add_rms_norm,
    _fake_add_rms_norm,
    forward_mode=True,
)
_BACKWARD = "Tensor? dsum, Tensor x, Tensor? weight, Tensor rstd, float offset, str casting_mode, bool need_dweight"
OPERATORS.define(
    f"rms_norm_backward(Tensor dy, {_BACKWARD}, bool need_dx) -> (Tensor dx, Tensor dweight)",
    _rms_norm_backward,
    _fake_backward,
    forward_mode=True,
)
OPERATORS.define(f"rms_norm_backward_(Tensor(a!) dy, {_BACKWARD}) -> Tensor dweight", _rms_norm_backward_, _fake_backward_)
