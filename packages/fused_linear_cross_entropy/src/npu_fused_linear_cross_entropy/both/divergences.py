"""Divergences of a student's distribution p from a teacher's q, element by element, and their gradient.

With s and t their log-probabilities, D = sum f(s, t), and h = p dD / dp with the other elements of p fixed, up to a constant
times p:

    gradient of the student's logits:  h - p k      k = sum h

    forward_kl        f = q (t - s)                  h = -q                 k = -1
    reverse_kl        f = p (s - t)                  h = f
    jensen_shannon    f = beta q (t - u) + h         h = (1 - beta) p (s - u)     u = log((1 - beta) p + beta q)
    total_variation   f = |p - q| / 2                h = p sign(p - q) / 2
"""

import triton
import triton.language as tl

from ..formula import LOWEST

MOST_APART: tl.constexpr = tl.constexpr(80.0)  # of t - s: e^80 is in fp32's range; beyond it |p (s - t)| <= 80 e^-80


@triton.jit
def log_probabilities(b_z, b_max, b_log):
    """z less its row's log sum exp, in two steps: their sum, rounded, would lose digits of large logits."""
    return (b_z - b_max[:, None]) - b_log[:, None]


@triton.jit
def divergence_terms(b_z, b_teacher, b_max, b_log, b_teacher_max, b_teacher_log, beta, DIVERGENCE: tl.constexpr):
    """f, h and p, [BLOCK_M, BLOCK_N] each, of a tile of both logits.

    Args:
        b_max, b_log, b_teacher_max, b_teacher_log: [BLOCK_M], the largest logits k of rows, and log sum exp(z - k).
    """
    b_s, b_t = log_probabilities(b_z, b_max, b_log), log_probabilities(b_teacher, b_teacher_max, b_teacher_log)
    b_p = tl.exp(b_s)
    if DIVERGENCE == "forward_kl":
        b_q = tl.exp(b_t)
        b_term, b_slope = tl.where(b_q == 0.0, 0.0, b_q * (b_t - b_s)), -b_q
    elif DIVERGENCE == "reverse_kl":
        b_term = tl.where(b_p == 0.0, 0.0, b_p * (b_s - b_t))
        b_slope = b_term
    elif DIVERGENCE == "jensen_shannon":
        b_d = tl.where(b_t < LOWEST, LOWEST, b_t) - b_s
        b_near = tl.where(b_d > MOST_APART, MOST_APART, b_d)
        b_above = tl.log((1.0 - beta) + beta * tl.exp(b_near))  # u - s
        b_slope = (beta - 1.0) * (b_p * b_above)
        b_term = beta * (tl.exp(b_t) * (b_near - b_above)) + b_slope
    else:
        tl.static_assert(DIVERGENCE == "total_variation")
        b_apart = b_p - tl.exp(b_t)
        b_term = 0.5 * tl.abs(b_apart)
        b_half = tl.where(b_apart > 0.0, 0.5, 0.0) - tl.where(b_apart < 0.0, 0.5, 0.0)
        b_slope = b_p * b_half
    return b_term, b_slope, b_p
