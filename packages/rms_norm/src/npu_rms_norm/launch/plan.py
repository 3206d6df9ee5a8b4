"""From tensors to a tiling: chosen once for equal shapes, strides, dtypes and options, then looked up."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from npu_tiling import Device, LaunchSpec, row_layout
from npu_tiling.budget.arithmetic import FP32
from npu_tiling.pytorch.rows import RowLayout, layout_of
from torch import Tensor

from ..shape import MAX_COUNTED_ROWS, Rounding, Shape
from ..tiling import choose

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Call(NamedTuple):
    """What a shape depends on, sizes and strides aside.

    Attributes:
        backward: its direction.
        device: the chip.
        read: dtypes of the tensors of rows that are read; None for each that is missing.
        result: y's dtype or dx's; None: not needed.
        rounded_to: x's dtype, which the casting mode rounds to.
        weight: its dtype; None: there is no weight.
        casting_mode: of the public functions.
        activation: of the gate; "": there is no gate.
        gate_first: x is gated, and not the result.
        second_output: y has another dtype than x, or is stored in fp32 too.
        per_head: each head has parameters of its own.
        biased: a bias is added.
        adds_offset: as `Shape` has it.
    """

    backward: bool
    device: Device
    read: tuple[torch.dtype | None, ...]
    result: torch.dtype | None
    rounded_to: torch.dtype
    weight: torch.dtype | None
    casting_mode: str
    activation: str
    gate_first: bool
    second_output: bool
    per_head: bool
    biased: bool
    adds_offset: bool


class Plan(NamedTuple):
    """All of a launch that does not depend on addresses.

    Attributes:
        spec: the tiling, and what is compiled for it.
        rows: groups, and rows of a group.
        strides: two for each tensor of rows, 0 for each None; on CUDA None for rows that lie side by side.
    """

    spec: LaunchSpec
    rows: tuple[int, int]
    strides: tuple[int | None, ...]


def plan_rows(tensors: tuple[Tensor | None, ...], call: Call) -> tuple[tuple[Tensor | None, ...], Plan]:
    """The tensors of rows, copied only where their rows take more than two levels of strides, and the plan."""
    plan = _plan(*_geometry(tensors), call)
    if plan is None:
        # A tensor that is written to (dx) is contiguous, or it is dy itself and so among them twice.
        tensors = tuple([None if tensor is None else tensor.contiguous() for tensor in tensors])
        plan = _plan(*_geometry(tensors), call)
        assert plan is not None
    return tensors, plan


def is_followed(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether kernels read the rows of these tensors where they lie."""
    rows = row_layout(*[tensor for tensor in tensors if tensor is not None])
    return rows is not None and not _has_too_many(rows)


def _has_too_many(rows: RowLayout) -> bool:
    """Whether groups have more rows than kernels count."""
    return rows.n_outer > 1 and rows.n_outer * rows.n_inner > MAX_COUNTED_ROWS


def _geometry(tensors: tuple[Tensor | None, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...] | None, ...]]:
    assert tensors[0] is not None
    return tensors[0].shape, tuple([None if tensor is None else tensor.stride() for tensor in tensors])


@functools.lru_cache(maxsize=4096)
def _plan(sizes: tuple[int, ...], strides: tuple[tuple[int, ...] | None, ...], call: Call) -> Plan | None:
    """None: a tensor must be copied first."""
    given = [stride for stride in strides if stride is not None]
    rows = (layout_by_head if call.per_head else layout_of)(sizes, given)
    if rows is None or (not call.per_head and _has_too_many(rows)):
        return None
    followed = iter(rows.strides)
    pairs = [(0, 0) if stride is None else next(followed) for stride in strides]
    shape = _shape(sizes[-1], rows, pairs, call)
    tiling = choose(shape, call.device)
    # Distances between rows that lie side by side are known to the compiler.
    known = shape.width if call.device.kind == "cuda" and tiling.kernel == "rows" else None
    flat = tuple(stride for outer, inner in pairs for stride in (outer, None if inner == known else inner))
    return Plan(LaunchSpec.of(tiling, {}), (rows.n_outer, rows.n_inner), flat)


def _shape(width: int, rows: RowLayout, pairs: list[tuple[int, int]], call: Call) -> Shape:
    outer_stride, inner_stride = (max(strides) for strides in zip(*pairs, strict=True))
    if call.per_head:  # in results, which are contiguous
        inner_stride = max(inner_stride, rows.n_outer * width)
    weight = None if call.weight is None else _NAMES[call.weight]
    return Shape(
        backward=call.backward,
        n_outer=rows.n_outer,
        n_inner=rows.n_inner,
        width=width,
        outer_stride=outer_stride,
        inner_stride=inner_stride,
        itemsizes=tuple(dtype.itemsize for dtype in call.read if dtype is not None),
        narrow=any(dtype is not None and dtype.itemsize < FP32 for dtype in (*call.read, call.result)),
        rounding=Rounding.of(call.casting_mode, _NAMES[call.rounded_to], weight),
        activation=call.activation,
        gate_first=call.gate_first,
        second_output=call.second_output,
        per_head=call.per_head,
        biased=call.biased,
        adds_offset=call.adds_offset,
        quantised=call.result is not None and call.result.itemsize == 1,
        with_rows=call.result is not None,
    )


def layout_by_head(sizes: tuple[int, ...], strides: list[tuple[int, ...]]) -> RowLayout | None:
    """The layout of tensors [..., H, D] whose groups are heads; None where other rows take more than one level."""
    rows = layout_of((*sizes[:-2], sizes[-1]), [(*stride[:-2], stride[-1]) for stride in strides])
    if rows is None or rows.n_outer > 1:
        return None
    pairs = tuple((stride[-2], inner) for stride, (_, inner) in zip(strides, rows.strides, strict=True))
    return RowLayout(sizes[-2], rows.n_inner, pairs)
