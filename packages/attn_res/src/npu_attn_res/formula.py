"""Attention Residuals in device code: formulas that kernels of several chips share. Tokens are independent.

    r_i = 1 / sqrt(mean(v_i^2) + eps)        s_i = r_i <g, v_i>        g = query * rms_weight
    alpha = softmax_i(s)                     h = sum_i alpha_i v_i

    e_i = <dh, v_i>        delta = sum_i alpha_i e_i = <dh, h>        ds_i = alpha_i (e_i - delta)
    dv_i = alpha_i dh + ds_i r_i (g - s_i r_i v_i / D)                dg = sum over tokens and sources of ds_i r_i v_i

In code c_i = ds_i r_i and slope_i = s_i r_i / D. A prefix is a source like the others.
"""

import triton
import triton.language as tl


@triton.jit
def rms_inverse(b_square, eps, D: tl.constexpr):
    """1 / rms of rows, from their sums of squares."""
    return tl.rsqrt(b_square * (1.0 / D) + eps)


@triton.jit
def score_rows(b_v, b_g, eps, D: tl.constexpr):
    """s of each row, r and sum(v^2) of each row of v. b_v and b_g: [rows, columns]."""
    b_square, b_product = tl.sum(b_v * b_v, axis=1), tl.sum(b_v * b_g, axis=1)
    b_rstd = rms_inverse(b_square, eps, D)
    return b_product * b_rstd, b_rstd, b_square


@triton.jit
def exponentials(b_old, b_new, b_reference):
    """exp of two scores (or log-sums), relative to a reference that is at least as high as both."""
    return tl.exp(b_old - b_reference), tl.exp(b_new - b_reference)


@triton.jit
def add_source(b_v, b_score, b_o, b_sum, b_max):
    """One step of the online softmax: the sums of exp(s - highest) v and of exp(s - highest), and the highest score s."""
    b_next = tl.where(b_score > b_max, b_score, b_max)
    b_shrink, b_weight = exponentials(b_max, b_score, b_next)
    b_o = b_o * b_shrink[:, None] + b_v * b_weight[:, None]
    return b_o, b_sum * b_shrink + b_weight, b_next


@triton.jit
def softmax_of_two(b_lse, b_score):
    """The shares of exp(lse) and of exp(score) in their sum."""
    b_first, b_second = exponentials(b_lse, b_score, tl.maximum(b_lse, b_score))
    b_inverse = 1.0 / (b_first + b_second)
    return b_first * b_inverse, b_second * b_inverse


@triton.jit
def score_gradient(b_alpha, b_e, b_delta, b_rstd):
    """c = ds r."""
    return b_alpha * (b_e - b_delta) * b_rstd


@triton.jit
def slope(b_score, b_rstd, D: tl.constexpr):
    """s r / D."""
    return b_score * b_rstd * (1.0 / D)


@triton.jit
def source_gradient(b_v, b_dh, b_g, b_alpha, b_c, b_slope):
    """dv = alpha dh + c (g - slope v)."""
    return b_dh * b_alpha + (b_g - b_v * b_slope) * b_c


@triton.jit
def expanded_gradient(b_v, b_slope_c, b_first, b_first_factor, b_last, b_last_factor):
    """The same as first - slope c v + last.

    In ascend/backward.py alpha dh is the first term and c g the last; in ascend/backward_row.py c g is the first and alpha
    dh the last. The order decides where compilers for Ascend wait: hold predicted times against a change of it.
    """
    return b_first * b_first_factor[:, None] - b_v * b_slope_c[:, None] + b_last * b_last_factor[:, None]


@triton.jit
def norm_gradient(b_f, b_n, b_rstd, D: tl.constexpr):
    """RMSNorm's gradient rstd (f - n mean(f n)), from n = x rstd and f = dy weight, [rows, columns] both."""
    b_mean = tl.sum(b_f * b_n, axis=1) * (1.0 / D)
    return (b_f - b_n * b_mean[:, None]) * b_rstd[:, None]
