"""Exponentials out of the product of x and the weight itself: there are no logits (CUDA)."""

from __future__ import annotations

from npu_tiling import Device
from torch import Tensor

from .. import chunks, rows
from ..calls import LossInputs
from ..chunks import part
from ..launch.product import ExponentialProduct
from ..options import Options
from ..tiling import Tiling
from .exponentials import Exponentials


class Product(Exponentials):
    """See `Way.PRODUCT`."""

    def __init__(self, inputs: LossInputs, options: Options, tiling: Tiling, device: Device | None) -> None:
        super().__init__(inputs, options, tiling, device)
        assert device is not None
        self.product = ExponentialProduct(self.weight, options, device)

    def add_statistics(self, tokens: slice, result: Tensor) -> None:
        targets, (columns,) = part(self.facts.columns, tokens), self.tiling.chunks.columns
        self.product.statistics(part(self.x, tokens), targets, result, ((columns, None),))
        self.exchange(result)

    def exponentials(self, tokens: slice, result: Tensor) -> tuple[Tensor, Tensor]:
        memory, targets = self._memory_of(tokens), part(self.facts.columns, tokens)
        (columns,) = self.tiling.chunks.columns
        return memory, self.product.statistics(part(self.x, tokens), targets, result, ((columns, memory),))

    def add_gradients(
        self, tokens: slice, statistics: Tensor, dloss: Tensor | float | None, dentropy: Tensor | None
    ) -> None:
        coefficients = self.coefficients(tokens, statistics, dloss, dentropy)
        reference, exponentials = coefficients[rows.REFERENCE], self._memory_of(tokens)
        self.product.exponentials(part(self.x, tokens), reference, exponentials)
        self.add_exponentials(tokens, exponentials, reference, statistics, coefficients)

    def release(self) -> None:
        super().release()
        self.product.release()

    def _memory_of(self, tokens: slice) -> Tensor:
        """Memory for the exponentials of a chunk, [tokens, V]."""
        size = part(self.x, tokens).shape[0], self.weight.shape[0]
        return self.buffer.as_strided(size, (chunks.pitch(size[1]), 1))
