"""The linear layer of a call in its plan: products of a chunk of logits, and the gradients of x, weight and bias.

Every chunk of logits lies in one buffer, and its gradient over it. Gradients grow chunk by chunk, each in its final memory
if its dtype allows. All of it is steps of a plan; see npu_tiling/plans.py.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from npu_tiling import collectives
from npu_tiling.calls import Empty, contiguous_strides
from npu_tiling.plans import Plan
from torch import Tensor

from . import matmul, tokens
from .call import EachOptions
from .decide import Layout, LossTiling, Shape, Task, pitch

EVERYTHING = slice(None)


class Linear(NamedTuple):
    """A linear layer's slots, as products read them.

    Attributes:
        x: [N, H], all ranks' tokens; its columns are adjacent where kernels read them.
        weight, frozen: in x's dtype.
    """

    x: Any
    weight: Any
    bias: Any
    frozen: Any


def linear(p: Plan, call: Any) -> Linear:
    """The linear layer of a record of slots."""
    x = rows_of_all_ranks(p, flat(p, call.x, 1), call.options)
    if p.chip is not None and x.strides[1] != 1 and x.shape[1] > 1:
        x = p.contiguous(x)
    weight, frozen = (cast(p, each, x.dtype) for each in (call.weight, call.frozen))
    return Linear(x, weight, call.bias, frozen)


def shape_of(p: Plan, call: Any, layer: Linear, task: Task, needs: Any, *, unfinished: bool, is_readable: bool) -> Shape:
    """All that the decision how a call is computed depends on."""
    return Shape(
        task=task,
        tokens=layer.x.shape[0],
        width=layer.x.shape[1],
        vocabulary=layer.weight.shape[0],
        x_dtype=layer.x.dtype,
        weight_dtype=call.weight.dtype,
        bias_dtype=None if call.bias is None else call.bias.dtype,
        options=call.options.of_head,
        needs=needs,
        unfinished=unfinished,
        writes_fp32=matmul.writes_fp32(p.device, layer.x.dtype),
        is_readable=is_readable,
        device=p.chip,
        frozen_width=0 if layer.frozen is None else layer.frozen.shape[1],
    )


class Head:
    """A linear layer whose logits are in memory a chunk at a time, and its gradients so far.

    Args:
        p: the plan that steps are added to.
        call: the record of slots.
        layer: its linear layer.
        tiling: how it is computed.

    Attributes:
        buffer: see `LossTiling.buffer`.
        dx: [N, H], the gradient of x so far; None where it is not wanted, as the next one.
        dweight: the weight's gradient so far.
    """

    def __init__(self, p: Plan, call: Any, layer: Linear, tiling: LossTiling) -> None:
        p.decide("way and chunks", tiling)
        self._p, self._call, self.tiling, needs = p, call, tiling, tiling.shape.needs
        self.x, self.weight, self.bias, frozen = layer
        first = 0 if frozen is None else frozen.shape[1]
        self._operands = [(slice(first, first + self.weight.shape[1]), self.weight)]  # the last one is trained
        if frozen is not None:
            self._operands.insert(0, (slice(0, first), frozen))
        self.trained_x = part(p, self.x, self._operands[-1][0], 1)
        dx = Empty(self.x.shape if call.options.sequence_parallel else call.x.shape, self.x.dtype)
        self._dx = p.new(dx) if needs.dx else None
        self.dx = flat(p, self._dx, 1)
        self._is_added = call.weight_grad is not None
        self.dweight = None
        if needs.dweight:
            self.dweight = call.weight_grad or p.new(Empty(self.weight.shape, tiling.sum_dtype))
        self._dbias = p.new(Empty(self.weight.shape[:1], tiling.exact)) if needs.dbias else None
        self._wide_dx = None
        if needs.dx and tiling.chunks.layout is Layout.COLUMNS and self.x.dtype != tiling.exact:
            self._wide_dx = p.new(Empty((tiling.chunks.longest[0], self.x.shape[1]), tiling.exact))
        self.buffer = p.new(Empty((tiling.buffer,), tiling.logits_dtype))

    def products(self, tokens: slice, columns: slice, *, bias: bool = False) -> Any:
        """A chunk of raw logits, with the bias or without."""
        p, x = self._p, part(self._p, self.x, tokens)
        logits = rows_in(p, self.buffer, x.shape[0], columns.stop - columns.start)
        for where, weight in self._operands:
            of_columns = transposed(p, part(p, weight, columns))
            matmul.multiply(p, part(p, x, where, 1), of_columns, logits, adds=where.start > 0)
        if bias and self.bias is not None:
            p.torch(torch.Tensor.add_, logits, part(p, self.bias, columns), writes=[logits])
        return logits

    def gradient_memory(self, logits: Any) -> Any:
        """Memory in x's dtype for a chunk's gradient: over its logits, in the upper half of each row if x's is narrower."""
        if self.x.dtype == logits.dtype:
            return logits
        step = logits.strides[0]
        return self._p.view(self.buffer, logits.shape, (2 * step, 1), step, self.x.dtype)

    def add(self, tokens: slice, columns: slice, gradient: Any) -> None:
        """Adds the products of the gradient [tokens, columns] of raw logits."""
        p, is_first, is_last = self._p, columns.start == 0, columns.stop == self.weight.shape[0]
        if self.dx is not None:
            dx = part(p, self.dx, tokens)
            total = dx if self._wide_dx is None else part(p, self._wide_dx, slice(0, dx.shape[0]))
            for where, weight in self._operands:
                matmul.multiply(p, gradient, part(p, weight, columns), part(p, total, where, 1), adds=not is_first)
            if total is not dx and is_last:
                p.torch(torch.Tensor.copy_, dx, total, writes=[dx])
        if self.dweight is not None:
            self.add_to_dweight(tokens, gradient, part(p, self.trained_x, tokens), part(p, self.dweight, columns))
        if self._dbias is not None:
            dbias = part(p, self._dbias, columns)
            p.torch(_sum_rows, gradient, dbias, tokens.start == 0, writes=[dbias])

    def add_to_dweight(self, tokens: slice, gradient: Any, x: Any, dweight: Any) -> None:
        """Adds gradient^T x to some rows of the weight's gradient."""
        adds, scale = tokens.start > 0 or self._is_added, self.tiling.dweight_scale
        matmul.multiply(self._p, transposed(self._p, gradient), x, dweight, adds=adds, alpha=scale)

    def finished(self) -> tuple[Any, Any, Any]:
        """The gradients of x, weight and bias in their dtypes; None where not wanted, or added to `weight_grad`."""
        p, shape, tiling = self._p, self.tiling.shape, self.tiling
        dweight, dbias = None if self._is_added else self.dweight, self._dbias
        if not tiling.chunks.tokens:
            for sums in (dweight, dbias):
                if sums is not None:
                    p.torch(torch.Tensor.zero_, sums, writes=[sums])
        dx, group = self._dx, shape.options.group
        if dx is not None and shape.options.sequence_parallel:
            shape_of_x = self._call.x.shape
            own = Empty((prod(shape_of_x[:-1]), dx.shape[-1]), dx.dtype)
            dx = p.torch(_sum_of_own, dx, group, makes=own)
            if len(shape_of_x) != 2:
                dx = p.view(dx, shape_of_x, contiguous_strides(shape_of_x))
        elif dx is not None and group:
            p.torch(collectives.sum_, dx, group, writes=[dx])
        if dbias is not None and tiling.dweight_scale != 1.0:
            p.torch(torch.Tensor.mul_, dbias, tiling.dweight_scale, writes=[dbias])  # its sums are fp32 until here
        return dx, cast(p, dweight, shape.weight_dtype), cast(p, dbias, shape.bias_dtype or tiling.exact)


def _sum_rows(gradient: Tensor, dbias: Tensor, is_first: bool) -> None:
    if is_first:
        torch.sum(gradient, 0, dtype=dbias.dtype, out=dbias)
    else:
        dbias += gradient.sum(0, dtype=dbias.dtype)


def _sum_of_own(dx: Tensor, group: str) -> Tensor:
    return collectives.sum_of_own(dx.unflatten(0, (collectives.ranks(group), -1)), group)


# Parts and forms of slots. A part that is the whole slot is the slot itself: a view takes time when the plan runs.


def part(p: Plan, slot: Any, where: slice, dimension: int = 0) -> Any:
    """A part of a slot along its first or second dimension; None of None."""
    if slot is None or where.stop is None or where.stop - where.start == slot.shape[dimension]:
        return slot
    shape = [*slot.shape]
    shape[dimension] = where.stop - where.start
    return p.view(slot, shape, slot.strides, where.start * slot.strides[dimension])


def row(p: Plan, slot: Any, i: int) -> Any:
    """Row i of a slot."""
    return p.view(slot, slot.shape[1:], slot.strides[1:], i * slot.strides[0])


def rows_in(p: Plan, memory: Any, rows: int, columns: int, dtype: torch.dtype | None = None) -> Any:
    """A matrix at the beginning of contiguous memory, whose rows are a pitch of logits apart."""
    return p.view(memory, (rows, columns), (pitch(columns), 1), dtype=dtype)


def transposed(p: Plan, slot: Any) -> Any:
    return p.view(slot, slot.shape[::-1], slot.strides[::-1])


def flat(p: Plan, slot: Any, kept: int = 0) -> Any:
    """The slot with one dimension in place of all but the last `kept`: a view, or a copy where there is none."""
    if slot is None or slot.dim() == kept + 1:
        return slot
    first, rows = slot.dim() - kept, prod(slot.shape[: slot.dim() - kept])
    if not slot.numel():
        shape = (rows, *slot.shape[first:])
        return p.view(slot, shape, contiguous_strides(shape))
    inner = slot.shape[first] * slot.strides[first] if kept else 1
    stride = _step(slot.shape[:first], slot.strides[:first], inner)
    if stride is None:
        return flat(p, p.contiguous(slot), kept)
    return p.view(slot, (rows, *slot.shape[first:]), (stride, *slot.strides[first:]))


def _step(shape: tuple[int, ...], strides: tuple[int, ...], inner: int) -> int | None:
    """The stride of some dimensions as one; None where there is none, `inner` where all have one element."""
    step, extent = inner, None
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if extent is None:
            step, extent = stride, stride * size
        elif stride == extent:
            extent *= size
        else:
            return None
    return step


def cast(p: Plan, slot: Any, dtype: torch.dtype) -> Any:
    """The slot, or a copy of it in another dtype; None of None."""
    if slot is None or slot.dtype == dtype:
        return slot
    is_transposed = slot.dim() == 2 and 0 < slot.strides[0] < slot.strides[1]  # PyTorch keeps the order of dimensions
    return p.torch(torch.Tensor.to, slot, dtype, makes=Empty(slot.shape, dtype, last_outermost=is_transposed))


def rows_of_all_ranks(p: Plan, slot: Any, options: Any) -> Any:
    """[N, H]: with sequence_parallel the rows of all ranks, else the slot; None for None."""
    if slot is None or not options.sequence_parallel:
        return slot
    ranks = collectives.ranks(options.group)
    return p.torch(_gathered, slot, options.group, makes=Empty((ranks * slot.shape[0], *slot.shape[1:]), slot.dtype))


def _gathered(own: Tensor, group: str) -> Tensor:
    return collectives.gather(own, group).flatten(0, 1)


def check_columns(p: Plan, name: str, columns: Any, options: EachOptions) -> None:
    """Where there is no chip, raises IndexError for a column that is not in the vocabulary, each time the plan runs."""
    if p.chip is None and columns is not None:
        p.torch(tokens.check_columns, name, columns, options)


# What steps of modules of kernels call, which import no PyTorch.


def moved(number: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return number.to(device, dtype)


def sum_of_rows(partials: Tensor) -> Tensor:
    return partials.sum(0, keepdim=True)


def clone(p: Plan, slot: Any) -> Any:
    """A contiguous copy."""
    return p.torch(torch.clone, slot, makes=Empty(slot.shape, slot.dtype))
