"""From tensors to a tiling: chosen once for equal shapes, strides, dtypes and options, then looked up."""

from __future__ import annotations

import functools
import itertools
from operator import mul
from typing import Any, NamedTuple

import torch
from npu_tiling import Device, Kernels, LaunchSpec
from npu_tiling.budget.arithmetic import FP32
from npu_tiling.pytorch.rows import RowLayout, layout_of
from torch import Tensor

from ..calls import Backward, Forward
from ..shape import MAX_COUNTED_ROWS, Rounding, Shape
from ..tiling import choose
from .rstd import has_heads

KERNELS = Kernels(__package__.rpartition(".")[0], "npu-rms-norm")
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Metadata(NamedTuple):
    """What a plan depends on of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def dim(self) -> int:
        return len(self.sizes)

    def contiguous(self) -> Metadata:
        """The metadata of a contiguous copy."""
        strides = itertools.accumulate(reversed(self.sizes[1:]), mul, initial=1)
        return self._replace(strides=tuple(strides)[::-1])


class Plan(NamedTuple):
    """All of a launch that does not depend on addresses.

    Attributes:
        copies: tensors of rows are copied first, since their rows take more than two levels of strides.
        per_head: each head has parameters of its own.
        spec: the tiling, and what is compiled for it.
        rows: groups, and rows of a group.
        strides: two for each tensor of rows, 0 for each None.
        offset: None on CUDA for 0 and a 16-bit weight: without that sum the compiler multiplies in 16 bits. Bits are equal.
    """

    copies: bool
    per_head: bool
    spec: LaunchSpec
    rows: tuple[int, int]
    strides: tuple[int | None, ...]
    offset: float | None


def plan_forward(call: Forward, device: Device) -> Plan:
    """For x, the residual and the gate."""
    return _plan_forward(_facts(call[:5]), call[5:], device)


def plan_backward(call: Backward, into: Tensor | None, device: Device) -> Plan:
    """For dy, dsum, x, the gate and dx, which is `into`, or contiguous."""
    return _plan_backward(_facts((*call[:6], into)), call[7:], device)  # all but rstd


def writes_dx(call: Backward) -> bool:
    """Whether kernels write dx: where x is gated, dgate is computed from dx."""
    return call.need_dx or (call.need_dgate and not call.norm_before_gate)


def contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors, copied where they are not contiguous."""
    return tuple([None if tensor is None else tensor.contiguous() for tensor in tensors])


def _facts(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """The fields of each tensor's `Metadata`, as a tuple, which takes less time to make."""
    return tuple([None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


def _records(facts: tuple[Any, ...]) -> list[Any]:
    return [None if each is None else Metadata(*each) for each in facts]


@functools.lru_cache(maxsize=4096)
def _plan_forward(facts: tuple[Any, ...], options: tuple[Any, ...], device: Device) -> Plan:
    call: Any = Forward._make((*_records(facts), *options))
    second_output = call.return_fp32 or call.dtype != call.x.dtype
    rows: tuple[Any, ...] = call[:3]
    return _plan(call, rows, len(rows), call.dtype, call.x.dtype, device, second_output=second_output)


@functools.lru_cache(maxsize=4096)
def _plan_backward(facts: tuple[Any, ...], options: tuple[Any, ...], device: Device) -> Plan:
    *tensors, into = _records(facts)
    call: Any = Backward._make((*tensors, None, *options))  # without rstd
    dx = into or (call.x.contiguous() if writes_dx(call) else None)
    rows, dtype = (*call[:4], dx), None if dx is None else dx.dtype
    return _plan(call, rows, len(rows) - 1, dtype, call.rounded_to, device, second_output=False)


def _plan(
    call: Any,
    tensors: tuple[Metadata | None, ...],
    n_read: int,
    result: torch.dtype | None,
    rounded_to: torch.dtype,
    device: Device,
    *,
    second_output: bool,
) -> Plan:
    """For a `Forward` or `Backward` of `Metadata`, whose tensors of rows these are; the first `n_read` are read."""
    per_head = has_heads(call.weight, call.bias)
    rows, copies = _layout(tensors, per_head=per_head), False
    if rows is None:
        tensors = tuple([None if tensor is None else tensor.contiguous() for tensor in tensors])
        rows, copies = _layout(tensors, per_head=per_head), True
    assert rows is not None and tensors[0] is not None
    followed = iter(rows.strides)
    pairs = [(0, 0) if tensor is None else next(followed) for tensor in tensors]
    width = tensors[0].sizes[-1]
    outer_stride, inner_stride = (max(strides) for strides in zip(*pairs, strict=True))
    if per_head:  # in results, which are contiguous
        inner_stride = max(inner_stride, rows.n_outer * width)
    weight = None if call.weight is None else call.weight.dtype
    # Not with a bias: the compiler would add it to a product of 16 bits in one step, and leave out the rounding between.
    narrow_product = (weight is None or weight.itemsize < FP32) and call.bias is None
    offset = None if device.kind == "cuda" and call.offset == 0.0 and narrow_product else call.offset
    read = [tensor.dtype for tensor in tensors[:n_read] if tensor is not None]
    shape = Shape(
        backward=isinstance(call, Backward),
        n_outer=rows.n_outer,
        n_inner=rows.n_inner,
        width=width,
        outer_stride=outer_stride,
        inner_stride=inner_stride,
        itemsizes=tuple(dtype.itemsize for dtype in read),
        narrow=any(dtype.itemsize < FP32 for dtype in (*read, result) if dtype is not None),
        rounding=Rounding.of(call.casting_mode, _NAMES[rounded_to], None if weight is None else _NAMES[weight]),
        activation="" if call.gate is None else call.activation,
        gate_first=call.gate is not None and not call.norm_before_gate,
        second_output=second_output,
        per_head=per_head,
        biased=call.bias is not None,
        quantised=result is not None and result.itemsize == 1,
        with_rows=result is not None,
    )
    tiling = choose(shape, device)
    strides = tuple(stride for pair in pairs for stride in pair)
    return Plan(copies, per_head, LaunchSpec.of(tiling, {}), (rows.n_outer, rows.n_inner), strides, offset)


def _layout(tensors: tuple[Metadata | None, ...], *, per_head: bool) -> RowLayout | None:
    """None: kernels do not follow the rows of these tensors."""
    given = [tensor for tensor in tensors if tensor is not None]
    strides = [tensor.strides for tensor in given]
    if per_head:
        return layout_by_head(given[0].sizes, strides)
    rows = layout_of(given[0].sizes, strides)
    return None if rows is not None and _has_too_many(rows) else rows


def _has_too_many(rows: RowLayout) -> bool:
    """Whether groups have more rows than kernels count."""
    return rows.n_outer > 1 and rows.n_outer * rows.n_inner > MAX_COUNTED_ROWS


def layout_by_head(sizes: tuple[int, ...], strides: list[tuple[int, ...]]) -> RowLayout | None:
    """The layout of tensors [..., H, D] whose groups are heads; None where other rows take more than one level."""
    rows = layout_of((*sizes[:-2], sizes[-1]), [(*stride[:-2], stride[-1]) for stride in strides])
    if rows is None or rows.n_outer > 1:
        return None
    pairs = tuple((stride[-2], inner) for stride, (_, inner) in zip(strides, rows.strides, strict=True))
    return RowLayout(sizes[-2], rows.n_inner, pairs)
