"""The base of every way of computing a loss: facts of its targets, and the loop over chunks."""

from __future__ import annotations

import torch
from npu_tiling import Device
from npu_tiling.pytorch import collectives
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import rows
from ..calls import LossInputs
from ..chunks import Chunk, part
from ..gradients import Gradients
from ..launch.chunk import ChunkKernels
from ..launch.rows import RowKernels
from ..options import Options
from ..reference.chunks import ReferenceChunks
from ..reference.rows import ReferenceRows
from ..tiling import Tiling
from .head import Head


class Loss(Head):
    """One loss. A way defines the steps for a chunk of tokens: `add_statistics`, `add_gradients`, or both at once.

    Args:
        inputs: x and target without leading dimensions.
        options: of the loss.
        tiling: how it is computed.
        device: whose kernels run; None for plain PyTorch.
    """

    def __init__(self, inputs: LossInputs, options: Options, tiling: Tiling, device: Device | None) -> None:
        super().__init__(inputs, options, tiling, device)
        divisor = inputs.divisor
        self.on_rows = ReferenceRows() if device is None else RowKernels(device)
        scale = tiling.dweight_scale if tiling.shape.unfinished else None
        self.factors: Tensor | None = None  # of losses, and of their gradients, [N] each; None: one for all
        if divisor is not None and divisor.dim():
            self.factors = 1.0 / divisor.reshape(-1).to(tiling.exact)
            divisor, options = None, options._replace(reduction="none")
        self._gradient_factors, self._row_options = self.factors, options
        self.facts = self.on_rows.target_facts(inputs.target, inputs.class_weight, divisor, options, tiling.exact, scale)
        if self.factors is not None and self.facts.unfinished is not None:
            # As class weights are, and with them: see `reference.rows.target_facts`.
            weights = self.facts.target_weight
            every = self.factors if weights is None else self.factors * weights * self.facts.gradient_factors[0]
            size = rows.typical_size(every)
            self._gradient_factors = self.factors / size
            self.facts = self.facts._replace(unfinished=self.facts.unfinished * size)
        bias = None if inputs.bias is None else inputs.bias.contiguous()
        class_weight = None if inputs.class_weight is None else inputs.class_weight.contiguous()
        self.on_chunks = (
            ReferenceChunks(bias, class_weight, options)
            if device is None
            else ChunkKernels(bias, class_weight, options, device)
        )

    @property
    def kernels(self) -> ChunkKernels:
        """For ways that are chosen only where there are kernels."""
        assert isinstance(self.on_chunks, ChunkKernels)
        return self.on_chunks

    # Steps for a chunk of tokens.

    def add_statistics(self, tokens: slice, result: Tensor) -> None:
        """Writes statistics [7, tokens] of the whole vocabulary."""
        raise NotImplementedError

    def add_gradients(
        self, tokens: slice, statistics: Tensor, dloss: Tensor | float | None, dentropy: Tensor | None
    ) -> None:
        """Adds gradients, given the statistics [7, N] of all tokens, and upstream gradients, numbers or [N]."""
        raise NotImplementedError

    def add_both(self, tokens: slice, statistics: Tensor) -> None:
        """Writes the chunk's columns of the statistics [7, N], and adds the gradients of a loss that is one number."""
        self.add_statistics(tokens, part(statistics, tokens, 1))
        self.add_gradients(tokens, statistics, 1.0, None)

    # Results of a call of an operator.

    def statistics(self) -> Tensor:
        """Statistics [7, N]."""
        statistics = self._allocate_statistics()
        if self.options.return_entropy:
            statistics[rows.TOTAL].zero_()  # saved with the others
        for tokens in self.tiling.chunks.tokens:
            self.add_statistics(tokens, part(statistics, tokens, 1))
        return statistics

    def statistics_and_gradients(self) -> tuple[Tensor, Gradients]:
        """Statistics [7, N] and the gradients of a loss that is one number."""
        statistics = self._allocate_statistics()
        for tokens in self.tiling.chunks.tokens:
            self.add_both(tokens, statistics)
        self.release()
        return statistics, self.gradients.finished(self.facts.unfinished)

    def gradients_of(self, statistics: Tensor, dloss: Tensor | None, dentropy: Tensor | None) -> Gradients:
        """Gradients, given the upstream gradients of losses and entropies, numbers or [N]."""
        for tokens in self.tiling.chunks.tokens:
            self.add_gradients(tokens, statistics, dloss, dentropy)
        return self.gradients.finished()

    def losses(self, statistics: Tensor, shape: torch.Size) -> rows.LinearCrossEntropyOutput:
        """The outputs that the caller asked for; `shape`: of the targets."""
        found = self.on_rows.losses(self.facts, statistics, self._row_options, shape)
        if self.factors is None:
            return found
        loss, z_loss = (one if one is None else torch.dot(one.reshape(-1), self.factors) for one in found[:2])
        assert loss is not None
        return found._replace(loss=loss, z_loss=z_loss)

    # Steps that ways have in common.

    def logits(self, tokens: slice, columns: slice) -> Chunk:
        """A chunk of logits."""
        logits = self.products(tokens, columns)
        self.on_chunks.prepare(logits, columns)
        return Chunk(logits, columns, part(self.facts.columns, tokens), self.options.vocab_first + columns.start)

    def exchange(self, statistics: Tensor) -> None:
        """Statistics [7, tokens] of this rank's columns become statistics of the whole vocabulary."""
        if self.options.group:
            self.on_rows.join(collectives.gather(statistics, self.options.group), statistics)

    def coefficients(
        self, tokens: slice, statistics: Tensor, dloss: Tensor | float | None, dentropy: Tensor | None
    ) -> Tensor:
        """The coefficients [5, tokens] of a chunk's gradient, from the statistics [7, N] of all tokens."""
        if isinstance(dloss, Tensor) and dloss.dim():
            dloss = part(dloss, tokens)
        if dloss is not None and self._gradient_factors is not None:
            dloss = dloss * part(self._gradient_factors, tokens)
        if dentropy is not None and dentropy.dim():
            dentropy = part(dentropy, tokens)
        facts = self.facts.part(tokens)
        return self.on_rows.coefficients(facts, part(statistics, tokens, 1), self.options, dloss, dentropy)

    def _allocate_statistics(self) -> Tensor:
        return allocate(self.x, (rows.STATISTICS, self.x.shape[0]), self.tiling.exact)
