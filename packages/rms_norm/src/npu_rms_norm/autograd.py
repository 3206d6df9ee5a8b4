"""The gradients of the operators: which of them autograd records, what it keeps and what it calls."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.pytorch.autograd import Function, apply, forward_mode, needs_gradient
from npu_tiling.pytorch.rows import may_overlap
from torch import Tensor

from .operators import OPERATORS


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, casting_mode, in_place, dtype, return_fp32):  # type: ignore[no-untyped-def]
        options = (eps, offset, casting_mode, in_place, dtype, return_fp32, True)
        y, fp32, rstd = OPERATORS.below_autograd("rms_norm", x, weight, *options)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options = (offset, casting_mode, x.dtype, in_place)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, fp32 if return_fp32 else None, rstd

    @staticmethod
    def backward(ctx, dy, dfp32, _):  # type: ignore[no-untyped-def]
        dy, dx, dweight = _total(dy, dfp32), None, None
        if dy is not None:
            need_dx, need_dweight = ctx.needs_input_grad[:2]
            dx, dweight = _gradients(ctx, dy, None, need_dx, need_dweight)
        return dx, dweight, None, None, None, None, None, None


class _AddRMSNorm(Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, casting_mode, in_place, dtype, return_fp32):  # type: ignore[no-untyped-def]
        options = (eps, offset, casting_mode, in_place, dtype, return_fp32, True)
        y, total, fp32, rstd = OPERATORS.below_autograd("add_rms_norm", x, residual, weight, *options)
        ctx.save_for_backward(total, weight, rstd)
        ctx.options = (offset, casting_mode, x.dtype, in_place)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, total, fp32 if return_fp32 else None, rstd

    @staticmethod
    def backward(ctx, dy, dsum, dfp32, _):  # type: ignore[no-untyped-def]
        need_dx, need_dresidual, need_dweight = ctx.needs_input_grad[:3]
        dy, dtotal, dweight = _total(dy, dfp32), dsum, None
        if dy is not None:
            dtotal, dweight = _gradients(ctx, dy, dsum, need_dx or need_dresidual, need_dweight)
        _, _, dtype, _ = ctx.options
        dx = dtotal.to(dtype) if need_dx and dtotal is not None else None
        return dx, dtotal if need_dresidual else None, dweight, None, None, None, None, None, None


def _total(dy: Tensor | None, dfp32: Tensor | None) -> Tensor | None:
    """The gradient of the result, of which there are two."""
    if dy is None or dfp32 is None:
        return dfp32 if dy is None else dy
    return dfp32 + dy


def _gradients(
    ctx: Any, dy: Tensor, dsum: Tensor | None, need_dx: bool, need_dweight: bool
) -> tuple[Tensor | None, Tensor | None]:
    x, weight, rstd = ctx.saved_tensors
    *options, in_place = ctx.options
    tensors = (dy, dsum, x, weight, rstd)
    written = in_place and need_dx and dy.dtype == x.dtype and not may_overlap(dy)
    if written and not torch.is_grad_enabled() and not forward_mode(tensors):
        dweight = OPERATORS.below_autograd("rms_norm_backward_", *tensors, *options, need_dweight)
        return dy, dweight if need_dweight else None
    dx, dweight = OPERATORS("rms_norm_backward", *tensors, *options, need_dweight, need_dx)
    return dx if need_dx else None, dweight if need_dweight else None


class _GatedRMSNorm(Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps, *options):  # type: ignore[no-untyped-def]
        y, rstd = OPERATORS.below_autograd("gated_rms_norm", x, gate, weight, eps, *options, True)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.options = options
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, rstd

    @staticmethod
    def backward(ctx, dy, _):  # type: ignore[no-untyped-def]
        none = (None,) * (1 + len(ctx.options))
        if dy is None:
            return None, None, None, *none
        needs = need_dx, need_dgate, need_dweight = ctx.needs_input_grad[:3]
        wanted = (need_dweight, need_dx, need_dgate)
        found = OPERATORS("gated_rms_norm_backward", dy, *ctx.saved_tensors, *ctx.options, *wanted)
        return *(one if needed else None for one, needed in zip(found, needs, strict=True)), *none


def _rms_norm(x, weight, *options):  # type: ignore[no-untyped-def]
    if needs_gradient((x, weight)):
        return apply(_RMSNorm, x, weight, *options[:-1])
    return OPERATORS.below_autograd("rms_norm", x, weight, *options)


def _add_rms_norm(x, residual, weight, *options):  # type: ignore[no-untyped-def]
    if needs_gradient((x, residual, weight)):
        return apply(_AddRMSNorm, x, residual, weight, *options[:-1])
    return OPERATORS.below_autograd("add_rms_norm", x, residual, weight, *options)


def _gated_rms_norm(x, gate, weight, *options):  # type: ignore[no-untyped-def]
    if needs_gradient((x, gate, weight)):
        return apply(_GatedRMSNorm, x, gate, weight, *options[:-1])
    return OPERATORS.below_autograd("gated_rms_norm", x, gate, weight, *options)


OPERATORS.autograd("rms_norm", _rms_norm)
OPERATORS.autograd("add_rms_norm", _add_rms_norm)
OPERATORS.autograd("gated_rms_norm", _gated_rms_norm)
OPERATORS.gradient("rms_norm_backward")
OPERATORS.gradient("rms_norm_backward_")
OPERATORS.gradient("gated_rms_norm_backward")
