"""The loop over chunks: logits by the framework's matrix product, statistics and gradient in their place, and the two
products that turn that gradient into those of x and of the weight.

    whole rows      logits -> statistics and gradient -> dx = g W, dW += g^T x       three products, nothing computed twice
    kept columns    logits -> statistics, over all chunks; gradient of what was kept of them -> dx = g W; dW = g^T x
    columns         logits -> statistics, over all chunks; then logits -> gradient -> dx += g W, dW = g^T x
    split rows      (a vocabulary over several processes) logits -> statistics -> exchanged -> gradient -> dx, dW

One buffer holds the logits of every chunk, and their gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from . import chunks, kept, matmul, parallel, reference
from . import rows as rowwise
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
        self.x, self.weight = x, weight.to(x.dtype)
        self.options, self.needs = options, needs
        self.exact = reference.statistics_dtype(x.dtype)
        scale = _power_of_two(_LARGEST_SUM / max(1, x.shape[0])) if deferred else None
        self.dweight_scale = scale or 1.0
        self.arithmetic = rowwise.RowArithmetic() if device is None else RowKernels(device)
        self.rows = self.arithmetic.prepare(target, class_weight, divisor, options, self.exact, scale)
        bias = None if bias is None else bias.contiguous()
        class_weight = None if class_weight is None else class_weight.contiguous()
        if device is None:
            self.backend: reference.Reference | KernelBackend = reference.Reference(bias, class_weight, options)
        else:
            self.backend = KernelBackend(bias, class_weight, options, device)
        self.logits_dtype = self.exact if matmul.writes_fp32(x.device, x.dtype) else x.dtype
        self.sum_dtype = weight.dtype if options.accum_dtype is None else options.accum_dtype
        problem = chunks.Problem(
            x.shape[0],
            x.shape[1],
            weight.shape[0],
            self.logits_dtype.itemsize,
            self.sum_dtype.itemsize if needs.dweight else 0,
            needs.dx and x.dtype.itemsize < self.exact.itemsize,
            x.dtype.itemsize if needs.dweight and bias is None and options.shift_invariant else 0,
        )
        limits = (options.chunk_tokens, options.memory_budget, device)
        if options.accum_dtype is None:
            self.plan, wide = chunks.plan_sums(problem, *limits)
            self.sum_dtype = self.exact if wide else self.sum_dtype
        else:
            self.plan = chunks.plan(problem, *limits)
        self.gradients = _Sums(self, weight.dtype, None if bias is None else bias.dtype)
        tokens, columns = self.plan.longest
        self.buffer = allocate(x, (tokens * chunks.pitch(columns),), self.logits_dtype)

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
        whole = len(self.plan.columns) == 1
        for tokens in self.plan.tokens:
            if whole and self.backend.fused and not self.options.group:
                assert isinstance(self.backend, KernelBackend)
                (columns,) = self.plan.columns
                logits, gradient = self.logits(tokens, columns)
                target, result = self.rows.columns[tokens], statistics[:, tokens]
                self.backend.both(logits, gradient, columns, target, 0, self.rows.gradient_factors, result)
                self.gradients.add(tokens, columns, gradient, self.dweight_scale)
            elif self.plan.kept:
                kept.loss_and_gradients(self, statistics)
            else:
                held = self._statistics(tokens, statistics)
                self._gradient(tokens, statistics, 1.0, None, held if whole else None)
        return statistics, self.gradients.finished(self.dweight_scale)._replace(factors=self.rows.left)

    def gradients_of(self, statistics: Tensor, dloss: Tensor | None, dentropy: Tensor | None) -> Gradients:
        """Gradients, given what the backward alone knows: those of the losses and entropies, numbers or [N]."""
        for tokens in self.plan.tokens:
            self._gradient(tokens, statistics, dloss, dentropy, None)
        return self.gradients.finished(1.0)

    def logits(self, tokens: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """A chunk of logits, and the memory for its gradient in x's dtype: in their place, and in the upper half of it."""
        x, weight = self.x[tokens], self.weight[columns]
        n, width, pitch = x.shape[0], weight.shape[0], chunks.pitch(weight.shape[0])
        used = self.buffer[: n * pitch]
        logits = used.view(n, pitch)[:, :width]
        matmul.product(x, weight.t(), logits)
        self.backend.prepare(logits, columns)
        if self.x.dtype == self.logits_dtype:
            return logits, logits
        return logits, used.view(self.x.dtype).view(n, 2 * pitch)[:, pitch : pitch + width]

    def first(self, columns: slice) -> int:
        """The column of the whole vocabulary that a chunk begins with."""
        return self.options.vocab_first + columns.start

    def _statistics(self, tokens: slice, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the statistics of a chunk of tokens; returns the last chunk of logits, which is still there."""
        result, target = statistics[:, tokens], self.rows.columns[tokens]
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
            dloss = dloss[tokens]
        if dentropy is not None and dentropy.dim():
            dentropy = dentropy[tokens]
        coefficients = self.coefficients(rows, statistics[:, tokens], dloss, dentropy)
        for columns in self.plan.columns:
            logits, gradient = held if held is not None else self.logits(tokens, columns)
            self.backend.gradient(logits, gradient, columns, rows.columns, self.first(columns), coefficients)
            self.gradients.add(tokens, columns, gradient, self.dweight_scale)


class _Sums:
    """The gradients of x, weight and bias as they grow, each in its final memory where it can be."""

    def __init__(self, engine: Engine, weight_dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
        self._x, self._weight = engine.x, engine.weight
        self._dtypes = weight_dtype, bias_dtype
        self._plan, self._group = engine.plan, engine.options.group
        x, weight, exact = engine.x, engine.weight, engine.exact
        self.dx = allocate(x, x.shape, x.dtype) if engine.needs.dx else None
        self.dweight = allocate(x, weight.shape, engine.sum_dtype) if engine.needs.dweight else None
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
            weight, dx = self._weight[columns], self.dx[tokens]
            if self._wide_dx is None:
                (matmul.product if first else matmul.add_product)(gradient, weight, dx)
            else:
                self._add_wide(gradient, weight, dx, columns)
        if self.dweight is not None:
            add = matmul.product if tokens.start == 0 else matmul.add_product
            add(gradient.t(), self._x[tokens], self.dweight[columns], scale)
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

    def finished(self, scale: float) -> Gradients:
        """All of them; the bias's, whose sums are exact, `scale` times."""
        if not self._plan.tokens:
            for sums in (self.dweight, self._dbias):
                if sums is not None:
                    sums.zero_()
        if self.dx is not None and self._group:
            parallel.sum_(self.dx, self._group)
        dweight = None if self.dweight is None else self.dweight.to(self._dtypes[0])
        dbias = None
        if self._dbias is not None:
            dbias = self._dbias if scale == 1.0 else self._dbias.mul_(scale)
            dbias = dbias.to(self._dtypes[1] or dbias.dtype)
        return Gradients(self.dx, dweight, dbias)


def _power_of_two(limit: float) -> float:
    """The largest power of two that is at most `limit`, and at most 1."""
    scale = 1.0
    while scale > limit:
        scale /= 2.0
    return scale
