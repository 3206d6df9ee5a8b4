"""Logits that wait for the gradient where the weight's gradient is going to be.

The statistics of a row are known when all its logits have been seen, and the gradient needs each of them again. The [N, W]
logits of W columns fit in the [W, H] rows of the weight's gradient where N is at most H. In a narrow dtype a logit loses
more the larger it is, so what is kept is its distance from the largest one of its row so far: exact to a few parts in a
thousand of a distance, which is small wherever the probability is not.

Then every product has to be done in an order that overwrites nothing that is still needed: all gradients in place of the
logits, dx from all of them, and then the weight's gradient part by part, each through a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import chunks, matmul, parallel
from . import rows as rowwise

if TYPE_CHECKING:
    from .engine import Engine


def loss_and_gradients(engine: Engine, statistics: Tensor) -> None:
    """Statistics [6, N], and gradients of x and weight in their memory; all tokens are one chunk."""
    dx, dweight, columns, rows = engine.gradients.dx, engine.gradients.dweight, engine.plan.columns, engine.rows
    assert dweight is not None
    kept = KeptLogits(dweight, engine.x.dtype, engine.x.shape[0], engine.plan)
    largest = statistics.new_empty(len(columns), statistics.shape[1])  # what the logits of a chunk are less
    chunks_kept = []
    for index, part in enumerate(columns):
        logits, _ = engine.logits(slice(None), part)
        chunks_kept.append(kept.chunk(part))
        first = engine.first(part)
        engine.backend.keep(logits, chunks_kept[index], part, rows.columns, first, statistics, largest[index], index > 0)
    if engine.options.group:
        parallel.combine_(statistics, engine.options.group, argmax=engine.options.argmax)
    coefficients = engine.coefficients(rows, statistics, 1.0, None)
    lse = coefficients[rowwise.LSE].clone()

    def differentiate(part: slice) -> None:
        for index, chunk in enumerate(columns):
            if part.start <= chunk.start < part.stop:
                torch.sub(lse, largest[index], out=coefficients[rowwise.LSE])
                place = chunks_kept[index]
                engine.backend.gradient(place, place, chunk, rows.columns, engine.first(chunk), coefficients)

    kept.sum_dx(engine.weight, dx, engine.buffer, differentiate)
    kept.finish_dweight(engine.x, engine.buffer, engine.layout.dweight_scale)


class KeptLogits:
    """The gradient [V, H] of the weight as memory for logits, [N, W] in the rows of each part of W columns.

    Args:
        dweight: that memory, contiguous.
        dtype: of what is kept.
        tokens: N.
        plan: the chunks in which logits come, and the parts in which they are kept.
    """

    def __init__(self, dweight: Tensor, dtype: torch.dtype, tokens: int, plan: chunks.Plan) -> None:
        self._dweight, self._dtype = dweight, dtype
        self._tokens = tokens
        self.parts = plan.kept
        self._apart: Tensor | None = None

    def part(self, part: slice) -> Tensor:
        """[N, W] of one of the parts, with rows apart by the pitch of logits."""
        width = part.stop - part.start
        pitch = chunks.pitch(width)
        memory = self._dweight[part].view(-1).view(self._dtype)
        if memory.numel() < self._tokens * pitch:  # the last few columns alone
            if self._apart is None:
                self._apart = self._dweight.new_empty(self._tokens * pitch, dtype=self._dtype)
            memory = self._apart
        return memory[: self._tokens * pitch].view(self._tokens, pitch)[:, :width]

    def chunk(self, columns: slice) -> Tensor:
        """[N, columns] of what is kept of a chunk."""
        part = next(part for part in self.parts if part.start <= columns.start < part.stop)
        return self.part(part)[:, columns.start - part.start : columns.stop - part.start]

    def sum_dx(self, weight: Tensor, dx: Tensor | None, memory: Tensor, differentiate: Callable[[slice], None]) -> None:
        """dx [N, H] = gradients of the logits, which lie where those were kept, @ weight.

        Args:
            memory: for the sums, 1-D and contiguous; used where dx is narrower than they are.
            differentiate: turns the logits of a part into their gradient; called before the first product of each part, so
                that its short launches are queued while a long one runs.
        """
        if dx is None:
            for part in self.parts:
                differentiate(part)
            return
        wide = memory.view(torch.float32) if dx.dtype.itemsize < torch.float32.itemsize else None
        longest = self._tokens if wide is None else wide.numel() // weight.shape[1]
        for tokens in chunks.token_groups(self._tokens, longest):
            target = dx[tokens]
            sums = target if wide is None else wide[: target.numel()].view(target.shape)
            for part in self.parts:
                if tokens.start == 0:
                    differentiate(part)
                (matmul.add_product if part.start else matmul.product)(self.part(part)[tokens], weight[part], sums)
            if wide is not None:
                target.copy_(sums)

    def finish_dweight(self, x: Tensor, memory: Tensor, scale: float) -> None:
        """The weight's gradient = scale times gradients of the logits, transposed, @ x [N, H], where those lie.

        Args:
            memory: for a copy of a part, 1-D and contiguous.
        """
        narrow = memory.view(self._dtype)
        for part in self.parts:
            gradient = self.part(part)
            n, pitch = self._tokens, chunks.pitch(gradient.shape[1])
            copy = narrow[: n * pitch].view(n, pitch)[:, : gradient.shape[1]]
            copy.copy_(gradient)
            matmul.product(copy.t(), x, self._dweight[part], scale)
