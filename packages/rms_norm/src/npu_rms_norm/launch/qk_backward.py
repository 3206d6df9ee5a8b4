"""The launches of the backward of q and k of a fused projection, of which v is a part."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling import Device, LaunchSpec
from npu_tiling.launching.partials import add_partials
from npu_tiling.pytorch.rows import layout_of
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from ..calls import Backward
from ..tiling import Tiling, of_qkv
from .plan import KERNELS, Plan, contiguous, plan_backward


def launch_qk_backward(
    calls: Sequence[Backward], dv: Tensor, into: Sequence[Any], device: Device
) -> tuple[Tensor | None, ...] | None:
    """The gradients of the weights of q and k; those of q, k and v are written to `into`.

    Returns:
        None, and nothing is written, where one launch does not take all three.
    """
    q, k = calls
    if device.kind != "cuda" or not dv.numel():
        return None
    plans = [plan_backward(call, part, device) for call, part in zip(calls, into, strict=False)]
    strides = _strides(plans, calls, dv, into[2])
    if strides is None:
        return None
    (n_outer, n_q_inner), (_, n_k_inner) = plans[0].rows, plans[1].rows
    spec = _spec(plans[0].spec.launch)
    n_q, n_k, n_v = _programs(spec.launch, n_outer, n_q_inner, n_k_inner)
    dweights = [allocate_like(call.weight) if call.need_dweight and call.weight is not None else None for call in calls]
    needs_sums = any(each is not None for each in dweights)
    sums = allocate(dv, (n_q + n_k, dv.shape[-1]), torch.float32) if needs_sums else None
    tensors: tuple[Any, ...] = (q.dy, k.dy, dv, q.x, k.x, *contiguous(q.weight, k.weight, q.rstd, k.rstd), *into, sums)
    scalars = (n_outer, n_q_inner, n_k_inner, n_q, n_k, *strides, plans[0].offset)
    KERNELS.launch("cuda.qk_backward", "qk_backward_kernel", spec, n_q + n_k + n_v, tensors, scalars)
    for dweight, first, stop in zip(dweights, (0, n_q), (n_q, n_q + n_k), strict=True):
        if dweight is not None and sums is not None:
            add_partials(sums[first:stop], dweight, device)
    return tuple(dweights)


def _strides(plans: list[Plan], calls: Sequence[Backward], dv: Tensor, into: Tensor) -> tuple[Any, ...] | None:
    """Of dq, dk, dv, x and dx; None where q, k and v do not lie alike or take other kernels."""
    q, k = plans
    tilings = [plan.spec.launch for plan in plans]
    v = layout_of(dv.shape, (dv.stride(), into.stride()))
    if (
        v is None
        or any(plan.copies or plan.spec.launch.kernel != "rows" or plan.spec.launch.rows == 1 for plan in plans)
        or tilings[0].constants != tilings[1].constants
        or (v.n_outer, v.n_inner) != k.rows
        or q.rows[0] != k.rows[0]
        or (q.offset, q.strides[4:]) != (k.offset, k.strides[4:])
        or v.strides[1] != k.strides[8:]
        or len({(call.dy.dtype, None if call.weight is None else call.weight.dtype) for call in calls}) > 1
    ):
        return None
    return (*q.strides[:2], *k.strides[:2], *v.strides[0], *q.strides[4:6], *q.strides[8:])


@functools.lru_cache(maxsize=4096)
def _spec(tiling: Tiling) -> LaunchSpec:
    """The launch for all three, from the tiling for q."""
    return LaunchSpec.of(of_qkv(tiling), {})


def _programs(tiling: Any, n_outer: int, n_q_inner: int, n_k_inner: int) -> list[int]:
    """Programs of q, k and v, in proportion to the bytes that they move, and no more than tiles."""
    resident = tiling.device.vector_cores * tiling.per_core
    heads, moved = (n_q_inner, n_k_inner, n_k_inner), (3 * n_q_inner, 3 * n_k_inner, 2 * n_k_inner)
    return [
        max(1, min(-(-n_outer * each // tiling.rows), resident * share // sum(moved)))
        for each, share in zip(heads, moved, strict=True)
    ]
