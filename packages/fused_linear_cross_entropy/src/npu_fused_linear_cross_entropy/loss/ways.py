"""The plans of a loss. Each way (see `Way` in decide.py) is one function: it adds the steps of all chunks.

A loss is computed in one of three tasks: its outputs alone; outputs and the gradients of a loss that is one number; or
gradients, given statistics that an earlier pass has computed. With a process group ranks call these collectives, in order:
with sequence_parallel they gather x; with class weights they sum those of the targets, and their totals; for each
chunk of tokens they gather the statistics, between statistics and gradients (not for gradients alone); at the end they sum
dx, with sequence_parallel each its own rows. Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from npu_tiling import collectives
from npu_tiling.calls import Empty
from npu_tiling.plans import Plan
from torch import Tensor

from .. import matmul
from ..call import STATISTICS, TARGET, TOTAL, Backward, Forward, K, LinearCrossEntropyOutput, is_unfinished
from ..decide import Task, Way, choose, pitch, token_groups
from ..head import EVERYTHING, Head, check_columns, flat, linear, part, row, rows_in, shape_of, transposed
from ..tiling import is_possible
from ..tokens import typical_size
from . import Chunk, TargetGradients

_MAX_GAP = 64.0  # e^64 neither overflows nor underflows fp32 and bf16


def forward(p: Plan, call: Forward) -> tuple[Any, ...]:
    """The six outputs, statistics, three gradients and the factors that these lack."""
    results, options = call.results(), call.options
    loss = Loss(p, call, Task.LOSS_AND_GRADIENTS if any(call.needs) else Task.LOSS)
    statistics = p.new(Empty((STATISTICS, loss.head.x.shape[0]), loss.tiling.exact))
    if options.return_entropy and not any(call.needs):
        total = row(p, statistics, TOTAL)
        p.torch(torch.Tensor.zero_, total, writes=[total])  # saved with the others
    WAYS[loss.tiling.way](loss, statistics, Upstream(1.0, None))
    saved = results["statistics"]
    kept = None if saved is None else p.view(statistics, saved.shape, statistics.strides)
    gradients = loss.finished() if any(call.needs) else (None, None, None)
    return *loss.losses(statistics, results), kept, *gradients, loss.unfinished


def backward(p: Plan, call: Backward) -> tuple[Any, ...]:
    """Three gradients: everything is computed again but the statistics."""
    loss = Loss(p, call, Task.GRADIENTS)
    dloss, dentropy = (each if each is None or each.dim() == 0 else flat(p, each) for each in (call.dloss, call.dentropy))
    WAYS[loss.tiling.way](loss, p.contiguous(call.statistics), Upstream(dloss, dentropy))
    return loss.finished()


class Upstream(NamedTuple):
    """The gradients of losses and entropies: numbers or [N]; None for none."""

    dloss: Any
    dentropy: Any


class Loss:
    """The tensors of one loss in a plan, and facts of its targets.

    Attributes:
        p: the plan.
        steps: functions that add the steps of rows and chunks: kernels.py, or reference.py where there is no chip.
        options: of the loss.
        task: which results.
        tiling: how they are computed.
        head: the linear layer, and the gradients.
        factors: [N], of the tokens' losses; None: they have no factors of their own.
        targets: gradients at the targets, where E has zeros; None where nothing is made of E.
        unfinished: [3], factors that the gradients lack; None for 1.
    """

    def __init__(self, p: Plan, call: Any, task: Task) -> None:
        self.p, self.steps, self.options, self.task = p, _steps(p), call.options, task
        check_columns(p, "target", call.target, call.options)
        layer, unfinished = linear(p, call), task is Task.LOSS_AND_GRADIENTS and is_unfinished(call)
        is_readable = is_possible(p, layer.x, layer.weight, call.weight_grad)
        shape = shape_of(p, call, layer, task, call.needs, unfinished=unfinished, is_readable=is_readable)
        self.tiling = tiling = choose(shape)
        self.head = Head(p, call, layer, tiling)
        self.targets: TargetGradients | None = None
        self._bias, self._class_weight = p.contiguous(call.bias), p.contiguous(call.class_weight)
        if p.chip is not None and self._class_weight is not None and self._class_weight.dtype == torch.float64:
            made = Empty(self._class_weight.shape, torch.float32)
            self._class_weight = p.torch(torch.Tensor.float, self._class_weight, makes=made)  # kernels read no fp64
        self._set_facts(call)

    def _set_facts(self, call: Any) -> None:
        """Facts of the targets, with divisors of single tokens as factors of their losses and gradients."""
        p, tiling, divisor = self.p, self.tiling, call.divisor
        self.factors, self._row_options = None, self.options
        if divisor is not None and divisor.dim():
            self.factors = p.torch(_inverse, flat(p, divisor), tiling.exact, makes=Empty((divisor.numel(),), tiling.exact))
            divisor, self._row_options = None, self.options._replace(reduction="none")
        self._gradient_factors = self.factors  # of the losses' gradients
        scale = tiling.dweight_scale if tiling.shape.unfinished else None
        given = (flat(p, call.target), self._class_weight, divisor)
        self.facts = self.steps.target_facts(p, *given, self._row_options, tiling.exact, scale)
        self.unfinished = self.facts.unfinished
        if self.factors is not None and self.unfinished is not None:
            # As class weights are, and with them: see `write_target_facts` in reference.py.
            given = (self.factors, self.facts.target_weight, self.facts.gradient_factors)
            size = p.torch(_typical_size, *given, makes=Empty((), tiling.exact))
            self._gradient_factors = p.torch(torch.div, self.factors, size, makes=Empty(self.factors.shape, tiling.exact))
            self.unfinished = p.torch(torch.mul, self.unfinished, size, makes=Empty((3,), tiling.exact))

    def logits(self, tokens: slice, columns: slice) -> Chunk:
        """A chunk of logits."""
        chunk = self.chunk(tokens, columns, self.head.products(tokens, columns))
        self.steps.prepare(self.p, chunk, self.options)
        return chunk

    def chunk(self, tokens: slice, columns: slice, logits: Any) -> Chunk:
        """The record of logits, or of exponentials."""
        vectors = (part(self.p, each, columns) for each in (self._bias, self._class_weight))
        first, target = self.options.vocab_first + columns.start, part(self.p, self.facts.columns, tokens)
        return Chunk(logits, columns, target, first, *vectors)

    def exchange(self, statistics: Any) -> None:
        """Statistics [7, tokens] of this rank's columns become statistics of the whole vocabulary."""
        if group := self.options.group:
            makes = Empty((collectives.ranks(group), *statistics.shape), statistics.dtype)
            self.steps.join(self.p, self.p.torch(collectives.gather, statistics, group, makes=makes), statistics)

    def coefficients(self, tokens: slice, statistics: Any, upstream: Upstream) -> Any:
        """The coefficients [5, tokens] of a chunk's gradient, from the statistics [7, N] of all tokens."""
        p, (dloss, dentropy) = self.p, (_of_tokens(self.p, each, tokens) for each in upstream)
        if dloss is not None and self._gradient_factors is not None:
            factors = part(p, self._gradient_factors, tokens)
            is_one = type(dloss) is float
            dloss = factors if is_one else p.torch(torch.mul, dloss, factors, makes=Empty(factors.shape, factors.dtype))
        facts = self.facts.part(p, tokens)
        return self.steps.coefficients(p, facts, part(p, statistics, tokens, 1), self.options, dloss, dentropy)

    def allocate_targets(self) -> TargetGradients:
        """Memory for g of formula.py. dx gets it with each chunk, the weight's gradient at the end."""
        columns = self.facts.columns
        values = self.p.new(Empty(columns.shape, torch.float32))
        self.targets = TargetGradients(columns, self.options.vocab_first, values)
        return self.targets

    @functools.cached_property
    def sums_and_scaled(self) -> tuple[Any, Any]:
        """Memory of the longest chunk for its sums of dx, and for v x; None where there is none."""
        head, dtype = self.head, self.tiling.shape.product_dtype
        size = (self.tiling.chunks.longest[0], head.x.shape[1])
        sums = Empty(size, dtype) if head.dx is not None and head.x.dtype != dtype else None
        return self.p.new(sums), self.p.new(None if head.dweight is None else Empty(size, head.x.dtype))

    def finished(self) -> tuple[Any, ...]:
        """The gradients of x, weight and bias."""
        if self.targets is not None and self.head.dweight is not None:
            self.steps.add_target_rows(self.p, self.head.dweight, self.head.trained_x, self.targets)
        return self.head.finished()

    def losses(self, statistics: Any, results: dict[str, Any]) -> tuple[Any, ...]:
        """The six outputs that the caller asked for."""
        makes = [results[name] for name in LinearCrossEntropyOutput._fields]
        if self.factors is not None:
            makes[:2] = [each and Empty(self.factors.shape, each.dtype) for each in makes[:2]]
        outputs = tuple(map(self.p.new, makes))
        self.steps.losses(self.p, self.facts, statistics, self._row_options, outputs)
        if self.factors is None:
            return outputs
        number = Empty((), self.tiling.exact)
        sums = (of and self.p.torch(torch.dot, of, self.factors, makes=number) for of in outputs[:2])
        return *sums, *outputs[2:]


def by_columns(loss: Loss, statistics: Any, upstream: Upstream) -> None:
    """See `Way.COLUMNS`; and `Way.WHOLE_ROWS`, one chunk of columns, where statistics or gradients alone are computed."""
    p, chunks = loss.p, loss.tiling.chunks
    for tokens in chunks.tokens:
        if loss.task is not Task.GRADIENTS:
            result = part(p, statistics, tokens, 1)
            if loss.options.vocab_parts > 1:
                _join_parts_of_the_vocabulary(loss, tokens, result)
            else:
                for columns in chunks.columns:
                    loss.steps.statistics(p, loss.logits(tokens, columns), loss.options, result, merge=columns.start > 0)
                loss.exchange(result)
        if loss.task is not Task.LOSS:
            coefficients = loss.coefficients(tokens, statistics, upstream)
            for columns in chunks.columns:
                chunk = loss.logits(tokens, columns)
                gradient = loss.head.gradient_memory(chunk.logits)
                loss.steps.gradient(p, chunk, loss.options, gradient, coefficients)
                loss.head.add(tokens, columns, gradient)


def _join_parts_of_the_vocabulary(loss: Loss, tokens: slice, result: Any) -> None:
    """Statistics [7, tokens] of all columns: those of each part of the vocabulary by themselves, joined in order."""
    p, parts, group = loss.p, loss.tiling.chunks.columns, loss.options.group
    count = result.shape[1]
    found = p.new(Empty((len(parts) * STATISTICS, count), result.dtype))  # a part below the other
    for i, columns in enumerate(parts):
        of_part = part(p, found, slice(i * STATISTICS, (i + 1) * STATISTICS))
        loss.steps.statistics(p, loss.logits(tokens, columns), loss.options, of_part, merge=False)
    if group:
        makes = Empty((collectives.ranks(group), *found.shape), found.dtype)
        found = p.torch(collectives.gather, found, group, makes=makes)
    shape = (loss.options.vocab_parts, STATISTICS, count)
    loss.steps.join(p, p.view(found, shape, (STATISTICS * count, count, 1)), result)


def whole_rows(loss: Loss, statistics: Any, upstream: Upstream) -> None:
    """See `Way.WHOLE_ROWS`: the logits are still there when the statistics are known."""
    if loss.task is not Task.LOSS_AND_GRADIENTS:
        by_columns(loss, statistics, upstream)
        return
    p, (columns,) = loss.p, loss.tiling.chunks.columns
    for tokens in loss.tiling.chunks.tokens:
        chunk = loss.logits(tokens, columns)
        gradient, result = loss.head.gradient_memory(chunk.logits), part(p, statistics, tokens, 1)
        if loss.options.group or loss.factors is not None:
            loss.steps.statistics(p, chunk, loss.options, result, merge=False)
            loss.exchange(result)
            loss.steps.gradient(p, chunk, loss.options, gradient, loss.coefficients(tokens, statistics, upstream))
        else:
            loss.steps.statistics_and_gradient(p, chunk, loss.options, gradient, loss.facts.part(p, tokens), result)
        loss.head.add(tokens, columns, gradient)


def exponentials(loss: Loss, statistics: Any, upstream: Upstream) -> None:
    """See `Way.EXPONENTIALS`, for a loss that is one number."""
    p, (columns,) = loss.p, loss.tiling.chunks.columns
    loss.allocate_targets()
    for tokens in loss.tiling.chunks.tokens:
        result = part(p, statistics, tokens, 1)
        chunk = loss.logits(tokens, columns)
        memory = loss.head.gradient_memory(chunk.logits)
        k = p.new(Empty((memory.shape[0],), loss.tiling.exact))
        loss.steps.exponentials(p, chunk, loss.options, memory, result, k, merge=False)
        loss.exchange(result)
        _add_exponentials(loss, tokens, memory, k, statistics, loss.coefficients(tokens, statistics, upstream))


def by_product(loss: Loss, statistics: Any, upstream: Upstream) -> None:
    """See `Way.PRODUCT`."""
    p, (columns,) = loss.p, loss.tiling.chunks.columns
    loss.allocate_targets()
    multiply = loss.steps.ExponentialProduct(p, loss.head.weight, loss.options)
    for tokens in loss.tiling.chunks.tokens:
        x, result = part(p, loss.head.x, tokens), part(p, statistics, tokens, 1)
        memory = None
        if loss.task is not Task.LOSS:
            memory = rows_in(p, loss.head.buffer, x.shape[0], loss.head.weight.shape[0])
        if loss.task is not Task.GRADIENTS:
            k = multiply.statistics(x, part(p, loss.facts.columns, tokens), result, ((columns, memory),))
            loss.exchange(result)
        if loss.task is not Task.LOSS:
            coefficients = loss.coefficients(tokens, statistics, upstream)
            if loss.task is Task.GRADIENTS:
                k = row(p, coefficients, K)
                multiply.exponentials(x, k, memory)
            _add_exponentials(loss, tokens, memory, k, statistics, coefficients)


def _add_exponentials(loss: Loss, tokens: slice, memory: Any, k: Any, statistics: Any, coefficients: Any) -> None:
    """Adds the gradients of a chunk: dx = v (E W) + g W[target], dW += E^T (v x). memory: E [tokens, V]; k: [tokens]."""
    p, head, tiling, (columns,) = loss.p, loss.head, loss.tiling, loss.tiling.chunks.columns
    assert loss.targets is not None
    chunk, targets = loss.chunk(tokens, columns, memory), loss.targets.part(p, tokens)
    v = p.new(Empty(k.shape, k.dtype))
    target_logit = row(p, part(p, statistics, tokens, 1), TARGET)
    final_k = _reachable(loss, k, coefficients)
    loss.steps.end_exponentials(p, chunk, loss.options, k, final_k, target_logit, coefficients, v, targets)
    x, count, width = part(p, head.x, tokens), memory.shape[0], head.x.shape[1]
    if tiling.way is Way.EXPONENTIALS and tiling.shape.has_room_for_sums:  # in the first half of each row, before E
        step = pitch(head.weight.shape[0])
        sums = p.view(head.buffer, (count, width), (step, 1))
        scaled = p.view(head.buffer, (count, width), (2 * step, 1), dtype=x.dtype)
    else:
        sums, scaled = (part(p, each, slice(0, count)) for each in loss.sums_and_scaled)
    if head.dx is not None:
        dx = part(p, head.dx, tokens)
        sums = dx if sums is None else sums
        matmul.multiply(p, memory, head.weight, sums)
        loss.steps.scale_rows(p, sums, v, dx, targets, head.weight)
    if head.dweight is not None:
        loss.steps.scale_rows(p, x, v, scaled)
        head.add_to_dweight(tokens, memory, scaled, head.dweight)


def kept_in_dweight(loss: Loss, statistics: Any, upstream: Upstream) -> None:
    """See `Way.KEPT_EXPONENTIALS` and `Way.KEPT_PRODUCT`. All tokens are one chunk.

    The statistics of a row are known after all of its logits, and the gradient needs each exponential again. Those [N, W] of
    W columns fit in the [W, H] rows of the weight's gradient if N is at most H, with rows a pitch of logits apart.

    The order of products overwrites nothing that is still needed: part by part, the final exponentials in place of the first
    ones and their product for dx; after all parts the weight's gradient, part by part, each through a copy.
    """
    p, steps, options, head, tiling = loss.p, loss.steps, loss.options, loss.head, loss.tiling
    dtype, count, parts = head.x.dtype, head.x.shape[0], tiling.chunks.kept
    memory = _memory_in_dweight(loss)
    kept: list[tuple[Chunk, Any]] = []  # chunks of exponentials, and k of their rows
    if tiling.way is Way.KEPT_PRODUCT:
        places = [(columns, _place(loss, memory, columns)) for columns in tiling.chunks.columns]
        multiply = steps.ExponentialProduct(p, head.weight, options)
        k = multiply.statistics(head.x, loss.facts.columns, statistics, places)
        kept = [(loss.chunk(EVERYTHING, columns, place), k) for columns, place in places]
    else:
        k_of_chunks = p.new(Empty((len(tiling.chunks.columns), count), statistics.dtype))
        for i, columns in enumerate(tiling.chunks.columns):
            chunk, place, k = loss.logits(EVERYTHING, columns), _place(loss, memory, columns), row(p, k_of_chunks, i)
            steps.exponentials(p, chunk, options, place, statistics, k, merge=columns.start > 0)
            kept.append((chunk._replace(logits=place), k))
    loss.exchange(statistics)

    coefficients = loss.coefficients(EVERYTHING, statistics, upstream)
    final_k = _reachable(loss, kept[-1][1], coefficients)
    v, target_logit, targets = p.new(Empty((count,), statistics.dtype)), row(p, statistics, TARGET), loss.allocate_targets()

    def end_part(of: slice) -> None:
        """Makes the kept exponentials of a part final."""
        for chunk, k in kept:
            if of.start <= chunk.columns.start < of.stop:
                steps.end_exponentials(p, chunk, options, k, final_k, target_logit, coefficients, v, targets)

    if head.dx is None:
        for of in parts:
            end_part(of)
    else:
        _write_kept_dx(loss, memory, end_part, v, targets)
    for of in parts:  # dW = (v E)^T x, in the place of E
        exponentials, rows_of_part = memory[of.start], part(p, head.dweight, of)
        copy = rows_in(p, head.buffer, count, exponentials.shape[1], dtype)
        steps.scale_rows(p, exponentials, v, copy)
        matmul.multiply(p, transposed(p, copy), head.x, rows_of_part)


def _memory_in_dweight(loss: Loss) -> dict[int, Any]:
    """By the first column of each part, memory [N, columns] for its exponentials in its rows of the weight's gradient."""
    p, dtype, count = loss.p, loss.head.x.dtype, loss.head.x.shape[0]
    dweight: Any = loss.head.dweight
    found, width = {}, dweight.shape[1] * dweight.dtype.itemsize // dtype.itemsize
    for of in loss.tiling.chunks.kept:
        columns = of.stop - of.start
        shape, strides = (count, columns), (pitch(columns), 1)
        if columns * width >= count * strides[0]:
            found[of.start] = p.view(dweight, shape, strides, of.start * width, dtype)
        else:  # the last few columns alone
            found[of.start] = p.view(p.new(Empty((count * strides[0],), dtype)), shape, strides)
    return found


def _place(loss: Loss, memory: dict[int, Any], columns: slice) -> Any:
    """The memory [N, columns] of a chunk, in that of its part."""
    of = next(of for of in loss.tiling.chunks.kept if of.start <= columns.start < of.stop)
    return part(loss.p, memory[of.start], slice(columns.start - of.start, columns.stop - of.start), 1)


def _write_kept_dx(loss: Loss, memory: dict[int, Any], end_part: Any, v: Any, targets: TargetGradients) -> None:
    """dx [N, H] = v (E W) + g W[target], with the kept exponentials E.

    Args:
        memory: of each part.
        end_part: makes the exponentials of a part final; called before its first product, so that short launches are queued
            while a long one runs.
        v: [N].
    """
    p, head, count, width = loss.p, loss.head, loss.head.x.shape[0], loss.head.x.shape[1]
    is_wide, longest = head.dx.dtype.itemsize < torch.float32.itemsize, count
    if is_wide:
        longest = head.buffer.numel() * head.buffer.dtype.itemsize // torch.float32.itemsize // width
    for tokens in token_groups(count, longest):
        dx = sums = part(p, head.dx, tokens)
        if is_wide:
            sums = p.view(head.buffer, dx.shape, (width, 1), dtype=torch.float32)
        for of in loss.tiling.chunks.kept:
            if tokens.start == 0:
                end_part(of)
            matmul.multiply(p, part(p, memory[of.start], tokens), part(p, head.weight, of), sums, adds=of.start > 0)
        loss.steps.scale_rows(p, sums, part(p, v, tokens), dx, targets.part(p, tokens), head.weight)


WAYS = {
    Way.WHOLE_ROWS: whole_rows,
    Way.EXPONENTIALS: exponentials,
    Way.PRODUCT: by_product,
    Way.KEPT_EXPONENTIALS: kept_in_dweight,
    Way.KEPT_PRODUCT: kept_in_dweight,
    Way.COLUMNS: by_columns,
}


def _steps(p: Plan) -> ModuleType:
    """`Loss.steps`. Kernels import Triton, and are imported where they are needed."""
    if p.chip is None:
        from . import reference

        return reference
    from . import kernels

    return kernels


def _reachable(loss: Loss, k: Any, coefficients: Any) -> Any:
    """Those k' for which exp(k - k') is finite: logits of other ranks may be far above those of this one."""
    if not loss.options.group:
        return k
    return loss.p.torch(_above, k, row(loss.p, coefficients, K), makes=Empty(k.shape, k.dtype))


def _above(own_k: Tensor, k: Tensor) -> Tensor:
    return torch.maximum(own_k, k - _MAX_GAP)


def _of_tokens(p: Plan, value: Any, tokens: slice) -> Any:
    """The part of an upstream gradient; numbers are those of all tokens."""
    return value if value is None or type(value) is float or not value.dim() else part(p, value, tokens)


def _inverse(divisor: Tensor, dtype: torch.dtype) -> Tensor:
    return 1.0 / divisor.to(dtype)


def _typical_size(factors: Tensor, weights: Tensor | None, of_gradient: Tensor) -> Tensor:
    return typical_size(factors if weights is None else factors * weights * of_gradient[0])
