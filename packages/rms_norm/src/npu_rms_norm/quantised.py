"""The public functions whose result is int8 or fp8 with a scale for each row."""

from __future__ import annotations

from functools import partial

import torch
from npu_tiling import device_for
from npu_tiling.chips.detection import dry_runs
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import sharding
from .checks import check
from .operators import norm
from .results import AddedDynamicQuant, DynamicQuant

FP8 = torch.float8_e4m3fn


def rms_norm_dynamic_quant(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    dtype: torch.dtype = torch.int8,
) -> DynamicQuant:
    """`rms_norm` whose result is quantised, each row by its own largest element, in the same pass.

        n = rms_norm(x, weight) in fp32        scale = max(abs(n)) / 127        y = round(n * (127 / max(abs(n))))

    y * scale differs from n by half a scale at most. The product is rounded to the nearest whole number, half to even;
    nothing is clipped. Where n / scale is half a whole number, the rounding of the factor 127 / max(abs(n)) decides. For
    fp8, 448 takes the place of 127, and y is the product in fp8 e4m3: y * scale differs from n by a sixteenth of n at most,
    where y is a normal number. A row of zeros counts as one whose max(abs(n)) is 1e-30.
    Where n has NaN or inf, the scale of the row is NaN and y of the row is 0, in fp8 NaN.

    There is no gradient: y and scale are constants to autograd, as every integer tensor is. To train, take `rms_norm` and
    quantise its result where the gradient is defined.

    Args:
        x, weight, eps, bias, offset, casting_mode: as for `rms_norm`.
        dtype: of y, torch.int8 or, on CUDA of compute capability 8.9 or later and on a CPU, torch.float8_e4m3fn.

    Returns:
        A tuple with names: y [..., D], contiguous; scale [...] fp32.

    Raises:
        TypeError, ValueError: as for `rms_norm`; TypeError too where the device does not have this dtype.

    Source: vLLM, rms_norm_dynamic_per_token_quant; torch_npu, npu_add_rms_norm_dynamic_quant.
    """
    eps, offset = check(x, weight, bias, eps, offset, casting_mode)
    _check_dtype(dtype, x)
    if is_distributed((x, weight, bias)):
        run = partial(rms_norm_dynamic_quant, eps=eps, offset=offset, casting_mode=casting_mode, dtype=dtype)
        return DynamicQuant(*sharding.on_own_rows(run, {"x": x}, {"weight": weight, "bias": bias}))
    y, _, _, _, scale = norm(x, weight, bias, eps=eps, offset=offset, casting_mode=casting_mode, dtype=dtype)
    return DynamicQuant(y, scale)


def add_rms_norm_dynamic_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    dtype: torch.dtype = torch.int8,
) -> AddedDynamicQuant:
    """`add_rms_norm` whose result is quantised as that of `rms_norm_dynamic_quant`, in one pass.

    The new residual has the gradient of a sum, to x and to the residual; y and scale have none.

    Args:
        x, residual: as for `add_rms_norm`.
        weight, eps, bias, offset, casting_mode, dtype: as for `rms_norm_dynamic_quant`.

    Returns:
        A tuple with names: y [..., D]; residual, the new one, [..., D] in its dtype; scale [...] fp32.

    Raises:
        TypeError, ValueError: as for `rms_norm_dynamic_quant`.

    Source: torch_npu, npu_add_rms_norm_dynamic_quant.
    """
    eps, offset = check(x, weight, bias, eps, offset, casting_mode)
    arguments.parameter("residual", residual, (x.shape,), x, "x's")
    _check_dtype(dtype, x)
    if is_distributed((x, residual, weight, bias)):
        run = partial(add_rms_norm_dynamic_quant, eps=eps, offset=offset, casting_mode=casting_mode, dtype=dtype)
        rows, parameters = {"x": x, "residual": residual}, {"weight": weight, "bias": bias}
        return AddedDynamicQuant(*sharding.on_own_rows(run, rows, parameters))
    y, total, _, _, scale = norm(
        x, weight, bias, eps=eps, offset=offset, casting_mode=casting_mode, dtype=dtype, residual=residual
    )
    return AddedDynamicQuant(y, total, scale)


def _check_dtype(dtype: torch.dtype, x: Tensor) -> None:
    if dtype == torch.int8:
        return
    if dtype != FP8:
        raise TypeError(f"dtype is {dtype!r} and must be torch.int8 or {FP8}.")
    device = None if x.is_meta and not dry_runs else device_for(x.device)
    if device is not None and (device.kind != "cuda" or int(device.arch.removeprefix("sm_")) < 89):
        raise TypeError(f"dtype is {FP8}, which {device.name} does not have, and must be torch.int8 there.")
