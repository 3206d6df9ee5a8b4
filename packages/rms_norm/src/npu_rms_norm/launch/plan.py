"""Which launch runs for tensors of rows, chosen once for equal shapes, strides and dtypes, then looked up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from npu_tiling import Device, LaunchSpec
from npu_tiling.budget.arithmetic import FP32
from npu_tiling.pytorch.rows import RowLayout, layout_of
from torch import Tensor

from .. import tiling


class Plan(NamedTuple):
    """All of a launch that follows from shapes, strides and dtypes: looked up at once in every call but the first.

    Attributes:
        spec: the tiling and what is compiled for it.
        rows: groups of rows, on CUDA None for one, and rows of a group.
        strides: two for each tensor of rows, 0 for each None; on CUDA None where rows lie side by side.
    """

    spec: LaunchSpec
    rows: tuple[int | None, int]
    strides: tuple[int | None, ...]


class Call(NamedTuple):
    """What a plan depends on beside the tensors of rows.

    Attributes:
        read: dtypes of the inputs.
        result: y's dtype, or dx's; None: not wanted.
        rounded_to: what is rounded on the way.
        casting_mode: of the public functions.
        gating: a gate's two options.
        second_output: whether y has another dtype than x, or is wanted in fp32 too.
        per_head: whether each head has its own parameters.
        biased: whether there is a bias.
    """

    read: tuple[torch.dtype | None, ...]
    result: torch.dtype | None
    rounded_to: torch.dtype
    casting_mode: str
    gating: tuple[bool, bool] | None
    second_output: bool
    per_head: bool
    biased: bool


def plan_strided_rows(
    tensors: tuple[Tensor | None, ...], choose: Callable[[tiling.Problem, Device], tiling.Launch], call: Call, device: Device
) -> tuple[tuple[Tensor | None, ...], Plan]:
    """The tensors of rows, copied only if their rows take more than two levels, and the plan; as `choose_plan`."""
    plan = choose_plan(choose, *_geometry(tensors), call, device)
    if plan is None:
        # A tensor that is written to (dx) is contiguous, or it is dy itself and so among them twice.
        tensors = tuple([None if tensor is None else tensor.contiguous() for tensor in tensors])
        plan = choose_plan(choose, *_geometry(tensors), call, device)
        assert plan is not None
    return tensors, plan


def _geometry(tensors: tuple[Tensor | None, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...] | None, ...]]:
    assert tensors[0] is not None
    return tensors[0].shape, tuple([None if tensor is None else tensor.stride() for tensor in tensors])


@functools.lru_cache(maxsize=4096)
def choose_plan(
    choose: Callable[[tiling.Problem, Device], tiling.Launch],
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...] | None, ...],
    call: Call,
    device: Device,
) -> Plan | None:
    """The plan for tensors of rows with these strides.

    Returns:
        None where a tensor must be copied first.
    """
    read, result, rounded_to, casting_mode, gating, second_output, per_head, biased = call
    rows = (_layout_by_head if per_head else layout_of)(shape, [own for own in strides if own is not None])
    if rows is None:
        return None
    found = iter(rows.strides)
    pairs = [(0, 0) if own is None else next(found) for own in strides]
    itemsizes = tuple(dtype.itemsize for dtype in read if dtype is not None)
    outer_stride, inner_stride = (max(own) for own in zip(*pairs, strict=True))
    if per_head:  # in results, which are contiguous
        inner_stride = max(inner_stride, rows.n_outer * shape[-1])
    narrow = any(dtype is not None and dtype.itemsize < FP32 for dtype in (*read, result))
    rounds = rounded_to.itemsize < FP32 and casting_mode != "gemma"
    factors = rounds and casting_mode == "none"
    problem = tiling.Problem(
        rows.n_outer,
        rows.n_inner,
        shape[-1],
        inner_stride,
        outer_stride,
        itemsizes,
        narrow,
        factors,
        gating is not None,
        second_output,
        per_head,
        biased,
        result is not None and result.itemsize == 1,
        rounds,
        result is not None,
    )
    silu, first = gating or (False, False)
    launch = choose(problem, device)
    flags = {
        "ROUND_NORMALISED": rounds,
        "ROUND_FACTORS": factors,
        "ROUND_BF16": rounded_to == torch.bfloat16,
        "GATE_SILU": silu,
        "GATE_FIRST": first,
        "PER_HEAD": per_head,
    }
    side_by_side = shape[-1] if device.kind == "cuda" and launch.form in ("rows", "chunks") else None
    strided = tuple(stride for outer, inner in pairs for stride in (outer, None if inner == side_by_side else inner))
    one_group = device.kind == "cuda" and rows.n_outer == 1 and not per_head
    return Plan(LaunchSpec.of(launch, flags), (None if one_group else rows.n_outer, rows.n_inner), strided)


def _layout_by_head(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> RowLayout | None:
    """The layout of tensors [..., H, D] whose groups are heads; None where other rows take more than one level."""
    rows = layout_of((*shape[:-2], shape[-1]), [(*own[:-2], own[-1]) for own in strides])
    if rows is None or rows.n_outer > 1:
        return None
    pairs = tuple((own[-2], inner) for own, (_, inner) in zip(strides, rows.strides, strict=True))
    return RowLayout(shape[-2], rows.n_inner, pairs)
