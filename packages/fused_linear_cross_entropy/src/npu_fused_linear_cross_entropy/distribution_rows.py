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

The left side would lose digits where all z are large.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .rows import rebased

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


def moments(statistics: Tensor, vocab_size: int) -> Moments:
    """From statistics of all columns."""
    maximum, total, dot, squares, logits = statistics.unbind()
    log = total.log()
    return Moments(maximum.clone(), log, log - dot / total, squares / total.square(), logits / vocab_size)


def coefficients(
    known: Moments, vocab_size: int, dentropy: Tensor | None, dsquare_sum: Tensor | None, dmean_logit: Tensor | None,
    did_log_probs: Tensor | None
) -> Tensor:  # fmt: skip
    """k, log S, a, b, c and d, [6, tokens], for gradients [tokens], and of ids [tokens, ids]; None for none."""
    a = b = c = d = torch.zeros_like(known.log_sum)  # nothing is changed in place: there may be several gradients at once
    if did_log_probs is not None:
        a = a - did_log_probs.sum(-1)
    if dentropy is not None:
        a, b = a - dentropy * known.entropy, -dentropy
    if dsquare_sum is not None:
        c = 2.0 * dsquare_sum
        a = a - c * known.square_sum
    if dmean_logit is not None:
        d = dmean_logit / vocab_size
    return torch.stack((known.maximum, known.log_sum, a, b, c, d))
