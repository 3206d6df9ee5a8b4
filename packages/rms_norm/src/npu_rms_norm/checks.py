"""Checks that every public function makes of its arguments, and the options of functions whose y has a float dtype."""

from __future__ import annotations

from typing import TypedDict

import torch
from npu_tiling.pytorch import arguments
from torch import Tensor

from .casting import CASTING_MODES


class Options(TypedDict, total=False):
    """Of the public functions, whether or not they return fp32 too; each adds its own."""

    bias: Tensor | None
    offset: float
    casting_mode: str
    dtype: torch.dtype | None


def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    *,
    in_place: bool = False,
) -> tuple[float, float]:
    """The arguments that every function has; eps and offset, as floats."""
    arguments.rows("x", x)
    shapes = (x.shape[-1:],) if x.dim() == 1 else (x.shape[-1:], x.shape[-2:])
    arguments.parameter("weight", weight, shapes, x, "x's", or_none=True)
    if bias is not None:
        arguments.parameter("bias", bias, shapes if weight is None else (weight.shape,), x, "x's", or_none=True)
    arguments.one_of("casting_mode", casting_mode, CASTING_MODES)
    if in_place is not False:
        arguments.flags(in_place=in_place)
    return arguments.number("eps", eps, least=0, finite=False), arguments.number("offset", offset)


def output_dtype(dtype: torch.dtype | None, return_fp32: bool, x: Tensor) -> torch.dtype:
    """y's, where `dtype` is asked for."""
    if return_fp32 is not False:
        arguments.flags(return_fp32=return_fp32)
    if dtype is None or dtype is x.dtype:
        return x.dtype
    if dtype not in arguments.DTYPES:
        raise TypeError(f"dtype is {dtype!r} and must be torch.float32, torch.bfloat16, torch.float16, x's dtype or None.")
    return dtype
