"""The operators registered with PyTorch, in its namespace `npu_rms_norm`, and their autograd.

`rms_norm` is the forward of rows of any kind, `rms_norm_backward` its backward, and `rms_norm_backward_` the same with
x's gradient written to that of y. Kernels run on accelerators (launch), the definition on a CPU (cpu.py). A result that is
not asked for is None.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling import device_for
from npu_tiling.pytorch.autograd import Function, apply, forward_mode, is_batched, needs_gradient
from npu_tiling.pytorch.library import OperatorLibrary
from npu_tiling.pytorch.rows import may_overlap
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from . import cpu
from .calls import Backward, Forward
from .launch.backward import launch_backward
from .launch.forward import launch_forward
from .launch.rstd import allocate_rstd, has_heads

OPERATORS = OperatorLibrary("npu_rms_norm")
_SAVED = "Tensor? dsum, Tensor x, Tensor? gate, Tensor? weight, Tensor? bias, Tensor rstd"
_GATE = "str activation, bool norm_before_gate"
_FORWARD = (
    "rms_norm(Tensor x, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias, float eps, float offset,"
    f" str casting_mode, {_GATE}, bool in_place, ScalarType dtype, bool return_fp32, bool save_rstd)"
    " -> (Tensor y, Tensor sum, Tensor fp32, Tensor rstd, Tensor scale)"
)
_OPTIONS = f"float offset, str casting_mode, {_GATE}, ScalarType rounded_to"
_BACKWARD = (
    f"rms_norm_backward(Tensor dy, {_SAVED}, {_OPTIONS}, bool need_dx, bool need_dgate, bool need_dweight, bool need_dbias)"
    " -> (Tensor dx, Tensor dgate, Tensor dweight, Tensor dbias)"
)
_BACKWARD_ = (
    f"rms_norm_backward_(Tensor(a!) dy, {_SAVED}, {_OPTIONS}, bool need_dweight, bool need_dbias)"
    " -> (Tensor dweight, Tensor dbias)"
)


def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Forward(*arguments)
    if call.dtype.itemsize == 1 and forward_mode(arguments):
        raise NotImplementedError("a quantised rms_norm has no forward-mode derivative: y and scale are constants.")
    device = device_for(call.x.device)
    return cpu.forward(call) if device is None else launch_forward(call, device)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Backward(*arguments)
    device = device_for(call.dy.device)
    return cpu.backward(call) if device is None else launch_backward(call, device)


def _backward_(*arguments: Any) -> tuple[Tensor | None, ...]:
    need_dx, need_dgate = True, False
    call = Backward._make((*arguments[:-2], need_dx, need_dgate, *arguments[-2:]))
    device = device_for(call.dy.device)
    if device is not None:
        return launch_backward(call, device, into=call.dy)[2:]
    dx, _, *parameters = cpu.backward(call)
    assert dx is not None
    call.dy.copy_(dx)
    return tuple(parameters)


def _fake_forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    call = Forward(*arguments)
    x, residual = call[:2]
    arithmetic = statistics_dtype((x if residual is None else residual).dtype)
    return (
        torch.empty(x.shape, dtype=call.dtype, device=x.device),
        None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device),
        torch.empty(x.shape, dtype=arithmetic, device=x.device) if call.return_fp32 else None,
        allocate_rstd(x, has_heads(call.weight, call.bias), arithmetic) if call.save_rstd else None,
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if call.dtype.itemsize == 1 else None,
    )


def _fake_gradients(*pairs: tuple[Tensor | None, bool]) -> tuple[Tensor | None, ...]:
    return tuple(
        torch.empty(each.shape, dtype=each.dtype, device=each.device) if needed and each is not None else None
        for each, needed in pairs
    )


def _fake_backward(dy, dsum, x, gate, weight, bias, rstd, *options):  # type: ignore[no-untyped-def]
    return _fake_gradients(*zip((x, gate, weight, bias), options[-4:], strict=True))


def _fake_backward_(dy, dsum, x, gate, weight, bias, rstd, *options):  # type: ignore[no-untyped-def]
    return _fake_gradients(*zip((weight, bias), options[-2:], strict=True))


OPERATORS.define(_FORWARD, _forward, _fake_forward, forward_mode=True)
OPERATORS.define(_BACKWARD, _backward, _fake_backward, forward_mode=True)
OPERATORS.define(_BACKWARD_, _backward_, _fake_backward_)


class _RMSNorm(Function):
    """The gradient of `rms_norm`. A quantised y has none, and the sum keeps its own."""

    @staticmethod
    def forward(ctx, run, x, residual, gate, weight, bias, options):  # type: ignore[no-untyped-def]
        _, offset, casting_mode, activation, norm_before_gate, in_place, dtype, _, save_rstd = options
        quantised = dtype.itemsize == 1
        y, total, fp32, rstd, scale = run(x, residual, gate, weight, bias, *options[:-1], not quantised)
        ctx.quantised, ctx.in_place = quantised, in_place
        ctx.options = (offset, casting_mode, activation, norm_before_gate, x.dtype)
        ctx.set_materialize_grads(False)
        if quantised:
            ctx.mark_non_differentiable(y, scale)
            return y, total, fp32, None, scale
        ctx.save_for_backward(x if total is None else total, gate, weight, bias, rstd)
        if not save_rstd:
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
        dtype = ctx.options[-1]
        dx = du if need_x else None
        if dx is not None and dx.dtype is not dtype:  # of a residual in fp32
            dx = dx.to(dtype)
        return None, dx, du if need_residual else None, *others, None


def _gradients(ctx: Any, dy: Tensor, dsum: Tensor | None, *needs: bool) -> tuple[Tensor | None, ...]:
    """Of what is normalised, the gate, the weight and the bias, each where it is needed."""
    need_x, _, *need_parameters = needs
    x, gate, weight, bias, rstd = ctx.saved_tensors
    tensors, options = (dy, dsum, x, gate, weight, bias, rstd), ctx.options
    in_place = ctx.in_place and need_x and gate is None and dy.dtype == x.dtype
    in_place = in_place and not may_overlap(dy) and not is_batched(dy)
    if in_place and not torch.is_grad_enabled() and not forward_mode(tensors):
        return dy, None, *OPERATORS.below_autograd("rms_norm_backward_", *tensors, *options, *need_parameters)
    gradients: tuple[Tensor | None, ...] = OPERATORS("rms_norm_backward", *tensors, *options, *needs)
    return gradients


def _recorded(run: Any, *arguments: Any) -> Any:
    tensors = arguments[:5]
    return apply(_RMSNorm, run, *tensors, arguments[5:]) if needs_gradient(tensors) else run(*arguments)


OPERATORS.autograd("rms_norm", _recorded)
OPERATORS.gradient("rms_norm_backward")
OPERATORS.gradient("rms_norm_backward_")


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    offset: float,
    casting_mode: str,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
    activation: str = "silu",
    norm_before_gate: bool = True,
    in_place: bool = False,
    return_fp32: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator `rms_norm`: y, the sum, y in fp32, rstd and scale; None for those that are not asked for."""
    save_rstd = False  # autograd asks for it
    options = (eps, offset, casting_mode, activation, norm_before_gate, in_place)
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = OPERATORS(
        "rms_norm", x, residual, gate, weight, bias, *options, dtype, return_fp32, save_rstd
    )
    return results
