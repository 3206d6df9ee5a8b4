"""The loss of a chunk of logits in plain PyTorch: the definition, and what runs on a CPU.

    z = softcap tanh(t / softcap)      t = logit_scale (x weight^T + bias)

From z the statistics of each row (row_math.py has the formulas of the losses) and, from those, the gradient. All arithmetic
is fp32 (fp64 for fp64 input); the gradient of the logits is rounded to x's dtype before it meets x and the weight, as in the
kernels. Source: torch.nn.functional.cross_entropy; for the z-loss, Chowdhery et al., "PaLM", arXiv 2204.02311.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import row_math
from .chunks import Chunk
from .options import Options


class Reference:
    """Statistics and gradients of chunks of logits [rows, columns]."""

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

    def statistics(self, chunk: Chunk, result: Tensor, merge: bool) -> None:
        """Writes statistics [6, rows] of z; `merge`: together with those of earlier columns, which `result` has."""
        z, columns, target, first = chunk
        found = torch.zeros_like(result)
        found[row_math.MAXIMUM], place = z.max(1)
        found[row_math.PLACE] = place + first  # of equal maxima, the first
        shifted = z - found[row_math.MAXIMUM].unsqueeze(1)
        exponential = shifted.exp()
        found[row_math.SUM] = exponential.sum(1)
        if self._options.return_entropy:
            found[row_math.DOT] = exponential.mul_(shifted.clamp_min_(torch.finfo(z.dtype).min)).sum(1)
        if self._options.smoothed:
            weights = None if self._class_weight is None else self._class_weight[columns].to(z.dtype)
            found[row_math.TOTAL] = z.sum(1) if weights is None else z @ weights
        place = target - first
        here = (place >= 0) & (place < z.shape[1])
        chosen = z.gather(1, place.clamp(0, z.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
        found[row_math.TARGET] = torch.where(here, chosen, 0.0)
        result.copy_(row_math.merge(result, found) if merge else found)

    def keep(self, chunk: Chunk, kept: Tensor, result: Tensor, largest: Tensor, merge: bool) -> None:
        """Statistics as `statistics` has them; the largest [rows] so far; and z less those, in other memory."""
        self.statistics(chunk, result, merge)
        lowest = torch.finfo(largest.dtype).min  # minus infinity less itself is no number
        torch.clamp(result[row_math.MAXIMUM], min=lowest, out=largest)
        torch.sub(chunk.logits, largest.unsqueeze(1), out=kept)

    def gradient(self, chunk: Chunk, gradient: Tensor, coefficients: Tensor) -> None:
        """Writes the gradient of the raw products, which may share the memory of z, given coefficients [5, rows]."""
        z, columns, target, first = chunk
        lse, a, b, c, q = coefficients.unsqueeze(2).unbind(0)  # [rows, 1] each
        g = (z - lse).exp_()
        if self._options.return_entropy:
            g *= a + q * z
        else:
            g *= a
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
