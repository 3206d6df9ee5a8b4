"""Some columns of the vocabulary at a time: their logits are computed twice."""

from __future__ import annotations

from torch import Tensor

from .loss import Loss


class Columns(Loss):
    """See `Way.COLUMNS`."""

    def add_statistics(self, tokens: slice, result: Tensor) -> None:
        for columns in self.tiling.chunks.columns:
            chunk, _ = self.logits(tokens, columns)
            self.on_chunks.statistics(chunk, result, merge=columns.start > 0)
        self.exchange(result)

    def add_gradients(
        self, tokens: slice, statistics: Tensor, dloss: Tensor | float | None, dentropy: Tensor | None
    ) -> None:
        coefficients = self.coefficients(tokens, statistics, dloss, dentropy)
        for columns in self.tiling.chunks.columns:
            chunk, gradient = self.logits(tokens, columns)
            self.on_chunks.gradient(chunk, gradient, coefficients)
            self.gradients.add(tokens, columns, gradient)
