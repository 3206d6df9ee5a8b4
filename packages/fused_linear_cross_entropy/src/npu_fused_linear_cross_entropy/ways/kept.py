"""Columns whose logits, or exponentials, wait in the memory of the weight's gradient: nothing is computed twice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling import Device
from torch import Tensor

from .. import rows
from ..calls import LossInputs
from ..chunks import Chunk
from ..launch.product import ExponentialProduct
from ..options import Options
from ..tiling import Tiling
from .exponentials import reachable
from .kept_memory import KeptMemory
from .loss import Loss


class Kept(NamedTuple):
    """A chunk of columns that waits.

    Attributes:
        chunk: the kept numbers as its logits.
        subtracted: [tokens], from the logits of each row.
    """

    chunk: Chunk
    subtracted: Tensor


class KeptLogits(Loss):
    """See `Way.KEPT_LOGITS`. All tokens are one chunk."""

    def add_both(self, tokens: slice, statistics: Tensor) -> None:
        dweight, count = self.gradients.dweight, statistics.shape[1]
        assert dweight is not None
        memory = KeptMemory(dweight, self.x.dtype, count, self.tiling.chunks.kept)
        kept = self.keep(memory, statistics)
        self.exchange(statistics)
        coefficients = self.coefficients(tokens, statistics, 1.0, None)
        factors = self.prepare(kept, statistics, coefficients)

        def differentiate(part: slice) -> None:
            for index, (chunk, _) in enumerate(kept):
                if part.start <= chunk.columns.start < part.stop:
                    self.differentiate(kept[index])

        memory.sum_dx(self.weight, self.gradients.dx, self.buffer, differentiate, factors, self.gradients.targets)
        memory.finish_dweight(self.x, self.buffer, self.tiling.dweight_scale, factors)

    def keep(self, memory: KeptMemory, statistics: Tensor) -> list[Kept]:
        """Writes this rank's statistics [7, N], and keeps every chunk."""
        kept = []
        largest = statistics.new_empty(len(self.tiling.chunks.columns), statistics.shape[1]).unbind()
        for columns, subtracted in zip(self.tiling.chunks.columns, largest, strict=True):
            chunk = self.logits(slice(None), columns)
            place = memory.chunk(columns)
            self.keep_chunk(chunk, place, statistics, subtracted)
            kept.append(Kept(chunk._replace(logits=place), subtracted))
        return kept

    def keep_chunk(self, chunk: Chunk, place: Tensor, statistics: Tensor, subtracted: Tensor) -> None:
        """Keeps a chunk of logits minus the row maxima, which `subtracted` gets, and merges its statistics."""
        self.on_chunks.keep(chunk, place, statistics, subtracted, merge=chunk.columns.start > 0)

    def prepare(self, kept: list[Kept], statistics: Tensor, coefficients: Tensor) -> Tensor | None:
        """Prepares `differentiate`; returns factors [N] of the gradients that it writes, None for 1."""
        self._coefficients, self._reference = coefficients, coefficients[rows.REFERENCE].clone()
        return None

    def differentiate(self, kept: Kept) -> None:
        """Overwrites a kept chunk with the gradient of its logits."""
        torch.sub(self._reference, kept.subtracted, out=self._coefficients[rows.REFERENCE])
        self.on_chunks.gradient(kept.chunk, kept.chunk.logits, self._coefficients)


class KeptExponentials(KeptLogits):
    """See `Way.KEPT_EXPONENTIALS`."""

    def keep_chunk(self, chunk: Chunk, place: Tensor, statistics: Tensor, subtracted: Tensor) -> None:
        self.kernels.exponentials(chunk, place, statistics, subtracted, merge=chunk.columns.start > 0)

    def prepare(self, kept: list[Kept], statistics: Tensor, coefficients: Tensor) -> Tensor | None:
        self._coefficients, self._target_logit = coefficients, statistics[rows.TARGET]
        self._last = reachable(kept[-1].subtracted, coefficients, self.options)
        self._v = statistics.new_empty(statistics.shape[1])
        self._targets = self.gradients.allocate_targets(self.facts.columns, self.options.vocab_first)
        return self._v

    def differentiate(self, kept: Kept) -> None:
        of_rows = self._last, self._target_logit, self._coefficients, self._v, self._targets
        self.kernels.settle(kept.chunk, kept.subtracted, *of_rows)


class KeptProduct(KeptExponentials):
    """See `Way.KEPT_PRODUCT`."""

    def __init__(self, inputs: LossInputs, options: Options, tiling: Tiling, device: Device | None) -> None:
        super().__init__(inputs, options, tiling, device)
        assert device is not None
        self.product = ExponentialProduct(self.weight, options, device)

    def keep(self, memory: KeptMemory, statistics: Tensor) -> list[Kept]:
        parts = [(columns, memory.chunk(columns)) for columns in self.tiling.chunks.columns]
        targets, first = self.facts.columns, self.options.vocab_first
        reference = self.product.statistics(self.x, targets, statistics, parts)
        return [Kept(Chunk(place, columns, targets, first + columns.start), reference) for columns, place in parts]

    def release(self) -> None:
        super().release()
        self.product.release()
