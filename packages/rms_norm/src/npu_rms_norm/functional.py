"""The public functions: arguments checked, DTensors taken to each rank's part, and the operators called."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import sharding
from .autograd import OPERATORS
from .reference import ACTIVATIONS, CASTING_MODES
from .results import AddedRMSNorm, AddedWithFP32, WithFP32

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Options(TypedDict, total=False):
    bias: Tensor | None
    offset: float
    casting_mode: str
    dtype: torch.dtype | None


class _PlainOptions(_Options, total=False):
    in_place: bool


class _GatedOptions(_Options, total=False):
    activation: str
    norm_before_gate: bool


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

    A row of y has the same bits whatever the other rows are, however many, and wherever it stands, among rows that lie
    alike: contiguous ones always do. Of rows in groups that are apart, how many a group has is part of how they lie.

    Args:
        x: [..., D], fp32, bf16 or fp16 (fp64 too on a CPU). Rows may lie at any stride that takes two levels (a slice of a
            wider tensor, heads of a fused projection); others are copied first.
        weight: [D], or [H, D] for x [..., H, D], a weight for each head; x's dtype or fp32; None leaves it out.
        eps: added to the mean square.
        bias: the weight's shape (without a weight [D] or [H, D]), x's dtype or fp32; None: none is added.
        offset: added to the weight: 1.0 for Gemma's zero-centred weights.
        casting_mode: what is rounded to x's dtype on the way (nothing, where x is fp32). "llama": x / rms, before it is
            multiplied by the weight. "gemma": nothing but the result. "none": 1 / rms, offset + weight, bias and both
            products. What meets the bias "llama" rounds to the weight's dtype.
        in_place: the backward writes the gradient of x into the memory of the gradient of y, unless that is expanded. Saves
            one tensor of x's size, and is wrong where something else still reads that gradient: another consumer's backward
            that was handed the same tensor, a hook that keeps it, `retain_grad` on y. No effect
            where y and x differ in dtype.
        dtype: of y, torch.float32, torch.bfloat16 or torch.float16; None: x's. On the way the modes
            round to x's all the same.
        return_fp32: y in fp32 too, for routers; what would be rounded to y's dtype is not (fp64 for fp64 x).

    Returns:
        y [..., D], contiguous; with return_fp32 a tuple with names, y and fp32 [..., D].

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    eps, offset = check(x, weight, bias, eps, offset, casting_mode, in_place)
    y_dtype = _output_dtype(dtype, return_fp32, x)
    if is_distributed((x, weight, bias)):
        options = {"eps": eps, "offset": offset, "casting_mode": casting_mode, "in_place": in_place}
        run = partial(rms_norm, **options, dtype=dtype, return_fp32=return_fp32)
        parts = sharding.on_own_rows(run, {"x": x}, {"weight": weight, "bias": bias})
        return WithFP32(*parts) if return_fp32 else parts
    flags = (eps, offset, casting_mode, in_place, y_dtype, return_fp32, False)
    y, fp32, _ = OPERATORS("rms_norm", x, weight, bias, *flags)
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

    The sum is rounded to the residual's dtype before it is normalised, as two separate steps would do. The bits of a row
    depend on the other rows as little as those of `rms_norm`.

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
    eps, offset = check(x, weight, bias, eps, offset, casting_mode, in_place)
    arguments.parameter("residual", residual, (x.shape,), x, "x's")
    y_dtype = _output_dtype(dtype, return_fp32, x)
    if is_distributed((x, residual, weight, bias)):
        options = {"eps": eps, "offset": offset, "casting_mode": casting_mode, "in_place": in_place}
        run = partial(add_rms_norm, **options, dtype=dtype, return_fp32=return_fp32)
        parts = sharding.on_own_rows(run, {"x": x, "residual": residual}, {"weight": weight, "bias": bias})
        return AddedWithFP32(*parts) if return_fp32 else AddedRMSNorm(*parts)
    flags = (eps, offset, casting_mode, in_place, y_dtype, return_fp32, False)
    y, new_residual, fp32, _ = OPERATORS("add_rms_norm", x, residual, weight, bias, *flags)
    return AddedWithFP32(y, new_residual, fp32) if return_fp32 else AddedRMSNorm(y, new_residual)


@overload
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[False] = False,
    **options: Unpack[_GatedOptions],
) -> Tensor: ...


@overload
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    return_fp32: Literal[True],
    **options: Unpack[_GatedOptions],
) -> WithFP32: ...


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    bias: Tensor | None = None,
    offset: float = 0.0,
    casting_mode: str = "llama",
    activation: str = "silu",
    norm_before_gate: bool = True,
    dtype: torch.dtype | None = None,
    return_fp32: bool = False,
) -> Tensor | WithFP32:
    """RMSNorm over the last dimension with a gate, in one pass.

        y = (x / sqrt(mean(x^2) + eps) * (offset + weight) + bias) * act(gate)

    or, norm_before_gate=False, x * act(gate) takes the place of x and y is not gated again:

        y = u / sqrt(mean(u^2) + eps) * (offset + weight) + bias        u = x * act(gate)

    Statistics and arithmetic are fp32; act(gate) is not rounded. The bits of a row depend on the other rows as little as
    those of `rms_norm`, and under autocast nothing is cast.

    Args:
        x: [..., D], fp32, bf16 or fp16 (fp64 too on a CPU). Rows may lie at any stride that takes two levels (heads of a
            fused projection); others are copied first.
        gate: [..., D], x's dtype or fp32, with strides of its own.
        weight, eps, bias, offset: as for `rms_norm`.
        casting_mode: as for `rms_norm`. Where the result is gated, "llama" rounds what is gated to the weight's dtype, and
            "none" to x's.
        activation: "silu", gate * sigmoid(gate), or "sigmoid".
        norm_before_gate: whether the weighted norm is gated (Qwen3-Next, Kimi Linear) or x is (Mamba 2).
        dtype, return_fp32: as for `rms_norm`.

    Returns:
        As `rms_norm`.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060; mamba_ssm's RMSNormGated.
    """
    eps, offset = check(x, weight, bias, eps, offset, casting_mode, False)
    arguments.parameter("gate", gate, (x.shape,), x, "x's")
    arguments.one_of("activation", activation, ACTIVATIONS)
    arguments.flags(norm_before_gate=norm_before_gate)
    y_dtype = _output_dtype(dtype, return_fp32, x)
    if is_distributed((x, gate, weight, bias)):
        options = {"eps": eps, "offset": offset, "casting_mode": casting_mode, "activation": activation}
        run = partial(gated_rms_norm, **options, norm_before_gate=norm_before_gate, dtype=dtype, return_fp32=return_fp32)
        parts = sharding.on_own_rows(run, {"x": x, "gate": gate}, {"weight": weight, "bias": bias})
        return WithFP32(*parts) if return_fp32 else parts
    flags = (offset, casting_mode, activation, norm_before_gate, y_dtype, return_fp32, False)
    y, fp32, _ = OPERATORS("gated_rms_norm", x, gate, weight, bias, eps, *flags)
    return WithFP32(y, fp32) if return_fp32 else y


def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    casting_mode: str,
    in_place: bool,
) -> tuple[float, float]:
    """The arguments that every function has; eps and offset, as floats."""
    arguments.rows("x", x)
    shapes = (x.shape[-1:],) if x.dim() == 1 else (x.shape[-1:], x.shape[-2:])
    arguments.parameter("weight", weight, shapes, x, "x's", or_none=True)
    if bias is not None:
        arguments.parameter("bias", bias, shapes if weight is None else (weight.shape,), x, "x's", or_none=True)
    arguments.one_of("casting_mode", casting_mode, CASTING_MODES)
    arguments.flags(in_place=in_place)
    return arguments.number("eps", eps, least=0, finite=False), arguments.number("offset", offset)


def _output_dtype(dtype: torch.dtype | None, return_fp32: bool, x: Tensor) -> torch.dtype:
    arguments.flags(return_fp32=return_fp32)
    if dtype is None or dtype is x.dtype:
        return x.dtype
    if dtype not in arguments.DTYPES:
        raise TypeError(f"dtype is {dtype!r} and must be torch.float32, torch.bfloat16, torch.float16, x's dtype or None.")
    return dtype
