"""From statistics of each row's softmax distribution to outputs, and from outputs' gradients to coefficients.

With z the logits of a row, k the largest, S = sum exp(z - k), L = k + log S and p = exp(z - L):

    log-probability of an id    (z_id - k) - log S       entropy H         - sum p (z - L)
    sum of squares              sum p^2                  mean logit        sum z / V

For gradients l_id, h, s and m that these receive, the gradient of the logits is

    g_v = p_v (a + b (z_v - L) + c p_v) + d + sum of l_id with id = v
    a = - sum l_id - h H - 2 s sum p^2      b = - h      c = 2 s      d = m / V

As a rounded L would lose the digits that differ where all z are large, it is computed from e = exp(z - k):

    g_v = e_v (a' + b' (z_v - k) + c' e_v) + d + sum of l_id with id = v
    a' = (a - b log S) / S                  b' = b / S   c' = c / S^2

z is a rate, 1 / temperature, times the logits at temperature 1. The gradient of the rate is sum g_v z_v / rate. As g sums
to m,

    sum g_v z_v = sum g_v (z_v - k) + m k

The left side would lose digits where all z are large. Where sum z / V is not finite, it takes the place of k.

The functions at the end add the arithmetic on chunks of logits in plain PyTorch to a plan, as kernels.py adds launches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from npu_tiling.plans import Plan
from torch import Tensor

from ..call import Options
from ..loss.reference import rebased

# Rows of the tensor of statistics [5, tokens]: the largest z, the sum of exp(z - largest), the sum of exp(z - largest)
# (z - largest), the sum of exp(z - largest)^2, the sum of z.
MAXIMUM, SUM, DOT, SQUARES, TOTAL = range(5)
STATISTICS = 5


class Moments(NamedTuple):
    """k, log S, entropy, sum of p^2 and mean logit of each row, [tokens] each."""

    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor
    square_sum: Tensor
    mean_logit: Tensor


def merged(parts: Tensor) -> Tensor:
    """Statistics [5, tokens] of all columns, from statistics of parts, [parts, 5, tokens]."""
    result = parts.sum(0)  # the sum of z; the others follow
    result[MAXIMUM] = parts[:, MAXIMUM].amax(0)
    sums, dots = rebased(parts[:, MAXIMUM], parts[:, SUM], parts[:, DOT], result[MAXIMUM])
    result[SUM], result[DOT] = sums.sum(0), dots.sum(0)
    result[SQUARES] = (parts[:, SQUARES] * torch.exp(2.0 * (parts[:, MAXIMUM] - result[MAXIMUM]))).sum(0)
    return result


def write_moments(statistics: Tensor, vocab_size: int, *moments: Tensor) -> None:
    """Writes `Moments`, from statistics of all columns."""
    total, dot, squares, logits = statistics[SUM:]
    maximum, log, entropy, square_sum, mean_logit = moments
    maximum.copy_(statistics[MAXIMUM])
    torch.log(total, out=log)
    torch.sub(log, dot / total, out=entropy)
    torch.div(squares, total.square(), out=square_sum)
    torch.div(logits, vocab_size, out=mean_logit)


def coefficients(
    known: Moments, vocab_size: int, dentropy: Tensor | None, dsquare_sum: Tensor | None, dmean_logit: Tensor | None,
    did_log_probs: Tensor | None
) -> Tensor:  # fmt: skip
    """k, log S, a, b, c, d and m k, [7, tokens], for gradients [tokens], and of ids [tokens, ids]; None for none."""
    a = b = c = d = mk = torch.zeros_like(known.log_sum)  # nothing is changed in place: gradients may be several at once
    if did_log_probs is not None:
        a = a - did_log_probs.sum(-1)
    if dentropy is not None:
        a, b = a - dentropy * known.entropy, -dentropy
    if dsquare_sum is not None:
        c = 2.0 * dsquare_sum
        a = a - c * known.square_sum
    if dmean_logit is not None:
        d = dmean_logit / vocab_size
        factor = torch.where(known.mean_logit.isfinite(), known.maximum, known.mean_logit)
        mk = torch.where(dmean_logit == 0.0, 0.0, dmean_logit * factor)
    return torch.stack((known.maximum, known.log_sum, a, b, c, d, mk))


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


def write_statistics(logits: Tensor, rates: Tensor | None, result: Tensor, options: Options, merge: bool) -> None:
    """Writes statistics [5, rows]; `merge`: merged with the statistics of earlier columns in `result`."""
    z = logits_of(logits.to(result.dtype), rates, options)
    found = result.new_empty(STATISTICS, z.shape[0])
    found[MAXIMUM] = z.amax(1).clamp_min_(torch.finfo(z.dtype).min)  # minus infinity less itself is no number
    shifted = z - found[MAXIMUM].unsqueeze(1)
    exponential = shifted.exp()
    found[SUM] = exponential.sum(1)
    found[DOT] = (exponential * shifted.clamp_min_(torch.finfo(z.dtype).min)).sum(1)
    found[SQUARES] = exponential.square_().sum(1)
    found[TOTAL] = z.sum(1) + 0.0 * found[SUM]  # of infinity NaN, as all else
    result.copy_(merged(torch.stack((result, found))) if merge else found)


def write_gradient(
    logits: Tensor,
    rates: Tensor | None,
    gradient: Tensor,
    coefficients: Tensor,
    dots: Tensor | None,
    options: Options,
) -> None:
    """Writes the gradient of raw logits but for ids, which may share their memory, given coefficients [7, rows].

    Args:
        dots: [rows], gets the sum of (z - k) times the gradient of z.
    """
    z = logits_of(logits.to(coefficients.dtype), rates, options)
    maximum, log, a, b, c, d, _ = coefficients.unsqueeze(2).unbind(0)  # [rows, 1] each
    inverse = torch.exp(-log)
    a, b, c = (a - b * log) * inverse, b * inverse, c * inverse.square()
    below = (z - maximum).clamp_min(2.0 * math.log(torch.finfo(z.dtype).tiny))  # 0 times minus infinity is no number
    e = below.exp()
    g = e * (a + b * below + c * e) + d
    if dots is not None:
        dots.copy_((g * (z - maximum).clamp_min(torch.finfo(z.dtype).min)).sum(1))
    gradient.copy_(g * slopes_of(z, rates, options))


# The same as steps of a plan.


def statistics(p: Plan, logits: Any, rates: Any, options: Options, result: Any, *, merge: bool) -> None:
    p.torch(write_statistics, logits, rates, result, options, merge, writes=[result])


def gradient(p: Plan, logits: Any, rates: Any, options: Options, gradient: Any, coefficients: Any, dots: Any) -> None:
    p.torch(write_gradient, logits, rates, gradient, coefficients, dots, options, writes=[gradient, dots])
