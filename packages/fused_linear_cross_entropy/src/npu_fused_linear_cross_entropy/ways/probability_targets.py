"""The cross entropy with probabilities as targets, which the caller has in memory: chunks of them are read."""

from __future__ import annotations

from collections.abc import Iterator

from npu_tiling import Device
from npu_tiling.pytorch import collectives
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import distribution_rows
from ..calls import ProbabilityInputs
from ..chunks import part
from ..gradients import Gradients
from ..launch.distributions import DistributionKernels
from ..options import Options
from ..reference.distributions import ReferenceDistributions, logits_of, slopes_of
from ..shape import Shape
from ..tiling import choose
from .head import Head

_PIECE = 2**22  # fp32 elements of a chunk's targets in memory at a time: 16 MiB


class ProbabilityTargets(Head):
    """See `Way.DISTRIBUTIONS`. c = w ((1 - e) probs + e / V), with class weights w and label_smoothing e, is the target."""

    def __init__(self, inputs: ProbabilityInputs, options: Options, shape: Shape, device: Device | None) -> None:
        super().__init__(inputs, options, choose(shape), device)
        self._class_weight, self._probs = inputs.class_weight, inputs.probs
        self._kernels = ReferenceDistributions(options) if device is None else DistributionKernels(options, device)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Statistics [5, N] (see distribution_rows.py), and of each row the sums of c (k - z) and of c, [2, N]."""
        rows, exact = self.x.shape[0], self.tiling.exact
        statistics, sums = (allocate(self.x, (count, rows), exact) for count in (distribution_rows.STATISTICS, 2))
        for tokens in self.tiling.chunks.tokens:
            result, of_targets = part(statistics, tokens, 1), part(sums, tokens, 1)
            of_targets.zero_()
            maximum = result[distribution_rows.MAXIMUM]
            for columns in self.tiling.chunks.columns:
                logits, is_later = self.products(tokens, columns, bias=True), columns.start > 0
                before = maximum.clone() if is_later else maximum
                self._kernels.statistics(logits, None, result, merge=is_later)
                if is_later:
                    of_targets[0] += of_targets[1] * (maximum - before)
                for piece, targets in self._pieces(tokens, columns):
                    below = maximum[piece].unsqueeze(1) - logits_of(logits[piece].to(exact), None, self.options)
                    terms = targets * below
                    if self.bias is not None:  # which may rule columns out
                        terms.masked_fill_(targets == 0.0, 0.0)
                    of_targets[0, piece] += terms.sum(1)
                    of_targets[1, piece] += targets.sum(1)
            if self.options.group:
                before = maximum.clone()
                result.copy_(distribution_rows.merged(collectives.gather(result, self.options.group)))
                of_targets[0] += of_targets[1] * (maximum - before)
                collectives.sum_(of_targets, self.options.group)
        return statistics, sums

    def gradients_of(self, coefficients: Tensor, factors: Tensor | None) -> Gradients:
        """Gradients of x, weight and bias.

        Args:
            coefficients: [6, N], see distribution_rows.py.
            factors: [N], which c is multiplied by before it is subtracted from the gradient of z.
        """
        for tokens in self.tiling.chunks.tokens:
            own = part(coefficients, tokens, 1)
            for columns in self.tiling.chunks.columns:
                logits = self.products(tokens, columns, bias=True)
                gradient = self.gradient_memory(logits)
                if factors is None:
                    self._kernels.gradient(logits, None, gradient, own, None)
                else:
                    self._write_gradient(logits, gradient, own, part(factors, tokens), tokens, columns)
                self.gradients.add(tokens, columns, gradient)
        self.release()
        return self.gradients.finished()

    def _write_gradient(
        self, logits: Tensor, gradient: Tensor, coefficients: Tensor, factors: Tensor, tokens: slice, columns: slice
    ) -> None:
        """The gradient of a chunk, a piece at a time: each overwrites its own logits."""
        for piece, targets in self._pieces(tokens, columns):
            z = logits_of(logits[piece].to(targets.dtype), None, self.options)
            of_targets = targets * slopes_of(z, None, self.options) * factors[piece].unsqueeze(1)
            self._kernels.gradient(logits[piece], None, gradient[piece], coefficients[:, piece], None)
            gradient[piece] -= of_targets

    def _pieces(self, tokens: slice, columns: slice) -> Iterator[tuple[slice, Tensor]]:
        """Rows of a chunk, and their c [rows, columns]."""
        e, exact = self.options.label_smoothing, self.tiling.exact
        count = max(1, _PIECE // (columns.stop - columns.start))
        probs = part(self._probs, tokens)
        for first in range(0, probs.shape[0], count):
            piece = slice(first, min(first + count, probs.shape[0]))
            targets = probs[piece, columns].to(exact)
            if e:
                targets = targets * (1.0 - e) + e / self.options.vocab_size
            if self._class_weight is not None:
                targets = targets * part(self._class_weight, columns).to(exact)
            yield piece, targets
