"""Device code of the distributions of rows: statistics of a chunk of logits, and their gradient in their place.

Formulas: distribution_rows.py. Tiles, tails and the order in which columns are swept are those of two_sweeps.py.
"""

import triton
import triton.language as tl

from ..formula import LOWEST, logits_of_raw
from .statistics import VANISHES
from .tile import load_raw, store_tile, tile_of_rows


@triton.jit
def load_z(
    p_row, i_col, s_logits, n_left, b_rate, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr, PADDED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    RATED: tl.constexpr
):  # fmt: skip
    """z, fp32 [BLOCK_M, BLOCK_N], of the columns from i_col on; what lies outside is some finite number."""
    b_raw = load_raw(p_row, i_col, s_logits, n_left, N, BLOCK_M, BLOCK_N, EXACT_N, PADDED).to(tl.float32)
    b_z = logits_of_raw(b_raw, 0.0, logit_scale, softcap, False, SCALED, SOFTCAP)
    if RATED:
        b_z *= b_rate[:, None]
    return b_z


@triton.jit
def load_rate(p_rates, o_row, m_row):
    """[BLOCK_M]; a number where all are 1."""
    b_rate = 1.0
    if p_rates is not None:
        b_rate = tl.load(p_rates + o_row, mask=m_row, other=1.0)
    return b_rate


@triton.jit
def merged(b_max, b_sum, b_dot, b_squares, b_total, b_max2, b_sum2, b_dot2, b_squares2, b_total2):
    """Statistics [BLOCK_M] of two parts of the columns together."""
    b_top = tl.maximum(b_max, b_max2)
    b_d, b_d2 = b_max - b_top, b_max2 - b_top
    b_e, b_e2 = tl.exp(b_d), tl.exp(b_d2)
    b_dots = b_e * (b_dot + b_d * b_sum) + b_e2 * (b_dot2 + b_d2 * b_sum2)
    b_sums = b_e * b_sum + b_e2 * b_sum2
    return b_top, b_sums, b_dots, b_e * b_e * b_squares + b_e2 * b_e2 * b_squares2, b_total + b_total2


@triton.jit
def tile_statistics(b_z, i_col, N: tl.constexpr, BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr):
    """Statistics [BLOCK_M] of one tile: maximum, sums of exp, of exp times z, of exp^2 and of z."""
    b_seen, b_added = b_z, b_z
    if not EXACT_N:
        m_col = (tl.arange(0, BLOCK_N) < N - i_col)[None, :]
        b_seen = tl.where(m_col, b_z, LOWEST)
        b_added = tl.where(m_col, b_z, 0.0)
    b_max = tl.maximum(tl.max(b_seen, axis=1), LOWEST)
    b_d = b_seen - b_max[:, None]
    b_e = tl.exp(b_d)
    b_dot = tl.sum(b_e * tl.maximum(b_d, VANISHES), axis=1)
    return b_max, tl.sum(b_e, axis=1), b_dot, tl.sum(b_e * b_e, axis=1), tl.sum(b_added, axis=1)


@triton.jit
def sweep_statistics(
    p_row, s_logits, n_left, b_rate, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, RATED: tl.constexpr
):  # fmt: skip
    """The same of all whole blocks; one exp for each logit."""
    b_maxima = tl.full([BLOCK_M, BLOCK_N], LOWEST, tl.float32)
    b_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_col in tl.range(0, N // BLOCK_N * BLOCK_N, BLOCK_N):
        b_z = load_z(
            p_row, i_col, s_logits, n_left, b_rate, logit_scale, softcap, N, BLOCK_M, BLOCK_N, True, PADDED, SCALED, SOFTCAP,
            RATED
        )  # fmt: skip
        b_totals += b_z
        b_d = b_z - b_maxima
        b_e = tl.exp(-tl.abs(b_d))
        m_above = b_d > 0.0
        b_dots = tl.where(m_above, b_e * (b_dots - b_d * b_sums), b_dots + b_e * tl.maximum(b_d, VANISHES))
        b_sums = tl.where(m_above, b_sums * b_e + 1.0, b_sums + b_e)
        b_e *= b_e
        b_squares = tl.where(m_above, b_squares * b_e + 1.0, b_squares + b_e)
        b_maxima = tl.where(m_above, b_z, b_maxima)
    b_max = tl.max(b_maxima, axis=1)
    b_d = b_maxima - b_max[:, None]
    b_e = tl.exp(b_d)
    b_dot = tl.sum(b_e * (b_dots + b_d * b_sums), axis=1)
    return b_max, tl.sum(b_e * b_sums, axis=1), b_dot, tl.sum(b_e * b_e * b_squares, axis=1), tl.sum(b_totals, axis=1)


@triton.jit(do_not_specialize=["n_rows", "s_statistics"])
def distribution_statistics_kernel(
    p_logits,  # [rows, N], some columns
    p_rates,  # fp32 [rows]: 1 / temperature
    p_statistics,  # fp32 [5, rows]: maximum, sum of exp, sum of exp times z, sum of exp^2, sum of z
    n_rows,
    s_logits,
    s_statistics,
    logit_scale,
    softcap,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,  # as in two_sweeps.py
    PADDED: tl.constexpr,  # the logits' memory has whole tiles of rows
    MERGE: tl.constexpr,  # with the statistics of earlier columns, that are there already
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it; bf16 tiles leave room for the next load
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; what is no multiple of 32 bytes is padded on chip
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    EXACT_N: tl.constexpr = N_FULL + TAIL_N == N
    RATED: tl.constexpr = p_rates is not None
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M)
        b_rate = load_rate(p_rates, i_row + o_row, m_row)
        if TAIL_N > 0:
            b_tail = load_z(
                p_row, N_FULL, s_logits, n_left, b_rate, logit_scale, softcap, N, BLOCK_M, TAIL_N, EXACT_N, PADDED, SCALED,
                SOFTCAP, RATED
            )  # fmt: skip
            b_max, b_sum, b_dot, b_squares, b_total = tile_statistics(b_tail, N_FULL, N, TAIL_N, EXACT_N)
        if N_FULL > 0:
            b_max1, b_sum1, b_dot1, b_squares1, b_total1 = sweep_statistics(
                p_row, s_logits, n_left, b_rate, logit_scale, softcap, N, BLOCK_M, BLOCK_N, PADDED, SCALED, SOFTCAP, RATED
            )
            if TAIL_N > 0:
                b_max, b_sum, b_dot, b_squares, b_total = merged(
                    b_max1, b_sum1, b_dot1, b_squares1, b_total1, b_max, b_sum, b_dot, b_squares, b_total
                )
            else:
                b_max, b_sum, b_dot, b_squares, b_total = b_max1, b_sum1, b_dot1, b_squares1, b_total1
        p_out = p_statistics + i_row + o_row
        if MERGE:
            b_max0 = tl.load(p_out, mask=m_row, other=0.0)
            b_sum0 = tl.load(p_out + s_statistics, mask=m_row, other=1.0)
            b_dot0 = tl.load(p_out + 2 * s_statistics, mask=m_row, other=0.0)
            b_squares0 = tl.load(p_out + 3 * s_statistics, mask=m_row, other=1.0)
            b_total0 = tl.load(p_out + 4 * s_statistics, mask=m_row, other=0.0)
            b_max, b_sum, b_dot, b_squares, b_total = merged(
                b_max0, b_sum0, b_dot0, b_squares0, b_total0, b_max, b_sum, b_dot, b_squares, b_total
            )
        tl.store(p_out, b_max, mask=m_row)
        tl.store(p_out + s_statistics, b_sum, mask=m_row)
        tl.store(p_out + 2 * s_statistics, b_dot, mask=m_row)
        tl.store(p_out + 3 * s_statistics, b_squares, mask=m_row)
        tl.store(p_out + 4 * s_statistics, b_total, mask=m_row)


@triton.jit
def store_gradient(
    p_out, b_z, b_lse, b_a, b_b, b_c, b_d, b_rate, i_col, s_gradient, n_left, logit_scale, softcap, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    RATED: tl.constexpr, DOTS: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the gradient of the raw logits of a tile. Returns the sums [BLOCK_M] of z times its gradient, with DOTS."""
    b_log = tl.maximum(b_z - b_lse[:, None], VANISHES)
    b_p = tl.exp(b_log)
    b_g = b_p * (b_a[:, None] + b_b[:, None] * b_log + b_c[:, None] * b_p) + b_d[:, None]
    b_dot = b_lse * 0.0
    if DOTS:
        b_product = b_g * b_z
        if not EXACT_N:
            b_product = tl.where((tl.arange(0, BLOCK_N) < N - i_col)[None, :], b_product, 0.0)
        b_dot = tl.sum(b_product, axis=1)
    if SOFTCAP:
        b_t = b_z * (1.0 / softcap)
        if RATED:
            b_t /= b_rate[:, None]
        b_g *= 1.0 - b_t * b_t
    if SCALED:
        b_g *= logit_scale
    if RATED:
        b_g *= b_rate[:, None]
    store_tile(p_out, b_g, i_col, s_gradient, n_left, N, BLOCK_M, BLOCK_N, EXACT_N, BARRIER)
    return b_dot


@triton.jit(do_not_specialize=["n_rows", "s_coefficients"])
def distribution_gradient_kernel(
    p_logits,  # [rows, N], some columns
    p_rates,  # fp32 [rows]
    p_gradient,  # [rows, N], over the logits' memory
    p_coefficients,  # fp32 [5, rows]: L, a, b, c, d
    p_dots,  # fp32 [rows]: gets the sum of z times its gradient
    n_rows,
    s_logits,
    s_gradient,
    s_coefficients,
    logit_scale,
    softcap,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    BARRIER: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it; bf16 tiles leave room for the next load
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; what is no multiple of 32 bytes is padded on chip
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    EXACT_N: tl.constexpr = N_FULL + TAIL_N == N
    RATED: tl.constexpr = p_rates is not None
    DOTS: tl.constexpr = p_dots is not None
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M)
        p_out = p_gradient + i_row.to(tl.int64) * s_gradient
        b_rate = load_rate(p_rates, i_row + o_row, m_row)
        p_in = p_coefficients + i_row + o_row
        b_lse = tl.load(p_in, mask=m_row, other=0.0)
        b_a = tl.load(p_in + s_coefficients, mask=m_row, other=0.0)
        b_b = tl.load(p_in + 2 * s_coefficients, mask=m_row, other=0.0)
        b_c = tl.load(p_in + 3 * s_coefficients, mask=m_row, other=0.0)
        b_d = tl.load(p_in + 4 * s_coefficients, mask=m_row, other=0.0)
        b_dot = b_lse * 0.0
        if TAIL_N > 0:
            b_tail = load_z(
                p_row, N_FULL, s_logits, n_left, b_rate, logit_scale, softcap, N, BLOCK_M, TAIL_N, EXACT_N, False, SCALED,
                SOFTCAP, RATED
            )  # fmt: skip
            b_dot += store_gradient(
                p_out, b_tail, b_lse, b_a, b_b, b_c, b_d, b_rate, N_FULL, s_gradient, n_left, logit_scale, softcap, N,
                BLOCK_M, TAIL_N, EXACT_N, SCALED, SOFTCAP, RATED, DOTS, BARRIER
            )  # fmt: skip
        if N_FULL > 0:
            for i_block in tl.range(0, N_FULL, BLOCK_N):
                i_col = N_FULL - BLOCK_N - i_block
                b_z = load_z(
                    p_row, i_col, s_logits, n_left, b_rate, logit_scale, softcap, N, BLOCK_M, BLOCK_N, True, False, SCALED,
                    SOFTCAP, RATED
                )  # fmt: skip
                b_dot += store_gradient(
                    p_out, b_z, b_lse, b_a, b_b, b_c, b_d, b_rate, i_col, s_gradient, n_left, logit_scale, softcap, N,
                    BLOCK_M, BLOCK_N, True, SCALED, SOFTCAP, RATED, DOTS, BARRIER
                )  # fmt: skip
        if DOTS:
            tl.store(p_dots + i_row + o_row, b_dot, mask=m_row)
