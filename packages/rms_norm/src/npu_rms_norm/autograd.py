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
    def forward(ctx, x, weight, bias, eps, offset, casting_mode, in_place, dtype, return_fp32):  # type: ignore[no-untyped-def]
        options = (eps, offset, casting_mode, in_place, dtype, return_fp32, True)
        y, fp32, rstd = OPERATORS.below_autograd("rms_norm", x, weight, bias, *options)
        ctx.save_for_backward(x, weight, bias, rstd)
        ctx.options = (offset, casting_mode, x.dtype, in_place)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, fp32 if return_fp32 else None, rstd

    @staticmethod
    def backward(ctx, dy, dfp32, _):  # type: ignore[no-untyped-def]
        dy, found = _total(dy, dfp32), (None, None, None)
        if dy is not None:
            found = _gradients(ctx, dy, None, *ctx.needs_input_grad[:3])
        return *found, None, None, None, None, None, None


class _AddRMSNorm(Function):
    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, *settings):  # type: ignore[no-untyped-def]
        y, total, fp32, rstd = OPERATORS.below_autograd("add_rms_norm", x, residual, weight, bias, eps, *settings, True)
        offset, casting_mode, in_place, _, return_fp32 = settings
        ctx.save_for_backward(total, weight, bias, rstd)
        ctx.options = (offset, casting_mode, x.dtype, in_place)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, total, fp32 if return_fp32 else None, rstd

    @staticmethod
    def backward(ctx, dy, dsum, dfp32, _):  # type: ignore[no-untyped-def]
        need_dx, need_dresidual, *needs = ctx.needs_input_grad[:4]
        dy, dtotal, parameters = _total(dy, dfp32), dsum, [None, None]
        if dy is not None:
            dtotal, *parameters = _gradients(ctx, dy, dsum, need_dx or need_dresidual, *needs)
        _, _, dtype, _ = ctx.options
        dx = dtotal.to(dtype) if need_dx and dtotal is not None else None
        return dx, dtotal if need_dresidual else None, *parameters, None, None, None, None, None, None


def _total(dy: Tensor | None, dfp32: Tensor | None) -> Tensor | None:
    """The gradient of the result, of which there are two."""
    if dy is None or dfp32 is None:
        return dfp32 if dy is None else dy
    return dfp32 + dy


def _gradients(
    ctx: Any, dy: Tensor, dsum: Tensor | None, need_dx: bool, *needs: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, weight and bias, of which the last two are needed or not."""
    x, weight, bias, rstd = ctx.saved_tensors
    *options, in_place = ctx.options
    tensors = (dy, dsum, x, weight, bias, rstd)
    written = in_place and need_dx and dy.dtype == x.dtype and not may_overlap(dy)
    if written and not torch.is_grad_enabled() and not forward_mode(tensors):
        found = (dy, *OPERATORS.below_autograd("rms_norm_backward_", *tensors, *options, *needs))
    else:
        found = OPERATORS("rms_norm_backward", *tensors, *options, *needs, need_dx)
    dx, dweight, dbias = (one if needed else None for one, needed in zip(found, (need_dx, *needs), strict=True))
    return dx, dweight, dbias


class _GatedRMSNorm(Function):
    @staticmethod
    def forward(ctx, x, gate, weight, bias, eps, *options):  # type: ignore[no-untyped-def]
        y, fp32, rstd = OPERATORS.below_autograd("gated_rms_norm", x, gate, weight, bias, eps, *options, True)
        ctx.save_for_backward(x, gate, weight, bias, rstd)
        *ctx.options, _, return_fp32 = options
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, fp32 if return_fp32 else None, rstd

    @staticmethod
    def backward(ctx, dy, dfp32, _):  # type: ignore[no-untyped-def]
        dy, none = _total(dy, dfp32), (None,) * (3 + len(ctx.options))
        if dy is None:
            return None, None, None, None, *none
        needs = need_dx, need_dgate, *parameters = ctx.needs_input_grad[:4]
        wanted = (*parameters, need_dx, need_dgate)
        found = OPERATORS("gated_rms_norm_backward", dy, *ctx.saved_tensors, *ctx.options, *wanted)
        return *(one if needed else None for one, needed in zip(found, needs, strict=True)), *none


def _recorded(name: str, function: type[Any], tensors: int) -> None:
    """The operator where autograd may record it: `tensors` arguments that may need a gradient, then its options."""

    def run(*arguments: Any) -> Any:
        if needs_gradient(arguments[:tensors]):
            return apply(function, *arguments[:-1])
        return OPERATORS.below_autograd(name, *arguments)

    OPERATORS.autograd(name, run)


class _AddDynamicQuant(Function):
    """The sum has its gradient; what is quantised has none."""

    @staticmethod
    def forward(ctx, x, residual, *options):  # type: ignore[no-untyped-def]
        y, total, scale = OPERATORS.below_autograd("add_rms_norm_dynamic_quant", x, residual, *options)
        ctx.mark_non_differentiable(y, scale)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.others = x.dtype, len(options)
        return y, total, scale

    @staticmethod
    def backward(ctx, _, dsum, __):  # type: ignore[no-untyped-def]
        need_dx, need_dresidual = ctx.needs_input_grad[:2]
        dx = dsum.to(ctx.dtype) if need_dx and dsum is not None else None
        return dx, dsum if need_dresidual else None, *(None,) * ctx.others


def _add_dynamic_quant(*arguments: Any) -> Any:
    if needs_gradient(arguments[:4]):
        return apply(_AddDynamicQuant, *arguments)
    return OPERATORS.below_autograd("add_rms_norm_dynamic_quant", *arguments)


def _dynamic_quant(*arguments: Any) -> Any:
    with torch.no_grad():
        return OPERATORS.below_autograd("rms_norm_dynamic_quant", *arguments)


OPERATORS.autograd("rms_norm_dynamic_quant", _dynamic_quant)
OPERATORS.autograd("add_rms_norm_dynamic_quant", _add_dynamic_quant)
_recorded("rms_norm", _RMSNorm, 3)
_recorded("add_rms_norm", _AddRMSNorm, 4)
_recorded("gated_rms_norm", _GatedRMSNorm, 4)
OPERATORS.gradient("rms_norm_backward")
OPERATORS.gradient("rms_norm_backward_")
OPERATORS.gradient("gated_rms_norm_backward")
