"""The operators of `qk_rms_norm`, registered with PyTorch, and their autograd.

`qkv` is made of `qk_rms_norm` and a view of the values. In the backward of both, `qk_rms_norm_backward`, each part of the
projection's gradient is written where it stays: on CUDA in one launch where it can follow all three, else those of q and k
by the kernels of `rms_norm`, as slices of one tensor.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from npu_tiling import Device, device_for
from npu_tiling.pytorch.autograd import Function, apply, forward_mode, is_in_transform, needs_gradient, outer_levels
from npu_tiling.pytorch.tensors import allocate, statistics_dtype
from torch import Tensor

from . import cpu
from .calls import Backward, Forward
from .launch.backward import launch_backward
from .launch.forward import launch_forward
from .launch.qk_backward import launch_qk_backward
from .operators import OPERATORS

_HEADS = "int n_heads, int n_kv_heads"
_WEIGHTS = "Tensor? q_weight, Tensor? k_weight"
_QKV = (
    f"qkv(Tensor(a) qkv, {_WEIGHTS}, {_HEADS}, float eps, float offset, str casting_mode)"
    " -> (Tensor q, Tensor k, Tensor(a) v)"
)
_FORWARD = (
    f"qk_rms_norm(Tensor qkv, {_WEIGHTS}, {_HEADS}, float eps, float offset, str casting_mode, bool save_rstd)"
    " -> (Tensor q, Tensor k, Tensor q_rstd, Tensor k_rstd)"
)
_BACKWARD = (
    f"qk_rms_norm_backward(Tensor? dq, Tensor? dk, Tensor? dv, Tensor qkv, {_WEIGHTS}, Tensor q_rstd, Tensor k_rstd,"
    f" {_HEADS}, float offset, str casting_mode, bool need_dqkv, bool need_dq_weight, bool need_dk_weight)"
    " -> (Tensor dqkv, Tensor dq_weight, Tensor dk_weight)"
)
_NO_GATE = ("silu", True)  # activation and norm_before_gate, which nothing reads


def split(qkv: Tensor, n_heads: int, n_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [..., n_heads, D], k and v [..., n_kv_heads, D]: views."""
    width = qkv.shape[-1] // (n_heads + 2 * n_kv_heads)
    firsts, heads = (0, n_heads, n_heads + n_kv_heads), (n_heads, n_kv_heads, n_kv_heads)
    q, k, v = (
        qkv.narrow(-1, first * width, own * width).unflatten(-1, (own, width))
        for first, own in zip(firsts, heads, strict=True)
    )
    return q, k, v


def _rows(part: Tensor, weight: Tensor | None) -> Tensor:
    """What is normalised: each head, or the heads of a token together where they share a weight as wide as all of them."""
    return part if weight is None or weight.shape[0] == part.shape[-1] else part.flatten(-2)


def _forward(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, n_heads, n_kv_heads, eps, offset, casting_mode, save_rstd
) -> tuple[Tensor | None, ...]:
    device, results = device_for(qkv.device), []
    for part, weight in zip(split(qkv, n_heads, n_kv_heads), (q_weight, k_weight), strict=False):
        in_place = return_fp32 = False
        options = (eps, offset, casting_mode, *_NO_GATE, in_place, qkv.dtype, return_fp32, save_rstd)
        call = Forward(_rows(part, weight), None, None, weight, None, *options)
        y, _, _, rstd, _ = cpu.forward(call) if device is None else launch_forward(call, device)
        assert y is not None
        results.append((y.view(part.shape), rstd))
    (q, q_rstd), (k, k_rstd) = results
    return q, k, q_rstd, k_rstd


def _backward(  # type: ignore[no-untyped-def]
    dq, dk, dv, qkv, q_weight, k_weight, q_rstd, k_rstd, n_heads, n_kv_heads, offset, casting_mode, need_dqkv, *need_weights
) -> tuple[Tensor | None, ...]:
    dqkv = allocate(qkv, qkv.shape, qkv.dtype) if need_dqkv else None
    q, k, _ = split(qkv, n_heads, n_kv_heads)
    into = (None, None, None) if dqkv is None else split(dqkv, n_heads, n_kv_heads)
    device, saved = device_for(qkv.device), ((q, q_weight, q_rstd), (k, k_weight, k_rstd))
    calls: list[Any] = [
        None if dy is None else _call(dy, *each, offset, casting_mode, dqkv is not None, need)
        for dy, each, need in zip((dq, dk), saved, need_weights, strict=True)
    ]
    parts: list[Any] = [None if part is None else _rows(part, each[1]) for part, each in zip(into, saved, strict=False)]
    if dqkv is not None and None not in calls and dv is not None and device is not None:
        dweights = launch_qk_backward(calls, dv, [*parts, into[2]], device)
        if dweights is not None:
            return dqkv, *dweights
    if into[2] is not None and dv is not None:
        _copy(into[2], dv)
    for dy, part in zip((dq, dk, dv), into, strict=True):
        if part is not None and dy is None:
            part.zero_()
    return dqkv, *[None if call is None else _run(call, part, device) for call, part in zip(calls, parts, strict=True)]


def _copy(into: Tensor, dv: Tensor) -> None:
    """Copies rows of any strides, on CUDA as 64-bit integers where that is possible: PyTorch copies an element a thread."""
    if dv.is_cuda and dv.dtype == into.dtype and _has_words(into) and _has_words(dv):
        into, dv = into.view(torch.int64), dv.view(torch.int64)
    into.copy_(dv)


def _has_words(tensor: Tensor) -> bool:
    """Whether the memory of a tensor can be read as 64-bit integers that lie in one row each."""
    ratio, (*strides, last) = 8 // tensor.element_size(), tensor.stride()
    counts = (tensor.shape[-1], tensor.storage_offset(), *strides)
    return last == 1 and tensor.data_ptr() % 8 == 0 and not any(count % ratio for count in counts)


def _call(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting_mode: str,
    need_dx: bool,
    need_dweight: bool,
) -> Backward:
    """The backward of one of the two norms."""
    dy, x, need_dgate, need_dbias = _rows(dy, weight), _rows(x, weight), False, False
    options = (offset, casting_mode, *_NO_GATE, x.dtype, need_dx, need_dgate, need_dweight, need_dbias)
    return Backward(dy, None, x, None, weight, None, rstd, *options)


def _run(call: Backward, into: Tensor | None, device: Device | None) -> Tensor | None:
    """Writes the gradient of x to `into`, where there is that; returns the weight's."""
    if device is not None:
        return launch_backward(call, device, into)[2]
    dx, _, dweight, _ = cpu.backward(call)
    if into is not None and dx is not None:
        into.copy_(dx)
    return dweight


def _fake_forward(  # type: ignore[no-untyped-def]
    qkv, q_weight, k_weight, n_heads, n_kv_heads, eps, offset, casting_mode, save_rstd
):
    make = lambda shape, dtype: torch.empty(shape, dtype=dtype, device=qkv.device)  # noqa: E731
    q, k, _ = split(qkv, n_heads, n_kv_heads)
    rstd = [
        make(_rows(part, weight).shape[:-1], statistics_dtype(qkv.dtype)) if save_rstd else None
        for part, weight in ((q, q_weight), (k, k_weight))
    ]
    return make(q.shape, qkv.dtype), make(k.shape, qkv.dtype), *rstd


def _fake_backward(dq, dk, dv, qkv, q_weight, k_weight, *rest):  # type: ignore[no-untyped-def]
    need_dqkv, need_dq_weight, need_dk_weight = rest[-3:]
    needed = ((qkv, need_dqkv), (q_weight, need_dq_weight and dq is not None), (k_weight, need_dk_weight and dk is not None))
    return tuple(torch.empty(each.shape, dtype=each.dtype, device=each.device) if need else None for each, need in needed)


class _QKRMSNorm(Function):
    """The gradient of `qkv`, and of `qk_rms_norm`, which has no v."""

    @staticmethod
    def forward(ctx, run, qkv, q_weight, k_weight, n_heads, n_kv_heads, eps, offset, casting_mode, with_v):  # type: ignore[no-untyped-def]
        tensors, heads, save_rstd = (qkv, q_weight, k_weight), (n_heads, n_kv_heads), True
        q, k, q_rstd, k_rstd = run(*tensors, *heads, eps, offset, casting_mode, save_rstd)
        ctx.options = (*heads, offset, casting_mode)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(q_rstd, k_rstd)
        ctx.save_for_backward(*tensors, q_rstd, k_rstd)
        with outer_levels() if is_in_transform() else contextlib.nullcontext():
            v = split(qkv, *heads)[2] if with_v else None
        return q, k, q_rstd, k_rstd, v

    @staticmethod
    def backward(ctx, dq, dk, _, __, dv):  # type: ignore[no-untyped-def]
        if dq is None and dk is None and dv is None:
            return (None,) * 10
        need_dqkv, need_dq_weight, need_dk_weight = ctx.needs_input_grad[1:4]
        needs = (need_dqkv, need_dq_weight and dq is not None, need_dk_weight and dk is not None)
        gradients = OPERATORS("qk_rms_norm_backward", dq, dk, dv, *ctx.saved_tensors, *ctx.options, *needs)
        return None, *gradients, *(None,) * 6


def _recorded(run: Any, *arguments: Any) -> Any:
    if needs_gradient(arguments):
        q, k, q_rstd, k_rstd, _ = apply(_QKRMSNorm, run, *arguments[:-1], False)
        return q, k, q_rstd, k_rstd
    return run(*arguments)


def _qkv(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    qkv, _, _, *heads = arguments[:5]
    if needs_gradient((qkv,)) and not forward_mode(arguments):
        q, k, _, _, v = apply(_QKRMSNorm, partial(OPERATORS.below_autograd, "qk_rms_norm"), *arguments, True)
        return q, k, v
    save_rstd = False  # autograd asks for it
    q, k, *_ = OPERATORS("qk_rms_norm", *arguments, save_rstd)
    return q, k, split(qkv, *heads)[2]


OPERATORS.define(_FORWARD, _forward, _fake_forward, forward_mode=True)
OPERATORS.define(_BACKWARD, _backward, _fake_backward)
OPERATORS.autograd("qk_rms_norm", _recorded)
OPERATORS.gradient("qk_rms_norm_backward")
OPERATORS.compose(_QKV, _qkv)
