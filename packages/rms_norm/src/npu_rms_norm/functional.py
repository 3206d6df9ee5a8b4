"""The public functions without a gate: arguments checked, DTensors taken to each rank's part, and the operators called."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import sharding
from .checks import Options, check, output_dtype
from .operators import norm
from .results import AddedRMSNorm, AddedWithFP32, WithFP32

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _PlainOptions(Options, total=False):
    in_place: bool


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[False] = False,
    **options: Unpack[_PlainOptions],
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[True],
    **options: Unpack[_PlainOptions],
) -> WithFP32: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    dtype: torch.dtype | None = None,
    return_fp32: bool = False,
) -> Tensor | WithFP32:
    """Root mean square normalisation over the last dimension.

        y = x / sqrt(mean(x^2) + eps) * (offset + weight) + bias

    Statistics and arithmetic are fp32. Under autocast nothing is cast: x, weight and y keep their dtypes. Of DTensors, see
    sharding.py, each rank computes its own rows.

    The bits of a row of y depend on the row and on the layout of x, and not on other rows, their number or the row's place.
    All contiguous tensors have one layout; where rows lie in separate groups, the number of rows of a group is part of it.

    Args:
        x: [..., D], fp32, bf16 or fp16 (fp64 too on a CPU). Rows may lie at any stride that takes two levels (a slice of a
            wider tensor, heads of a fused projection); others are copied first.
        weight: [D], or [H, D] for x [..., H, D], a weight for each head; x's dtype or fp32; None leaves it out.
        eps: added to the mean square.
        bias: the weight's shape (without a weight [D] or [H, D]), x's dtype or fp32; None: none is added.
        offset: added to the weight: 1.0 for Gemma's zero-centred weights.
        casting_mode: what is rounded to x's dtype on the way (nothing, where x is fp32). "llama": x / rms, before it is
            multiplied by the weight. "gemma": nothing but the result. "none": 1 / rms, offset + weight, bias and x / rms.
            Before a bias is added, "llama" rounds the product to the weight's dtype, "none" to x's.
        in_place: the backward writes the gradient of x into the memory of the gradient of y, unless that is expanded. Saves
            one tensor of x's size, and is wrong where something else still reads that gradient: another consumer's backward
            that was handed the same tensor, a hook that keeps it, `retain_grad` on y. No effect
            where y and x differ in dtype.
        dtype: of y, torch.float32, torch.bfloat16 or torch.float16; None: x's. Casting modes round to
            x's dtype in any case.
        return_fp32: y in fp32 too, for routers, without the rounding to y's dtype (fp64 for fp64 x).

    Returns:
        y [..., D], contiguous; with return_fp32 a tuple with names, y and fp32 [..., D].

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    eps, offset = check(x, weight, bias, eps, offset, casting_mode, in_place=in_place)
    y_dtype = output_dtype(dtype, return_fp32, x)
    if is_distributed((x, weight, bias)):
        options = {"eps": eps, "offset": offset, "casting_mode": casting_mode, "in_place": in_place}
        run = partial(rms_norm, **options, dtype=dtype, return_fp32=return_fp32)
        parts = sharding.on_own_rows(run, {"x": x}, {"weight": weight, "bias": bias})
        return WithFP32(*parts) if return_fp32 else parts
    y, _, fp32, *_ = norm(
        x,
        weight,
        bias,
        eps=eps,
        offset=offset,
        casting_mode=casting_mode,
        dtype=y_dtype,
        in_place=in_place,
        return_fp32=return_fp32,
    )
    return WithFP32(y, fp32) if return_fp32 else y


@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[False] = False,
    **options: Unpack[_PlainOptions],
) -> AddedRMSNorm: ...


@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[True],
    **options: Unpack[_PlainOptions],
) -> AddedWithFP32: ...


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
    dtype: torch.dtype | None = None,
    return_fp32: bool = False,
) -> AddedRMSNorm | AddedWithFP32:
    """Adds a layer's output to the residual stream and normalises the sum, in one pass.

        new_residual = residual + x        y = rms_norm(new_residual, weight)

    The sum is rounded to the residual's dtype before it is normalised, as two separate steps would do. As with `rms_norm`,
    the bits of a row do not depend on other rows.

    Args:
        x: [..., D], the layer's output; fp32, bf16 or fp16 (fp64 too on a CPU).
        residual: [..., D], fp32 or x's dtype.
        weight, eps, bias, offset, casting_mode: as for `rms_norm`.
        in_place: as for `rms_norm`, where y and the residual have one dtype; no effect where they differ.
        dtype, return_fp32: as for `rms_norm`.

    Returns:
        A tuple with names: y [..., D]; residual, the new one, [..., D] in its dtype; with return_fp32 fp32 [..., D].

    Raises:
        TypeError, ValueError: as for `rms_norm`.

    Source: arXiv 1910.07467.
    """
    eps, offset = check(x, weight, bias, eps, offset, casting_mode, in_place=in_place)
    arguments.parameter("residual", residual, (x.shape,), x, "x's")
    y_dtype = output_dtype(dtype, return_fp32, x)
    if is_distributed((x, residual, weight, bias)):
        options = {"eps": eps, "offset": offset, "casting_mode": casting_mode, "in_place": in_place}
        run = partial(add_rms_norm, **options, dtype=dtype, return_fp32=return_fp32)
        parts = sharding.on_own_rows(run, {"x": x, "residual": residual}, {"weight": weight, "bias": bias})
        return AddedWithFP32(*parts) if return_fp32 else AddedRMSNorm(*parts)
    y, new_residual, fp32, *_ = norm(
        x,
        weight,
        bias,
        eps=eps,
        offset=offset,
        casting_mode=casting_mode,
        dtype=y_dtype,
        residual=residual,
        in_place=in_place,
        return_fp32=return_fp32,
    )
    return AddedWithFP32(y, new_residual, fp32) if return_fp32 else AddedRMSNorm(y, new_residual)
