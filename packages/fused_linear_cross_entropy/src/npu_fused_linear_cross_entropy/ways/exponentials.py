"""Exponentials of whole rows in one sweep; the gradient is a factor of each row times its exponentials."""

from __future__ import annotations

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import chunks, rows
from ..calls import LossInputs
from ..chunks import Chunk, part
from ..options import Options
from ..tiling import Tiling
from .columns import Columns

_MAX_GAP = 64.0  # e^64 neither overflows nor underflows fp32 and bf16


def reachable(reference: Tensor, coefficients: Tensor, options: Options) -> Tensor:
    """References for which exp(k - reference) is finite: logits of other ranks may be far above those of this one."""
    return torch.maximum(reference, coefficients[rows.REFERENCE] - _MAX_GAP) if options.group else reference


class Exponentials(Columns):
    """See `Way.EXPONENTIALS`."""

    def __init__(self, inputs: LossInputs, options: Options, tiling: Tiling, device: Device | None) -> None:
        super().__init__(inputs, options, tiling, device)
        self._scratch: tuple[Tensor | None, Tensor | None] | None = None
        self.targets = self.gradients.allocate_targets(self.facts.columns, options.vocab_first)

    def exponentials(self, tokens: slice, result: Tensor) -> tuple[Tensor, Tensor]:
        """Writes this rank's statistics [7, tokens]; returns exponentials [tokens, V] and their references [tokens]."""
        (columns,) = self.tiling.chunks.columns
        chunk = self.logits(tokens, columns)
        memory = self.gradient_memory(chunk.logits)
        reference = allocate(self.x, (memory.shape[0],), self.tiling.exact)
        self.kernels.exponentials(chunk, memory, result, reference, merge=False)
        return memory, reference

    def add_both(self, tokens: slice, statistics: Tensor) -> None:
        result = part(statistics, tokens, 1)
        exponentials, reference = self.exponentials(tokens, result)
        self.exchange(result)
        coefficients = self.coefficients(tokens, statistics, 1.0, None)
        self.add_exponentials(tokens, exponentials, reference, statistics, coefficients)

    def add_exponentials(
        self, tokens: slice, exponentials: Tensor, reference: Tensor, statistics: Tensor, coefficients: Tensor
    ) -> None:
        """Adds the gradients, given E [tokens, V], its reference [tokens], and coefficients [5, tokens]."""
        (columns,) = self.tiling.chunks.columns
        chunk = Chunk(exponentials, columns, part(self.facts.columns, tokens), self.options.vocab_first)
        v, targets = torch.empty_like(reference), self.targets.part(tokens)
        target_logit = part(statistics, tokens, 1)[rows.TARGET]
        last = reachable(reference, coefficients, self.options)
        self.kernels.settle(chunk, reference, last, target_logit, coefficients, v, targets)
        self.gradients.add_scaled(tokens, exponentials, v, *self._memory(exponentials.shape[0]))

    def release(self) -> None:
        super().release()
        self._scratch = None

    def _memory(self, count: int) -> tuple[Tensor | None, Tensor | None]:
        """Memory [count, H] for sums of dx in fp32, None if dx itself is fp32, and for v x."""
        dtype, exact, width = self.x.dtype, self.tiling.product_dtype, self.x.shape[1]
        if self.tiling.sums_in_buffer:  # E fills the second half of each row, and the first is free
            pitch, narrow = chunks.pitch(self.weight.shape[0]), self.buffer.view(dtype)
            sums = self.buffer.as_strided((count, width), (pitch, 1))
            return sums, narrow.as_strided((count, width), (2 * pitch, 1))
        if self._scratch is None:
            size = self.tiling.chunks.longest[0], width
            wide = allocate(self.x, size, exact) if dtype != exact and self.gradients.dx is not None else None
            self._scratch = wide, None if self.gradients.dweight is None else allocate(self.x, size, dtype)
        wide, scaled = self._scratch
        return None if wide is None else wide[:count], None if scaled is None else scaled[:count]
