"""The arithmetic on chunks of logits [rows, columns] in plain PyTorch. Formulas: the folder's docstring."""

from __future__ import annotations

import torch
from torch import Tensor

from ..chunks import Chunk
from ..options import Options
from ..rows import DOT, MAXIMUM, PLACE, SUM, TARGET, TOTAL, WEIGHT, TargetFacts, rebased, rebased_total
from .rows import coefficients


def merge_statistics(first: Tensor, second: Tensor) -> Tensor:
    """Statistics of earlier columns and of later ones together, [7, tokens] each."""
    top = torch.maximum(first[MAXIMUM], second[MAXIMUM])
    result = first + second  # the target's z and the sum of weights; the others follow
    result[MAXIMUM] = top
    (sum1, dot1), (sum2, dot2) = (rebased(one[MAXIMUM], one[SUM], one[DOT], top) for one in (first, second))
    result[SUM], result[DOT] = sum1 + sum2, dot1 + dot2
    result[TOTAL] = sum(rebased_total(one[MAXIMUM], one[TOTAL], one[WEIGHT], top) for one in (first, second))
    result[PLACE] = torch.where(second[MAXIMUM] > first[MAXIMUM], second[PLACE], first[PLACE])
    return result


class ReferenceChunks:
    """The arithmetic on chunks of logits [rows, columns], as `launch.chunk.ChunkKernels` has it."""

    def __init__(self, bias: Tensor | None, class_weight: Tensor | None, options: Options) -> None:
        self._bias = bias
        self._class_weight = class_weight
        self._options = options

    def prepare(self, logits: Tensor, columns: slice) -> None:
        """Raw products become z, in place."""
        if self._bias is not None:
            logits += self._bias[columns]
        if self._options.logit_scale != 1.0:
            logits *= self._options.logit_scale
        if self._options.softcap is not None:
            logits.div_(self._options.softcap).tanh_().mul_(self._options.softcap)

    def statistics(self, chunk: Chunk, result: Tensor, *, merge: bool) -> None:
        """Writes statistics [7, rows] of z; `merge`: merged with the statistics of earlier columns in `result`."""
        z, columns, target, first = chunk
        found = torch.zeros_like(result)
        found[MAXIMUM], place = z.max(1)
        found[MAXIMUM].clamp_min_(torch.finfo(z.dtype).min)  # minus infinity less itself is no number
        found[PLACE] = place + first  # of equal maxima, the first
        shifted = z - found[MAXIMUM].unsqueeze(1)
        exponential = shifted.exp()
        found[SUM] = exponential.sum(1)
        if self._options.smoothed:
            weights = None if self._class_weight is None else self._class_weight[columns].to(z.dtype)
            found[TOTAL] = shifted.sum(1) if weights is None else shifted @ weights
            found[WEIGHT] = z.shape[1] if weights is None else weights.sum()
        if self._options.return_entropy:
            found[DOT] = exponential.mul_(shifted.clamp_min_(torch.finfo(z.dtype).min)).sum(1)
        place = target - first
        here = (place >= 0) & (place < z.shape[1])
        chosen = z.gather(1, place.clamp(0, z.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
        found[TARGET] = torch.where(here, chosen, 0.0)
        result.copy_(merge_statistics(result, found) if merge else found)

    def keep(self, chunk: Chunk, kept: Tensor, result: Tensor, largest: Tensor, *, merge: bool) -> None:
        """Writes statistics as `statistics` does, the row maxima so far, [rows], and z minus these, in other memory."""
        self.statistics(chunk, result, merge=merge)
        largest.copy_(result[MAXIMUM])
        torch.sub(chunk.logits, largest.unsqueeze(1), out=kept)

    def gradient(self, chunk: Chunk, gradient: Tensor, coefficients: Tensor) -> None:
        """Writes the gradient of the raw products, which may share the memory of z, given coefficients [5, rows]."""
        z, columns, target, first = chunk
        reference, a, b, c, q = coefficients.unsqueeze(2).unbind(0)  # [rows, 1] each
        g = z - reference
        if self._options.return_entropy:
            g = g.exp() * (a + q * g.clamp_min_(-1e30))  # 0 times minus infinity is no number
        else:
            g.exp_().mul_(a)
        if self._options.smoothed:
            g -= c if self._class_weight is None else c * self._class_weight[columns].to(z.dtype)
        place = (target - first).long().unsqueeze(1)
        here = (place >= 0) & (place < z.shape[1])
        g.scatter_add_(1, place.clamp(0, z.shape[1] - 1), torch.where(here, -b, 0.0))
        if self._options.softcap is not None:
            g *= 1.0 - (z / self._options.softcap).square()
        if self._options.logit_scale != 1.0:
            g *= self._options.logit_scale
        gradient.copy_(g)

    def statistics_and_gradient(self, chunk: Chunk, gradient: Tensor, facts: TargetFacts, result: Tensor) -> None:
        """Writes statistics [7, rows] of whole rows, and the gradient of the one loss that they give."""
        self.statistics(chunk, result, merge=False)
        self.gradient(chunk, gradient, coefficients(facts, result, self._options, 1.0, None))
