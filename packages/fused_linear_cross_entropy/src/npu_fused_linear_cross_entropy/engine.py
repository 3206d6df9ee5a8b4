"""The loop over chunks: logits by the framework's matrix product, statistics and gradient in their place, and the two
products that turn that gradient into those of x and of the weight.

    whole rows      logits -> statistics and gradient -> dx = g W, dW += g^T x       three products, nothing computed twice
    kept columns    logits -> statistics, over all chunks; gradient of what was kept of them -> dx = g W; dW = g^T x
    columns         logits -> statistics, over all chunks; then logits -> gradient -> dx += g W, dW = g^T x
    split rows      (a vocabulary over several processes) logits -> statistics -> exchanged -> gradient -> dx, dW

One buffer holds the logits of every chunk, and their gradient.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from . import chunks, kept, matmul, parallel, reference
from . import rows as rowwise
from .chunks import part
from .launch import KernelBackend
from .launch_rows import RowKernels
from .options import Options

# fp16 sums over tokens are kept this many times their mean at most. A mean is as large as x at most, and in a vocabulary of
# 2^15 as small as x / 2^15 / sqrt(tokens), so that both are within fp16's range, up to an element of 255.
_LARGEST_SUM = 256.0


class Needs(NamedTuple):
    """Which gradients are wanted."""

    dx: bool
    dweight: bool
    dbias: bool


class Gradients(NamedTuple):
    """None where not wanted.

    Attributes:
        factors: what is left to multiply them by, a number each, all but the gradient that the loss receives; None for 1.
    """

    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    factors: Tensor | None = None


def defers(x: Tensor, options: Options) -> bool:
    """Whether gradients of the one loss are made with factors left to multiply them by."""
    return x.dtype == torch.float16 and options.reduction == "mean"


class Layout(NamedTuple):
    """All of a loss that follows from shapes, dtypes and options: looked up at once in every call but the first.

    Attributes:
        plan: where chunks end.
        exact: the dtype of statistics and arithmetic.
        logits_dtype: of logits in memory.
        sum_dtype: that the weight's gradient is summed in.
        dweight_scale: what those sums are multiplied by.
        buffer: elements of the memory for logits.
    """

    plan: chunks.Plan
    exact: torch.dtype
    logits_dtype: torch.dtype
    sum_dtype: torch.dtype
    dweight_scale: float
    buffer: int


@functools.lru_cache(maxsize=1024)
def choose_layout(
    shape: tuple[int, int],
    vocabulary: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    biased: bool,
    options: Options,
    needs: Needs,
    deferred: bool,
    writes_fp32: bool,
    device: Device | None,
) -> Layout:
    """The layout for x of a shape [N, H]; `writes_fp32`: whether products of its dtype can be fp32."""
    tokens, width = shape
    exact = reference.statistics_dtype(x_dtype)
    logits_dtype = exact if writes_fp32 else x_dtype
    sum_dtype = weight_dtype if options.accum_dtype is None else options.accum_dtype
    problem = chunks.Problem(
        tokens,
        width,
        vocabulary,
        logits_dtype.itemsize,
        sum_dtype.itemsize if needs.dweight else 0,
        needs.dx and x_dtype.itemsize < exact.itemsize,
        x_dtype.itemsize if needs.dweight and not biased and options.shift_invariant else 0,
    )
    limits = (options.chunk_tokens, options.memory_budget, device)
    if options.accum_dtype is None:
        plan, wide = chunks.plan_sums(problem, *limits)
        sum_dtype = exact if wide else sum_dtype
    else:
        plan = chunks.plan(problem, *limits)
    scale = _power_of_two(_LARGEST_SUM / max(1, tokens)) if deferred else 1.0
    longest, columns = plan.longest
    return Layout(plan, exact, logits_dtype, sum_dtype, scale, longest * chunks.pitch(columns))


class Engine:
    """One loss of x [N, H], weight [V, H] and target [N].

    Args:
        divisor: what "mean" divides by instead of what it counts.
        options: of the loss.
        needs: which gradients will be asked for.
        deferred: whether those are made with factors left to multiply them by (see `rows.prepare`).
        device: whose kernels run; None for plain PyTorch.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        class_weight: Tensor | None,
        divisor: Tensor | None,
        options: Options,
        needs: Needs,
        deferred: bool,
        device: Device | None,
    ) -> None:
        narrow = matmul.writes_fp32(x.device, x.dtype)
        self.layout = layout = choose_layout(
            x.shape, weight.shape[0], x.dtype, weight.dtype, bias is not None, options, needs, deferred, narrow, device
        )
        self.x, self.weight = x, weight if weight.dtype == x.dtype else weight.to(x.dtype)
        self.options, self.needs = options, needs
        self.plan, self.exact = layout.plan, layout.exact
        self.arithmetic = rowwise.RowArithmetic() if device is None else RowKernels(device)
        scale = layout.dweight_scale if deferred else None
        self.rows = self.arithmetic.prepare(target, class_weight, divisor, options, layout.exact, scale)
        bias = None if bias is None else bias.contiguous()
        class_weight = None if class_weight is None else class_weight.contiguous()
        if device is None:
            self.backend: reference.Reference | KernelBackend = reference.Reference(bias, class_weight, options)
        else:
            self.backend = KernelBackend(bias, class_weight, options, device)
        self.gradients = _Sums(self, weight.dtype, None if bias is None else bias.dtype)
        self.buffer = allocate(x, (layout.buffer,), layout.logits_dtype)

    def statistics(self) -> Tensor:
        """Statistics [6, N] alone."""
        statistics = allocate(self.x, (rowwise.STATISTICS, self.x.shape[0]), self.exact)
        if self.options.return_entropy:
            statistics[rowwise.TOTAL].zero_()  # saved with the others
        for tokens in self.plan.tokens:
            self._statistics(tokens, statistics)
        return statistics

    def losses(self, statistics: Tensor, shape: torch.Size) -> rowwise.Losses:
        """What the caller asked for; `shape` is that of the targets."""
        return self.arithmetic.losses(self.rows, statistics, self.options, shape)

    def coefficients(
        self, rows: rowwise.Rows, statistics: Tensor, dloss: Tensor | float | None, dentropy: Tensor | None
    ) -> Tensor:
        """What the gradient of a chunk is made with, [5, tokens]."""
        return self.arithmetic.coefficients(rows, statistics, self.options, dloss, dentropy)

    def loss_and_gradients(self) -> tuple[Tensor, Gradients]:
        """Statistics [6, N] and the gradients of a loss that is one number."""
        statistics = allocate(self.x, (rowwise.STATISTICS, self.x.shape[0]), self.exact)
        fused = len(self.plan.columns) == 1 and self.backend.fused and not self.options.group
        whole = len(self.plan.columns) == 1
        for tokens in self.plan.tokens:
            if fused:
                assert isinstance(self.backend, KernelBackend)
                (columns,) = self.plan.columns
                logits, gradient = self.logits(tokens, columns)
                target, result = part(self.rows.columns, tokens), part(statistics, tokens, 1)
                self.backend.both(logits, gradient, columns, target, 0, self.rows.gradient_factors, result)
                self.gradients.add(tokens, columns, gradient, self.layout.dweight_scale)
            elif self.plan.kept:
                kept.loss_and_gradients(self, statistics)
            else:
                held = self._statistics(tokens, statistics)
                self._gradient(tokens, statistics, 1.0, None, held if whole else None)
        return statistics, self.gradients.finished(self.layout.dweight_scale, self.rows.left)

    def gradients_of(self, statistics: Tensor, dloss: Tensor | None, dentropy: Tensor | None) -> Gradients:
        """Gradients, given what the backward alone knows: those of the losses and entropies, numbers or [N]."""
        for tokens in self.plan.tokens:
            self._gradient(tokens, statistics, dloss, dentropy, None)
        return self.gradients.finished(1.0)

    def logits(self, tokens: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """A chunk of logits, and the memory for its gradient in x's dtype: in their place, and in the upper half of it."""
        x, weight = part(self.x, tokens), part(self.weight, columns)
        size = x.shape[0], weight.shape[0]
        pitch = chunks.pitch(size[1])
        logits = self.buffer.as_strided(size, (pitch, 1))
        matmul.product(x, weight.t(), logits)
        self.backend.prepare(logits, columns)
        if x.dtype == logits.dtype:
            return logits, logits
        narrow = self.buffer.view(x.dtype)
        return logits, narrow.as_strided(size, (2 * pitch, 1), narrow.storage_offset() + pitch)

    def first(self, columns: slice) -> int:
        """The column of the whole vocabulary that a chunk begins with."""
        return self.options.vocab_first + columns.start

    def _statistics(self, tokens: slice, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the statistics of a chunk of tokens; returns the last chunk of logits, which is still there."""
        result, target = part(statistics, tokens, 1), part(self.rows.columns, tokens)
        for columns in self.plan.columns:
            held = self.logits(tokens, columns)
            self.backend.statistics(held[0], columns, target, self.first(columns), result, columns.start > 0)
        if self.options.group:
            parallel.combine_(result, self.options.group, argmax=self.options.argmax)
        return held

    def _gradient(
        self,
        tokens: slice,
        statistics: Tensor,
        dloss: Tensor | float | None,
        dentropy: Tensor | None,
        held: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Adds the gradients of a chunk of tokens; `held`: its logits and their gradient's memory, where they are there."""
        rows = self.rows.part(tokens)
        if isinstance(dloss, Tensor) and dloss.dim():
            dloss = part(dloss, tokens)
        if dentropy is not None and dentropy.dim():
            dentropy = part(dentropy, tokens)
        coefficients = self.coefficients(rows, part(statistics, tokens, 1), dloss, dentropy)
        for columns in self.plan.columns:
            logits, gradient = held if held is not None else self.logits(tokens, columns)
            self.backend.gradient(logits, gradient, columns, rows.columns, self.first(columns), coefficients)
            self.gradients.add(tokens, columns, gradient, self.layout.dweight_scale)


class _Sums:
    """The gradients of x, weight and bias as they grow, each in its final memory where it can be."""

    def __init__(self, engine: Engine, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
        self._x, self._weight = engine.x, engine.weight
        self._dtypes = weight_dtype, bias_dtype
        self._plan, self._group = engine.plan, engine.options.group
        x, weight, exact = engine.x, engine.weight, engine.exact
        self.dx = allocate(x, x.shape, x.dtype) if engine.needs.dx else None
        self.dweight = allocate(x, weight.shape, engine.layout.sum_dtype) if engine.needs.dweight else None
        self._dbias = allocate(x, weight.shape[:1], exact) if engine.needs.dbias else None
        self._wide_dx = None
        if engine.needs.dx and len(engine.plan.columns) > 1 and x.dtype != exact and not engine.plan.kept:
            tokens = engine.plan.longest[0]
            if engine.plan.borrowed:
                assert self.dweight is not None
                spare = self.dweight[weight.shape[0] - engine.plan.borrowed :].view(-1).view(exact)
                self._wide_dx = spare[: tokens * x.shape[1]].view(tokens, x.shape[1])
            else:
                self._wide_dx = allocate(x, (tokens, x.shape[1]), exact)

    def add(self, tokens: slice, columns: slice, gradient: Tensor, scale: float) -> None:
        """Adds what the gradient [tokens, columns] of raw logits contributes, `scale` times that to the weight's."""
        first = columns.start == 0
        if self.dx is not None:
            weight, dx = part(self._weight, columns), part(self.dx, tokens)
            if self._wide_dx is None:
                (matmul.product if first else matmul.add_product)(gradient, weight, dx)
            else:
                self._add_wide(gradient, weight, dx, columns)
        if self.dweight is not None:
            add = matmul.product if tokens.start == 0 else matmul.add_product
            add(gradient.t(), part(self._x, tokens), part(self.dweight, columns), scale)
        if self._dbias is not None:
            if tokens.start == 0:
                torch.sum(gradient, 0, dtype=self._dbias.dtype, out=self._dbias[columns])
            else:
                self._dbias[columns] += gradient.sum(0, dtype=self._dbias.dtype)

    def _add_wide(self, gradient: Tensor, weight: Tensor, dx: Tensor, columns: slice) -> None:
        assert self._wide_dx is not None
        wide = self._wide_dx[: dx.shape[0]]
        vocabulary = self._weight.shape[0]
        if columns.start < vocabulary - self._plan.borrowed or not self._plan.borrowed:
            (matmul.product if columns.start == 0 else matmul.add_product)(gradient, weight, wide)
            if columns.stop == vocabulary - self._plan.borrowed:
                dx.copy_(wide)
        else:  # the weight's gradient is about to be written where the sums were
            matmul.add_product(gradient, weight, dx)

    def finished(self, scale: float, factors: Tensor | None = None) -> Gradients:
        """All of them; the bias's, whose sums are exact, `scale` times; and what is left to multiply them by."""
        if not self._plan.tokens:
            for sums in (self.dweight, self._dbias):
                if sums is not None:
                    sums.zero_()
        if self.dx is not None and self._group:
            parallel.sum_(self.dx, self._group)
        dweight = self.dweight
        if dweight is not None and dweight.dtype != self._dtypes[0]:
            dweight = dweight.to(self._dtypes[0])
        dbias = None
        if self._dbias is not None:
            dbias = self._dbias if scale == 1.0 else self._dbias.mul_(scale)
            dbias = dbias.to(self._dtypes[1] or dbias.dtype)
        return Gradients(self.dx, dweight, dbias, factors)


def _power_of_two(limit: float) -> float:
    """The largest power of two that is at most `limit`, and at most 1."""
    scale = 1.0
    while scale > limit:
        scale /= 2.0
    return scale
