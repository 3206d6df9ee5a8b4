"""The memory of the weight's gradient, where logits or their exponentials wait for the gradient.

The statistics of a row are known after all of its logits, and the gradient needs each logit again. The [N, W] logits of W
columns fit in the [W, H] rows of the weight's gradient if N is at most H. Rounding to a narrow dtype costs large numbers
more, so each logit is kept minus the largest one of its row so far: that difference is small where the probability is not.

The order of products overwrites nothing that is still needed: part by part, the gradients in place of
the logits and their product for dx; after all parts the weight's gradient, part by part, each through a copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import chunks, matmul
from ..launch.chunk import scale_rows
from ..partition import token_groups
from ..rows import TargetGradients


class KeptMemory:
    """The gradient [V, H] of the weight as memory for logits, [N, W] in the rows of each part of W columns.

    Args:
        dweight: the gradient, contiguous.
        dtype: of the kept logits.
        tokens: N.
        parts: of the vocabulary; in each, logits are kept by themselves.
    """

    def __init__(self, dweight: Tensor, dtype: torch.dtype, tokens: int, parts: tuple[slice, ...]) -> None:
        self._dweight, self._dtype = dweight, dtype
        self._tokens = tokens
        self.parts = parts
        self._tail: Tensor | None = None

    def part(self, part: slice) -> Tensor:
        """The memory [N, W] of one part; rows are a pitch of logits apart."""
        width = part.stop - part.start
        pitch = chunks.pitch(width)
        memory = self._dweight[part].view(-1).view(self._dtype)
        if memory.numel() < self._tokens * pitch:  # the last few columns alone
            if self._tail is None:
                self._tail = self._dweight.new_empty(self._tokens * pitch, dtype=self._dtype)
            memory = self._tail
        return memory[: self._tokens * pitch].view(self._tokens, pitch)[:, :width]

    def chunk(self, columns: slice) -> Tensor:
        """The memory [N, columns] of a chunk."""
        part = next(part for part in self.parts if part.start <= columns.start < part.stop)
        return self.part(part)[:, columns.start - part.start : columns.stop - part.start]

    def sum_dx(
        self,
        weight: Tensor,
        dx: Tensor | None,
        memory: Tensor,
        differentiate: Callable[[slice], None],
        factors: Tensor | None,
        targets: TargetGradients | None,
    ) -> None:
        """dx [N, H] = gradients of the logits, in the place of the kept logits, @ weight.

        Args:
            memory: for the sums, 1-D and contiguous; used if dx is narrower than they are.
            differentiate: turns the logits of a part into their gradient; called before the first product of each part, so
                that short launches are queued while a long one runs.
            factors: [N], of the gradients there; None for 1.
            targets: what the gradients there leave out; None for nothing.
        """
        if dx is None:
            for part in self.parts:
                differentiate(part)
            return
        wide = memory.view(torch.float32) if dx.dtype.itemsize < torch.float32.itemsize else None
        longest = self._tokens if wide is None else wide.numel() // weight.shape[1]
        for tokens in token_groups(self._tokens, longest):
            target = dx[tokens]
            sums = target if wide is None else wide[: target.numel()].view(target.shape)
            for part in self.parts:
                if tokens.start == 0:
                    differentiate(part)
                (matmul.add_product if part.start else matmul.product)(self.part(part)[tokens], weight[part], sums)
            if factors is not None:
                scale_rows(sums, factors[tokens], target, targets and targets.part(tokens), weight)
            elif wide is not None:
                target.copy_(sums)

    def finish_dweight(self, x: Tensor, memory: Tensor, scale: float, factors: Tensor | None) -> None:
        """The weight's gradient = scale times gradients of the logits, transposed, @ x [N, H]; it overwrites them.

        Args:
            memory: for a copy of a part, 1-D and contiguous.
            factors: as in `sum_dx`.
        """
        narrow = memory.view(self._dtype)
        for part in self.parts:
            gradient = self.part(part)
            n, pitch = self._tokens, chunks.pitch(gradient.shape[1])
            copy = narrow[: n * pitch].view(n, pitch)[:, : gradient.shape[1]]
            if factors is None:
                copy.copy_(gradient)
            else:
                scale_rows(gradient, factors, copy)
            matmul.product(copy.t(), x, self._dweight[part], scale)
