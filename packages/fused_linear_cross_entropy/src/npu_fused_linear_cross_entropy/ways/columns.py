"""Logits by PyTorch's product: some columns of the vocabulary at a time, computed twice, or whole rows, computed once."""

from __future__ import annotations

from torch import Tensor

from ..chunks import part
from .loss import Loss


class Columns(Loss):
    """See `Way.COLUMNS`."""

    def add_statistics(self, tokens: slice, result: Tensor) -> None:
        for columns in self.tiling.chunks.columns:
            chunk = self.logits(tokens, columns)
            self.on_chunks.statistics(chunk, result, merge=columns.start > 0)
        self.exchange(result)

    def add_gradients(
        self, tokens: slice, statistics: Tensor, dloss: Tensor | float | None, dentropy: Tensor | None
    ) -> None:
        coefficients = self.coefficients(tokens, statistics, dloss, dentropy)
        for columns in self.tiling.chunks.columns:
            chunk = self.logits(tokens, columns)
            gradient = self.gradient_memory(chunk.logits)
            self.on_chunks.gradient(chunk, gradient, coefficients)
            self.gradients.add(tokens, columns, gradient)


class WholeRows(Columns):
    """See `Way.WHOLE_ROWS`: one chunk of columns, whose logits are still there when the statistics are known."""

    def add_both(self, tokens: slice, statistics: Tensor) -> None:
        (columns,) = self.tiling.chunks.columns
        chunk = self.logits(tokens, columns)
        gradient = self.gradient_memory(chunk.logits)
        result = part(statistics, tokens, 1)
        if self.options.group or self.factors is not None:
            self.on_chunks.statistics(chunk, result, merge=False)
            self.exchange(result)
            self.on_chunks.gradient(chunk, gradient, self.coefficients(tokens, statistics, 1.0, None))
        else:
            self.on_chunks.statistics_and_gradient(chunk, gradient, self.facts.part(tokens), result)
        self.gradients.add(tokens, columns, gradient)
