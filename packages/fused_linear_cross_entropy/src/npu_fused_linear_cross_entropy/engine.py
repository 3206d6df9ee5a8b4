"""The loop over chunks: logits by the framework's matrix product, statistics and gradient in their place, and the two
products that turn that gradient into those of x and of the weight.

    whole rows      logits -> statistics and gradient -> dx = g W, dW += g^T x       three products, nothing computed twice
    one sweep       logits -> statistics and exponentials E -> dx = v (E W), dW += E^T (v x)        v: a factor of each row
    fused           the same, with E out of the product itself: there are no logits (launch/product.py)
    kept columns    logits -> statistics, over all chunks; gradient of what was kept of them -> dx = g W; dW = g^T x
    columns         logits -> statistics, over all chunks; then logits -> gradient -> dx += g W, dW = g^T x
    split rows      (a vocabulary over several processes) logits -> statistics -> exchanged -> gradient -> dx, dW

One buffer holds the logits of every chunk, and their gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from . import chunks, matmul, parallel, row_math
from .chunks import Chunk, part
from .gradients import Gradients, Sums
from .kept_logits import KeptLogits
from .launch.chunk import KernelBackend
from .launch.product import ExponentialProduct, is_possible
from .launch.rows import RowKernels
from .layout import choose_layout
from .options import Needs, Options
from .reference import Reference

_FARTHEST = 64.0  # e^64 times 2^24, which the target's element may have beside it, is far from the end of fp32 and bf16


class Inputs(NamedTuple):
    """The tensors of a loss, in the order of the registered operators.

    Attributes:
        x: [N, H].
        weight: [V, H].
        target: [N].
        bias, class_weight: [V].
        divisor: what "mean" divides by instead of the number of counted rows.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    divisor: Tensor | None


class Engine:
    """One loss.

    Args:
        inputs: x and target without leading dimensions.
        options: of the loss.
        needs: which gradients will be asked for.
        deferred: whether factors of those are left for later (see `row_math.prepare`).
        device: whose kernels run; None for plain PyTorch.
    """

    def __init__(self, inputs: Inputs, options: Options, needs: Needs, deferred: bool, device: Device | None) -> None:
        x, weight, target, bias, class_weight, divisor = inputs
        dtypes = weight.dtype, None if bias is None else bias.dtype
        wide = matmul.writes_fp32(x.device, x.dtype)
        self.x, self.weight = x, weight if weight.dtype == x.dtype else weight.to(x.dtype)
        how = needs, deferred, wide, is_possible(x, self.weight), device
        layout = choose_layout(x.shape, weight.shape[0], x.dtype, *dtypes, options, *how)
        self.options, self.layout, self.plan = options, layout, layout.plan
        self.arithmetic = row_math.RowMath() if device is None else RowKernels(device)
        scale = layout.dweight_scale if deferred else None
        self.rows = self.arithmetic.prepare(target, class_weight, divisor, options, layout.exact, scale)
        bias = None if bias is None else bias.contiguous()
        class_weight = None if class_weight is None else class_weight.contiguous()
        if device is None:
            self.backend: Reference | KernelBackend = Reference(bias, class_weight, options)
        else:
            self.backend = KernelBackend(bias, class_weight, options, device)
        self.gradients = Sums(x, self.weight, layout, needs, options.group, dtypes)
        self.buffer = allocate(x, (layout.buffer,), layout.logits_dtype)
        self.product = ExponentialProduct(self.weight, options, device) if layout.fused and device is not None else None
        self._beside: tuple[Tensor | None, Tensor | None] | None = None

    def statistics(self) -> Tensor:
        """Statistics [6, N] alone."""
        statistics = allocate(self.x, (row_math.STATISTICS, self.x.shape[0]), self.layout.exact)
        if self.options.return_entropy:
            statistics[row_math.TOTAL].zero_()  # saved with the others
        for tokens in self.plan.tokens:
            self._statistics(tokens, statistics)
        return statistics

    def losses(self, statistics: Tensor, shape: torch.Size) -> row_math.Losses:
        """The outputs that the caller asked for; `shape`: of the targets."""
        return self.arithmetic.losses(self.rows, statistics, self.options, shape)

    def coefficients(
        self, rows: row_math.Rows, statistics: Tensor, dloss: Tensor | float | None, dentropy: Tensor | None
    ) -> Tensor:
        """The coefficients of a chunk's gradient, [5, tokens]."""
        return self.arithmetic.coefficients(rows, statistics, self.options, dloss, dentropy)

    def loss_and_gradients(self) -> tuple[Tensor, Gradients]:
        """Statistics [6, N] and the gradients of a loss that is one number."""
        statistics = allocate(self.x, (row_math.STATISTICS, self.x.shape[0]), self.layout.exact)
        whole = len(self.plan.columns) == 1
        if self.plan.kept:
            self._keep(statistics)
        elif self.layout.exponentials:
            self._sweep_once(statistics)
        elif whole and isinstance(self.backend, KernelBackend) and not self.options.group:
            (columns,) = self.plan.columns
            for tokens in self.plan.tokens:
                chunk, gradient = self.logits(tokens, columns)
                self.backend.both(chunk, gradient, self.rows.gradient_factors, part(statistics, tokens, 1))
                self.gradients.add(tokens, columns, gradient)
        else:
            for tokens in self.plan.tokens:
                last = self._statistics(tokens, statistics)
                self._gradient(tokens, statistics, 1.0, None, last if whole else None)
        self.buffer, self._beside, self.product = self.buffer.new_empty(0), None, None  # before the sums are cast
        return statistics, self.gradients.finished(self.rows.left)

    def gradients_of(self, statistics: Tensor, dloss: Tensor | None, dentropy: Tensor | None) -> Gradients:
        """Gradients, given the upstream gradients of losses and entropies, numbers or [N]."""
        for tokens in self.plan.tokens:
            self._gradient(tokens, statistics, dloss, dentropy, None)
        return self.gradients.finished()

    def logits(self, tokens: slice, columns: slice) -> tuple[Chunk, Tensor]:
        """A chunk of logits, and the memory for its gradient in x's dtype: in their place, and in the upper half of it."""
        x, weight = part(self.x, tokens), part(self.weight, columns)
        size = x.shape[0], weight.shape[0]
        pitch = chunks.pitch(size[1])
        logits = self.buffer.as_strided(size, (pitch, 1))
        matmul.product(x, weight.t(), logits)
        self.backend.prepare(logits, columns)
        chunk = Chunk(logits, columns, part(self.rows.columns, tokens), self.options.vocab_first + columns.start)
        if x.dtype == logits.dtype:
            return chunk, logits
        narrow = self.buffer.view(x.dtype)
        return chunk, narrow.as_strided(size, (2 * pitch, 1), narrow.storage_offset() + pitch)

    def _statistics(self, tokens: slice, statistics: Tensor) -> tuple[Chunk, Tensor] | None:
        """Writes the statistics of a chunk of tokens; returns the last chunk of logits, if there are any."""
        result, last = part(statistics, tokens, 1), None
        if self.product is not None:
            everything = slice(0, self.weight.shape[0])
            self.product.statistics(part(self.x, tokens), part(self.rows.columns, tokens), result, ((everything, None),))
        else:
            for columns in self.plan.columns:
                last = self.logits(tokens, columns)
                self.backend.statistics(last[0], result, columns.start > 0)
        if self.options.group:
            parallel.combine_(result, self.options.group, argmax=self.options.argmax)
        return last

    def _gradient(
        self,
        tokens: slice,
        statistics: Tensor,
        dloss: Tensor | float | None,
        dentropy: Tensor | None,
        held: tuple[Chunk, Tensor] | None,
    ) -> None:
        """Adds the gradients of a chunk of tokens; `held`: its logits and their gradient's memory, if they are in memory."""
        if isinstance(dloss, Tensor) and dloss.dim():
            dloss = part(dloss, tokens)
        if dentropy is not None and dentropy.dim():
            dentropy = part(dentropy, tokens)
        coefficients = self.coefficients(self.rows.part(tokens), part(statistics, tokens, 1), dloss, dentropy)
        if self.product is not None:
            lse, exponentials = coefficients[row_math.LSE], self._exponentials(tokens)
            self.product.probabilities(part(self.x, tokens), lse, exponentials)
            self._add_settled(tokens, exponentials, lse, statistics, coefficients)
            return
        for columns in self.plan.columns:
            chunk, gradient = held if held is not None else self.logits(tokens, columns)
            self.backend.gradient(chunk, gradient, coefficients)
            self.gradients.add(tokens, columns, gradient)

    def _sweep_once(self, statistics: Tensor) -> None:
        """Statistics [6, N], and the gradients of whole rows whose logits become exponentials."""
        backend, (columns,) = self.backend, self.plan.columns
        assert isinstance(backend, KernelBackend)
        for tokens in self.plan.tokens:
            result, group = part(statistics, tokens, 1), self.options.group
            if self.product is not None:
                exponentials, targets = self._exponentials(tokens), part(self.rows.columns, tokens)
                reference = self.product.statistics(part(self.x, tokens), targets, result, ((columns, exponentials),))
            else:
                chunk, exponentials = self.logits(tokens, columns)
                reference = allocate(self.x, (exponentials.shape[0],), self.layout.exact)
                if not group:  # v, which is known at once
                    backend.both_in_one_sweep(chunk, exponentials, self.rows.gradient_factors, result, reference)
                    self.gradients.add_scaled(tokens, exponentials, reference, *self._room(exponentials.shape[0]))
                    continue
                backend.exponentials(chunk, exponentials, result, reference, False)
            if group:
                parallel.combine_(result, group, argmax=False)
            coefficients = self.coefficients(self.rows.part(tokens), result, 1.0, None)
            self._add_settled(tokens, exponentials, reference, statistics, coefficients)

    def _exponentials(self, tokens: slice) -> Tensor:
        """Memory [tokens, V]."""
        size = part(self.x, tokens).shape[0], self.weight.shape[0]
        return self.buffer.as_strided(size, (chunks.pitch(size[1]), 1))

    def _add_settled(
        self, tokens: slice, exponentials: Tensor, reference: Tensor, statistics: Tensor, coefficients: Tensor
    ) -> None:
        """Adds the gradients of exponentials [tokens, V] of logits less a reference [tokens], given [5, tokens]."""
        backend, (columns,) = self.backend, self.plan.columns
        assert isinstance(backend, KernelBackend)
        chunk = Chunk(exponentials, columns, part(self.rows.columns, tokens), self.options.vocab_first)
        v = torch.empty_like(reference)
        target_logit = part(statistics, tokens, 1)[row_math.TARGET]
        backend.settle(chunk, reference, self._near(reference, coefficients), target_logit, coefficients, v)
        self.gradients.add_scaled(tokens, exponentials, v, *self._room(exponentials.shape[0]))

    def _near(self, reference: Tensor, coefficients: Tensor) -> Tensor:
        """References that exp(L - k) is finite for: logits of other ranks may be far above all that one rank has."""
        return torch.maximum(reference, coefficients[row_math.LSE] - _FARTHEST) if self.options.group else reference

    def _room(self, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """Memory [rows, H] for sums of dx in fp32, None if dx is, and for rows of x times a number."""
        dtype, exact, width = self.x.dtype, self.layout.product_dtype, self.x.shape[1]
        if self.layout.room:  # exponentials lie in the upper half of each row
            pitch, narrow = chunks.pitch(self.weight.shape[0]), self.buffer.view(dtype)
            sums = self.buffer.as_strided((rows, width), (pitch, 1))
            return sums, narrow.as_strided((rows, width), (2 * pitch, 1))
        if self._beside is None:
            needed = self.plan.longest[0], width
            wide = allocate(self.x, needed, exact) if dtype != exact and self.gradients.dx is not None else None
            self._beside = wide, None if self.gradients.dweight is None else allocate(self.x, needed, dtype)
        wide, scaled = self._beside
        return None if wide is None else wide[:rows], None if scaled is None else scaled[:rows]

    def _keep(self, statistics: Tensor) -> None:
        """Statistics [6, N], and gradients of x and weight in their memory; all tokens are one chunk."""
        dx, dweight, columns = self.gradients.dx, self.gradients.dweight, self.plan.columns
        assert dweight is not None
        kept = KeptLogits(dweight, self.x.dtype, self.x.shape[0], self.plan)
        v = statistics.new_empty(statistics.shape[1]) if self.layout.exponentials else None
        held: list[Chunk] = []
        largest: Sequence[Tensor]  # what was subtracted from each chunk's rows
        if self.product is not None:
            first, targets = self.options.vocab_first, self.rows.columns
            held = [Chunk(kept.chunk(own), own, targets, first + own.start) for own in columns]
            parts = [(one.columns, one.logits) for one in held]
            largest = [self.product.statistics(self.x, targets, statistics, parts)] * len(columns)
        else:
            largest = statistics.new_empty(len(columns), statistics.shape[1]).unbind()
            exponentials = isinstance(self.backend, KernelBackend) and v is not None
            for index, own in enumerate(columns):
                chunk, _ = self.logits(slice(None), own)
                held.append(chunk._replace(logits=kept.chunk(own)))
                keep = self.backend.exponentials if exponentials else self.backend.keep  # type: ignore[union-attr]
                keep(chunk, held[index].logits, statistics, largest[index], index > 0)
        if self.options.group:
            parallel.combine_(statistics, self.options.group, argmax=self.options.argmax)
        coefficients = self.coefficients(self.rows, statistics, 1.0, None)
        lse, last = coefficients[row_math.LSE].clone(), self._near(largest[-1], coefficients)

        def differentiate(which: slice) -> None:
            for index, chunk in enumerate(held):
                if not which.start <= chunk.columns.start < which.stop:
                    continue
                if isinstance(self.backend, KernelBackend) and v is not None:
                    target_logit = statistics[row_math.TARGET]
                    self.backend.settle(chunk, largest[index], last, target_logit, coefficients, v)
                else:
                    torch.sub(lse, largest[index], out=coefficients[row_math.LSE])
                    self.backend.gradient(chunk, chunk.logits, coefficients)

        kept.sum_dx(self.weight, dx, self.buffer, differentiate, v)
        kept.finish_dweight(self.x, self.buffer, self.layout.dweight_scale, v)
