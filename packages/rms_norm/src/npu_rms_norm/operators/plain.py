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
    x: Tensor,
    weight: Tensor | None,
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
        wide, rstd = reference.forward(x, weight, eps, offset, casting_mode, x.dtype)
        y, fp32 = _outputs(wide, dtype, return_fp32)
        return y, fp32, launch.by_head(rstd, weight) if save_rstd else None
    options = (eps, offset, casting_mode, dtype, return_fp32, save_rstd, device)
    y, fp32, _, saved = launch.forward(x, None, weight, None, *options)
    return y, fp32, saved


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
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
        result, rstd = reference.forward(total, weight, eps, offset, casting_mode, x.dtype)
        y, fp32 = _outputs(result, dtype, return_fp32)
        return y, total, fp32, launch.by_head(rstd, weight) if save_rstd else None
    options = (eps, offset, casting_mode, dtype, return_fp32, save_rstd, device)
    y, fp32, new_residual, saved = launch.forward(x, residual, weight, None, *options)
    assert new_residual is not None
    return y, new_residual, fp32, saved


def _outputs(wide: Tensor, dtype: torch.dtype, return_fp32: bool) -> tuple[Tensor, Tensor | None]:
    """y and, where it is asked for, y as it is; two tensors, even of one dtype."""
    return wide.to(dtype).contiguous(), wide.clone(memory_format=torch.contiguous_format) if return_fp32 else None


def _rms_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    rounded_to: torch.dtype,
    need_dweight: bool,
    need_dx: bool,
) -> tuple[Tensor, Tensor]:
    device = device_for(dy.device)
    if device is None:
        wide, dweight = reference.backward(dy, x, weight, rstd, offset, casting_mode, rounded_to, need_dweight)
        dx = (wide if dsum is None else wide + dsum).to(x.dtype).contiguous() if need_dx else nothing(dy)
        return dx, nothing(dy) if dweight is None else dweight
    result = allocate(x, x.shape, x.dtype) if need_dx else None
    dweight = launch.backward(
        dy, dsum, x, weight, None, rstd, offset, casting_mode, rounded_to, result, None, need_dweight, device
    )
    return nothing(dy) if result is None else result, nothing(dy) if dweight is None else dweight


def _rms_norm_backward_(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    rounded_to: torch.dtype,
    need_dweight: bool,
) -> Tensor:
    device = device_for(dy.device)
    if device is None or row_layout(*(tensor for tensor in (dy, dsum, x) if tensor is not None)) is None:
        dx, computed = _rms_norm_backward(dy, dsum, x, weight, rstd, offset, casting_mode, rounded_to, need_dweight, True)
        dy.copy_(dx)
        return computed
    written = launch.backward(
        dy, dsum, x, weight, None, rstd, offset, casting_mode, rounded_to, dy, None, need_dweight, device
    )
    return nothing(dy) if written is None else written


def _fake_rms_norm(  # type: ignore[no-untyped-def]
    x, weight, eps, offset, casting_mode, in_place, dtype, return_fp32, save_rstd
):
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, _fake_fp32(x, x.dtype, return_fp32), _fake_rstd(x, weight, x.dtype, save_rstd)


def _fake_add_rms_norm(  # type: ignore[no-untyped-def]
    x, residual, weight, eps, offset, casting_mode, in_place, dtype, return_fp32, save_rstd
):
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    return y, total, _fake_fp32(x, residual.dtype, return_fp32), _fake_rstd(x, weight, residual.dtype, save_rstd)


def _fake_backward(  # type: ignore[no-untyped-def]
    dy, dsum, x, weight, rstd, offset, casting_mode, rounded_to, need_dweight, need_dx
):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_dx else nothing(dy)
    return dx, torch.empty_like(weight) if need_dweight else nothing(dy)


def _fake_backward_(  # type: ignore[no-untyped-def]
    dy, dsum, x, weight, rstd, offset, casting_mode, rounded_to, need_dweight
):
    return torch.empty_like(weight) if need_dweight else nothing(dy)


def _fake_fp32(x: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor | None:
    return torch.empty(x.shape, dtype=statistics_dtype(dtype), device=x.device) if wanted else None


def _fake_rstd(x: Tensor, weight: Tensor | None, dtype: torch.dtype, save_rstd: bool) -> Tensor | None:
    return launch.allocate_rstd(x, weight, statistics_dtype(dtype)) if save_rstd else None


OPERATORS.define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str casting_mode, bool in_place,"
    " ScalarType dtype, bool return_fp32, bool save_rstd) -> (Tensor y, Tensor fp32, Tensor rstd)",
    _rms_norm,
    _fake_rms_norm,
    forward_mode=True,
)
OPERATORS.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting_mode, bool in_place,"
    " ScalarType dtype, bool return_fp32, bool save_rstd) -> (Tensor y, Tensor sum, Tensor fp32, Tensor rstd)",
    _add_rms_norm,
    _fake_add_rms_norm,
    forward_mode=True,
)
_BACKWARD = (
    "Tensor? dsum, Tensor x, Tensor? weight, Tensor rstd, float offset, str casting_mode, ScalarType rounded_to,"
    " bool need_dweight"
)
OPERATORS.define(
    f"rms_norm_backward(Tensor dy, {_BACKWARD}, bool need_dx) -> (Tensor dx, Tensor dweight)",
    _rms_norm_backward,
    _fake_backward,
    forward_mode=True,
)
OPERATORS.define(f"rms_norm_backward_(Tensor(a!) dy, {_BACKWARD}) -> Tensor dweight", _rms_norm_backward_, _fake_backward_)
