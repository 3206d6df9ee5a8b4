"""Statistics and gradients of the distributions of a chunk of logits, in plain PyTorch. Formulas: distribution_rows.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..distribution_rows import DOT, MAXIMUM, SQUARES, STATISTICS, SUM, TOTAL, merged
from ..options import Options


def logits_of(raw: Tensor, rates: Tensor | None, options: Options) -> Tensor:
    """z of raw logits [rows, columns]; `rates`: [rows], 1 / temperature."""
    z = raw * options.logit_scale
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    return z if rates is None else z * rates.unsqueeze(1)


def slopes_of(z: Tensor, rates: Tensor | None, options: Options) -> Tensor | float:
    """The derivative of z [rows, columns] with respect to raw logits."""
    if options.softcap is None:
        return options.logit_scale if rates is None else options.logit_scale * rates.unsqueeze(1)
    capped = z / options.softcap if rates is None else z / (options.softcap * rates.unsqueeze(1))
    slopes = options.logit_scale * (1.0 - capped.square())
    return slopes if rates is None else slopes * rates.unsqueeze(1)


class ReferenceDistributions:
    """The arithmetic on chunks of raw logits, as `launch.distributions.DistributionKernels` has it."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def statistics(self, logits: Tensor, rates: Tensor | None, result: Tensor, *, merge: bool) -> None:
        """Writes statistics [5, rows]; `merge`: merged with the statistics of earlier columns in `result`."""
        z = logits_of(logits.to(result.dtype), rates, self._options)
        found = result.new_empty(STATISTICS, z.shape[0])
        found[MAXIMUM] = z.amax(1).clamp_min_(torch.finfo(z.dtype).min)  # minus infinity less itself is no number
        shifted = z - found[MAXIMUM].unsqueeze(1)
        exponential = shifted.exp()
        found[SUM] = exponential.sum(1)
        found[DOT] = (exponential * shifted.clamp_min_(torch.finfo(z.dtype).min)).sum(1)
        found[SQUARES] = exponential.square_().sum(1)
        found[TOTAL] = z.sum(1)
        result.copy_(merged(torch.stack((result, found))) if merge else found)

    def gradient(
        self, logits: Tensor, rates: Tensor | None, gradient: Tensor, coefficients: Tensor, dots: Tensor | None
    ) -> None:
        """Writes the gradient of raw logits but for ids, which may share their memory, given coefficients [6, rows].

        Args:
            dots: [rows], gets the sum of (z - k) times the gradient of z.
        """
        z = logits_of(logits.to(coefficients.dtype), rates, self._options)
        maximum, log, a, b, c, d = coefficients.unsqueeze(2).unbind(0)  # [rows, 1] each
        inverse = torch.exp(-log)
        a, b, c = (a - b * log) * inverse, b * inverse, c * inverse.square()
        below = (z - maximum).clamp_min(2.0 * math.log(torch.finfo(z.dtype).tiny))  # 0 times minus infinity is no number
        e = below.exp()
        g = e * (a + b * below + c * e) + d
        if dots is not None:
            dots.copy_((g * (z - maximum).clamp_min(torch.finfo(z.dtype).min)).sum(1))
        gradient.copy_(g * slopes_of(z, rates, self._options))
