"""The operators whose result is quantised row by row: schema, implementation, fake function. They have no gradient."""

from __future__ import annotations

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from .. import reference
from ..launch.forward import launch_forward
from .library import OPERATORS


def _dynamic_quant(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    device = device_for(x.device)
    if device is None:
        wide, _ = reference.forward(x, weight, bias, eps, offset, casting_mode, x.dtype)
        return reference.quantise(wide, dtype)
    found = launch_forward(x, None, weight, bias, None, eps, offset, casting_mode, dtype, False, False, device)
    assert found.scale is not None
    return found.y, found.scale.contiguous()


def _add_dynamic_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    device = device_for(x.device)
    if device is None:
        arithmetic = statistics_dtype(residual.dtype)
        total = (x.to(arithmetic) + residual.to(arithmetic)).to(residual.dtype).contiguous()
        wide, _ = reference.forward(total, weight, bias, eps, offset, casting_mode, x.dtype)
        y, scale = reference.quantise(wide, dtype)
        return y, total, scale
    found = launch_forward(x, residual, weight, bias, None, eps, offset, casting_mode, dtype, False, False, device)
    assert found.total is not None
    assert found.scale is not None
    return found.y, found.total, found.scale.contiguous()


def _fake_dynamic_quant(x, weight, bias, eps, offset, casting_mode, dtype):  # type: ignore[no-untyped-def]
    y, scale = (torch.empty(shape, dtype=own, device=x.device) for shape, own in _results(x, dtype))
    return y, scale


def _fake_add_dynamic_quant(x, residual, weight, bias, eps, offset, casting_mode, dtype):  # type: ignore[no-untyped-def]
    y, scale = (torch.empty(shape, dtype=own, device=x.device) for shape, own in _results(x, dtype))
    return y, torch.empty(x.shape, dtype=residual.dtype, device=x.device), scale


def _results(x: Tensor, dtype: torch.dtype) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return (x.shape, dtype), (x.shape[:-1], torch.float32)


_OPTIONS = "Tensor? weight, Tensor? bias, float eps, float offset, str casting_mode, ScalarType dtype"
OPERATORS.define(
    f"rms_norm_dynamic_quant(Tensor x, {_OPTIONS}) -> (Tensor y, Tensor scale)", _dynamic_quant, _fake_dynamic_quant
)
OPERATORS.define(
    f"add_rms_norm_dynamic_quant(Tensor x, Tensor residual, {_OPTIONS}) -> (Tensor y, Tensor sum, Tensor scale)",
    _add_dynamic_quant,
    _fake_add_dynamic_quant,
)
