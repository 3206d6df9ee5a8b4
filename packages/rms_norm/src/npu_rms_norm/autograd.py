"""RMSNorm and its gradient: the public functions, which check their arguments, and the autograd of the operators."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.autograd import Function, apply, forward_mode, needs_gradient
from npu_tiling.pytorch.rows import may_overlap
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from . import sharding
from .operators import OPERATORS
from .reference import CASTING_MODES


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
) -> Tensor:
    """Root mean square normalisation over the last dimension.

        y = x / sqrt(mean(x^2) + eps) * (offset + weight)

    Statistics and arithmetic are fp32. Under autocast nothing is cast: x, weight and y keep their dtypes. Of DTensors, see
    sharding.py, each rank computes its own rows.

    A row of y has the same bits whatever the other rows are, however many, and wherever it stands, among rows that lie
    alike: contiguous ones always do. Of rows in groups that are apart, how many a group has is part of how they lie.

    Args:
        x: [..., D], fp32, bf16 or fp16 (fp64 too on a CPU). Rows may lie at any stride that takes two levels (a slice of a
            wider tensor, heads of a fused projection); others are copied first.
        weight: [D], x's dtype or fp32; None leaves it out.
        eps: added to the mean square.
        offset: added to the weight: 1.0 for Gemma's zero-centred weights.
        casting_mode: what is rounded to x's dtype on the way (nothing, where x is fp32). "llama": x / rms, before it is
            multiplied by the weight. "gemma": nothing but the result. "none": 1 / rms, offset + weight and both products.
        in_place: the backward writes the gradient of x into the memory of the gradient of y, unless that is expanded. Saves
            one tensor of x's size, and is wrong where something else still reads that gradient: another consumer's backward
            that was handed the same tensor, a hook that keeps it, `retain_grad` on y.

    Returns:
        y [..., D] in x's dtype, contiguous.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
    """
    eps, offset = _check(x, weight, eps, offset, casting_mode, in_place)
    if is_distributed((x, weight)):
        run = partial(rms_norm, eps=eps, offset=offset, casting_mode=casting_mode, in_place=in_place)
        return sharding.rms_norm(run, x, weight)
    return OPERATORS("rms_norm", x, weight, eps, offset, casting_mode, in_place, False)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Adds a layer's output to the residual stream and normalises the sum, in one pass.

        new_residual = residual + x        y = rms_norm(new_residual, weight)

    The sum is rounded to the residual's dtype before it is normalised, as two separate steps would do. The bits of a row
    depend on the other rows as little as those of `rms_norm`.

    Args:
        x: [..., D], the layer's output; fp32, bf16 or fp16 (fp64 too on a CPU).
        residual: [..., D], fp32 or x's dtype.
        weight, eps, offset, casting_mode: as for `rms_norm`.
        in_place: as for `rms_norm`, where y and the residual have one dtype; no effect where they differ.

    Returns:
        y [..., D] in x's dtype and new_residual [..., D] in the residual's dtype.

    Raises:
        TypeError, ValueError: as for `rms_norm`.

    Source: arXiv 1910.07467.
    """
    eps, offset = _check(x, weight, eps, offset, casting_mode, in_place)
    arguments.parameter("residual", residual, (x.shape,), x, "x's")
    if is_distributed((x, residual, weight)):
        run = partial(add_rms_norm, eps=eps, offset=offset, casting_mode=casting_mode, in_place=in_place)
        return sharding.add_rms_norm(run, x, residual, weight)
    y, new_residual, _ = OPERATORS("add_rms_norm", x, residual, weight, eps, offset, casting_mode, in_place, False)
    return y, new_residual


def _check(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, in_place: bool
) -> tuple[float, float]:
    """eps and offset, as floats."""
    arguments.rows("x", x)
    arguments.parameter("weight", weight, (x.shape[-1:],), x, "x's", or_none=True)
    arguments.one_of("casting_mode", casting_mode, CASTING_MODES)
    arguments.flags(in_place=in_place)
    return arguments.number("eps", eps, least=0, finite=False), arguments.number("offset", offset)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, casting_mode, in_place):  # type: ignore[no-untyped-def]
        y, rstd = OPERATORS.below_autograd("rms_norm", x, weight, eps, offset, casting_mode, in_place, True)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = (offset, casting_mode, in_place)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, rstd

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        if dy is None:
            return None, None, None, None, None, None
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        dx, dweight = _gradients(ctx, dy, None, need_dx, need_dweight)
        return dx, dweight, None, None, None, None


class _AddRMSNorm(Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, casting_mode, in_place):  # type: ignore[no-untyped-def]
        options = (eps, offset, casting_mode, in_place, True)
        y, total, rstd = OPERATORS.below_autograd("add_rms_norm", x, residual, weight, *options)
        ctx.save_for_backward(total, weight, rstd)
        ctx.options = (offset, casting_mode, in_place)
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, total, rstd

    @staticmethod
    def backward(ctx, dy, dsum, _):  # type: ignore[no-untyped-def]
        need_dx, need_dresidual, need_dweight = ctx.needs_input_grad[:3]
        dtotal, dweight = dsum, None
        if dy is not None:
            dtotal, dweight = _gradients(ctx, dy, dsum, need_dx or need_dresidual, need_dweight)
        dx = dtotal.to(ctx.dtype) if need_dx and dtotal is not None else None
        return dx, dtotal if need_dresidual else None, dweight, None, None, None, None


def _gradients(
    ctx: Any, dy: Tensor, dsum: Tensor | None, need_dx: bool, need_dweight: bool
) -> tuple[Tensor | None, Tensor | None]:
    x, weight, rstd = ctx.saved_tensors
    offset, casting_mode, in_place = ctx.options
    tensors = (dy, dsum, x, weight, rstd)
    written = in_place and need_dx and dy.dtype == x.dtype and not may_overlap(dy)
    if written and not torch.is_grad_enabled() and not forward_mode(tensors):
        dweight = OPERATORS.below_autograd("rms_norm_backward_", *tensors, offset, casting_mode, need_dweight)
        return dy, dweight if need_dweight else None
    dx, dweight = OPERATORS("rms_norm_backward", *tensors, offset, casting_mode, need_dweight, need_dx)
    return dx if need_dx else None, dweight if need_dweight else None


def _rms_norm(x, weight, *options):  # type: ignore[no-untyped-def]
    if needs_gradient((x, weight)):
        return apply(_RMSNorm, x, weight, *options[:-1])
    return OPERATORS.below_autograd("rms_norm", x, weight, *options)


def _add_rms_norm(x, residual, weight, *options):  # type: ignore[no-untyped-def]
    if needs_gradient((x, residual, weight)):
        return apply(_AddRMSNorm, x, residual, weight, *options[:-1])
    return OPERATORS.below_autograd("add_rms_norm", x, residual, weight, *options)


OPERATORS.autograd("rms_norm", _rms_norm)
OPERATORS.autograd("add_rms_norm", _add_rms_norm)
OPERATORS.gradient("rms_norm_backward")
OPERATORS.gradient("rms_norm_backward_")
