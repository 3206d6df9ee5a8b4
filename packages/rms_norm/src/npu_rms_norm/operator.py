"""The operators in PyTorch's namespace `npu_rms_norm`, and their autograd functions.

`rms_norm` is the forward of all functions but `qk_rms_norm`, `rms_norm_backward` is its backward, and `rms_norm_backward_`
the same with dx written into dy. `qk_rms_norm` and `qk_rms_norm_backward` are those of q and k in a fused projection; `qkv`
calls the former and adds a view of v. Accelerators run plans of kernels, a CPU the definition in reference.py.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from npu_tiling import dispatch
from npu_tiling.calls import derive
from npu_tiling.operators import Operator
from npu_tiling.rows import may_overlap
from torch import Tensor

from . import reference
from .call import QK, Backward, Forward, QKBackward

LIBRARY = dispatch.OperatorLibrary("npu_rms_norm")


FORWARD = Operator(
    LIBRARY,
    "rms_norm",
    Forward,
    ["y", "sum", "fp32", "rstd", "scale"],
    plan=f"{__package__}.plans:forward",
    reference=reference.compute_forward,
    forward_mode=True,
)
BACKWARD = Operator(
    LIBRARY,
    "rms_norm_backward",
    Backward,
    ["dx", "dgate", "dweight", "dbias"],
    plan=f"{__package__}.plans:backward",
    reference=reference.compute_backward,
    forward_mode=True,
    is_gradient=True,
)
BACKWARD_ = Operator(
    LIBRARY,
    "rms_norm_backward_",
    Backward,
    ["dweight", "dbias"],
    plan=f"{__package__}.plans:backward_",
    reference=reference.compute_backward_,
    writes=["dy"],
    fixed={"need_dx": True, "need_dgate": False},
    is_gradient=True,
)
QK_FORWARD = Operator(
    LIBRARY,
    "qk_rms_norm",
    QK,
    ["q", "k", "q_rstd", "k_rstd"],
    plan=f"{__package__}.qk:qk_forward",
    reference=reference.compute_qk_forward,
    forward_mode=True,
)
QK_BACKWARD = Operator(
    LIBRARY,
    "qk_rms_norm_backward",
    QKBackward,
    ["dqkv", "dq_weight", "dk_weight"],
    plan=f"{__package__}.qk:qk_backward",
    reference=reference.compute_qk_backward,
    is_gradient=True,
)


class _RMSNorm(dispatch.Function):
    """Autograd of `rms_norm`. Where y is quantised, the sum alone has a gradient; else rstd is saved for the backward."""

    @staticmethod
    def forward(ctx, run, x, residual, gate, weight, bias, options):  # type: ignore[no-untyped-def]
        # `options` follow the tensors in a record; the last, save_rstd, says whether the caller asked for rstd.
        call = ctx.call = Forward(None, None, None, None, None, *options)
        quantised = ctx.quantised = call.dtype.itemsize == 1
        y, total, fp32, rstd, scale = run(x, residual, gate, weight, bias, *options[:-1], not quantised)
        ctx.x_dtype = x.dtype
        ctx.set_materialize_grads(False)
        if quantised:
            ctx.mark_non_differentiable(y, scale)
            return y, total, fp32, None, scale
        dispatch.save_tensors(ctx, x if total is None else total, gate, weight, bias, rstd)
        if not call.save_rstd:
            return y, total, fp32, None, None
        ctx.mark_non_differentiable(rstd)
        return y, total, fp32, rstd, None

    @staticmethod
    def backward(ctx, dy, dsum, dfp32, *_):  # type: ignore[no-untyped-def]
        _, need_x, need_residual, *needs, _ = ctx.needs_input_grad
        if dfp32 is not None:
            dy = dfp32 if dy is None else dfp32 + dy
        du, others = dsum, (None, None, None)
        if dy is not None and not ctx.quantised:
            du, *others = _gradients(ctx, dy, dsum, need_x or need_residual, *needs)
        dx = du if need_x else None
        if dx is not None and dx.dtype is not ctx.x_dtype:  # it has the dtype of the sum, fp32 with an fp32 residual
            dx = dx.to(ctx.x_dtype)
        return None, dx, du if need_residual else None, *others, None


def _gradients(
    ctx: Any, dy: Tensor, dsum: Tensor | None, need_x: bool, need_gate: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of the forward's x or sum, the gate, the weight and the bias; None for what is not needed."""
    x, gate, weight, bias, rstd = ctx.saved_tensors
    needs = {"need_dx": need_x, "need_dgate": need_gate, "need_dweight": need_weight, "need_dbias": need_bias}
    tensors = {"dy": dy, "dsum": dsum, "x": x, "gate": gate, "weight": weight, "bias": bias, "rstd": rstd}
    call = derive(Backward, ctx.call, **tensors, rounded_to=ctx.x_dtype, **needs)
    in_place = ctx.call.in_place and need_x and gate is None and dy.dtype == x.dtype
    in_place = in_place and not may_overlap(dy) and not dispatch.is_batched(dy)
    if in_place and not torch.is_grad_enabled() and not dispatch.forward_mode(call):
        return dy, None, *BACKWARD_.below_autograd(call)
    gradients: tuple[Tensor | None, ...] = BACKWARD(call)
    return gradients


class _QKRMSNorm(dispatch.Function):
    """Autograd of `qkv` (with_v) and of `qk_rms_norm`."""

    @staticmethod
    def forward(ctx, run, qkv, q_weight, k_weight, n_heads, n_kv_heads, eps, offset, casting_mode, with_v):  # type: ignore[no-untyped-def]
        tensors, heads, save_rstd = (qkv, q_weight, k_weight), (n_heads, n_kv_heads), True
        q, k, q_rstd, k_rstd = run(*tensors, *heads, eps, offset, casting_mode, save_rstd)
        q, k = dispatch.unviewed(q), dispatch.unviewed(k)
        ctx.options = (*heads, offset, casting_mode)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(q_rstd, k_rstd)
        dispatch.save_tensors(ctx, *tensors, q_rstd, k_rstd)
        with dispatch.outer_levels() if dispatch.is_in_transform() else contextlib.nullcontext():
            v = reference.values(qkv, *heads) if with_v else None
        return q, k, q_rstd, k_rstd, v

    @staticmethod
    def backward(ctx, dq, dk, _, __, dv):  # type: ignore[no-untyped-def]
        if dq is None and dk is None and dv is None:
            return (None,) * 10
        need_dqkv, need_dq_weight, need_dk_weight = ctx.needs_input_grad[1:4]
        needs = (need_dqkv, need_dq_weight and dq is not None, need_dk_weight and dk is not None)
        gradients = QK_BACKWARD(QKBackward(dq, dk, dv, *ctx.saved_tensors, *ctx.options, *needs))
        return None, *gradients, *(None,) * 6


def _with_gradient(run: Any, *arguments: Any) -> Any:
    return dispatch.apply(_RMSNorm, run, *arguments[:5], arguments[5:])


def _qk_with_gradient(run: Any, *arguments: Any) -> Any:
    q, k, q_rstd, k_rstd, _ = dispatch.apply(_QKRMSNorm, run, *arguments[:-1], False)
    return q, k, q_rstd, k_rstd


def _qkv(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    qkv, _, _, n_heads, n_kv_heads = arguments[:5]
    if dispatch.needs_gradient((qkv,)) and not dispatch.forward_mode(arguments):
        run = partial(LIBRARY.below_autograd, "qk_rms_norm")
        q, k, _, _, v = dispatch.apply(_QKRMSNorm, run, *arguments, True)
        return q, k, v
    save_rstd = False  # `_QKRMSNorm` sets it where autograd records the call
    q, k, *_ = QK_FORWARD(QK._make((*arguments, save_rstd)))
    return q, k, reference.values(qkv, n_heads, n_kv_heads)


FORWARD.autograd(_with_gradient)
QK_FORWARD.autograd(_qk_with_gradient)
_WEIGHTS, _HEADS = "Tensor? q_weight, Tensor? k_weight", "int n_heads, int n_kv_heads"
LIBRARY.compose(
    f"qkv(Tensor(a) qkv, {_WEIGHTS}, {_HEADS}, float eps, float offset, str casting_mode)"
    " -> (Tensor q, Tensor k, Tensor(a) v)",
    _qkv,
)


def qkv(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v. The arguments are the fields of a `QK` in order, without save_rstd."""
    results: tuple[Tensor, Tensor, Tensor] = LIBRARY("qkv", *arguments)
    return results
