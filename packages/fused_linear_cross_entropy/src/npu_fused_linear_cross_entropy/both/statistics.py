"""Statistics of rows of logits: of whole blocks, of a tail, and of both.

Maximum and sum of exp; with SMOOTHED the sum of w (z - maximum), w the columns' weights or 1; with ENTROPY the sum of exp
times z; with ARGMAX the place of the first maximum; with SQUARES the sum of exp^2; with SMOOTHED the sum of w. Functions
return all seven in this order, 0 for those not computed.
"""

import triton
import triton.language as tl

from ..formula import LOWEST, VANISHES, at_rate, inside, merge_squares, merge_statistics, merge_totals
from .tile import load_columns, load_logits, target_column, target_logit

PAST_ALL_COLUMNS: tl.constexpr = tl.constexpr(1.0e9)


@triton.jit
def tile_statistics(
    b_z, i_col, p_class_weight, COLUMNS: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr,
    SQUARES: tl.constexpr
):  # fmt: skip
    """Statistics [BLOCK_M] of one tile."""
    BLOCK_N: tl.constexpr = b_z.shape[1]
    b_dot, b_total, b_index, b_squares, b_weight = 0.0, 0.0, 0.0, 0.0, 0.0
    b_seen = inside(b_z, LOWEST, COLUMNS)
    b_max = tl.maximum(tl.max(b_seen, axis=1), LOWEST)
    b_d = b_seen - b_max[:, None]
    b_e = tl.exp(b_d)
    b_sum = tl.sum(b_e, axis=1)
    if ENTROPY:
        b_dot = tl.sum(b_e * tl.maximum(b_d, VANISHES), axis=1)
    if SQUARES:
        b_squares = tl.sum(b_e * b_e, axis=1)
    if SMOOTHED:
        b_weight = 1.0 * COLUMNS
        if p_class_weight is not None:
            b_w = load_columns(p_class_weight, i_col, COLUMNS, BLOCK_N)
            b_weight = tl.sum(b_w + tl.zeros(b_z.shape, tl.float32), axis=1)
            b_d *= b_w
        b_total = tl.sum(inside(b_d, 0.0, COLUMNS), axis=1)
    if ARGMAX:
        b_col = i_col + tl.arange(0, BLOCK_N)[None, :].to(tl.float32) + tl.zeros(b_z.shape, tl.float32)
        b_index = tl.min(tl.where(b_seen == b_max[:, None], b_col, PAST_ALL_COLUMNS), axis=1)
    return b_max, b_sum, b_total, b_dot, b_index, b_squares, b_weight


@triton.jit
def sweep_statistics(
    p_row, i_end, s_row, n_rows, b_rate, p_bias, p_class_weight, logit_scale, softcap, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SQUARES: tl.constexpr
):  # fmt: skip
    """Statistics [BLOCK_M] of the columns before i_end, a multiple of BLOCK_N; one exp for each logit."""
    b_maxima = tl.full([BLOCK_M, BLOCK_N], LOWEST, tl.float32)
    b_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_dot, b_total, b_index, b_squares, b_weight = 0.0, 0.0, 0.0, 0.0, 0.0
    if ENTROPY:
        b_dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SQUARES:
        b_sums_of_squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SMOOTHED:
        b_totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_weights = 0.0  # of the columns before, for each lane
        if p_class_weight is not None:
            b_weights = tl.zeros([1, BLOCK_N], tl.float32)
    if ARGMAX:
        b_places = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # in blocks
    for i_col in tl.range(0, i_end, BLOCK_N):
        b_z = load_logits(p_row, i_col, s_row, n_rows, p_bias, logit_scale, softcap, BLOCK_N, BLOCK_M, BLOCK_N)
        b_z = at_rate(b_z, b_rate)
        b_d = b_z - b_maxima
        b_e = tl.exp(-tl.abs(b_d))
        m_above = b_d > 0.0
        if SMOOTHED:
            if p_class_weight is not None:
                b_w = load_columns(p_class_weight, i_col, BLOCK_N, BLOCK_N)
                b_totals += b_d * tl.where(m_above, -b_weights, b_w)
                b_weights += b_w
            else:
                b_totals += b_d * tl.where(m_above, -b_weights, 1.0)
                b_weights += 1.0
        if ENTROPY:
            b_dots = tl.where(m_above, b_e * (b_dots - b_d * b_sums), b_dots + b_e * tl.maximum(b_d, VANISHES))
        b_sums = tl.where(m_above, b_sums * b_e + 1.0, b_sums + b_e)
        if SQUARES:
            b_e *= b_e
            b_sums_of_squares = tl.where(m_above, b_sums_of_squares * b_e + 1.0, b_sums_of_squares + b_e)
        if ARGMAX:
            # Not m_above: CUDA may fuse the product that z is into the difference, which then is none of equal numbers.
            b_places = tl.where(b_z > b_maxima, i_col.to(tl.float32), b_places)
        b_maxima = tl.where(m_above, b_z, b_maxima)  # tl.maximum minds NaN: two compares more on Ascend
    b_max = tl.max(b_maxima, axis=1)
    b_d = b_maxima - b_max[:, None]
    b_e = tl.exp(b_d)
    b_sum = tl.sum(b_e * b_sums, axis=1)
    if ENTROPY:
        b_dot = tl.sum(b_e * (b_dots + b_d * b_sums), axis=1)
    if SQUARES:
        b_squares = tl.sum(b_e * b_e * b_sums_of_squares, axis=1)
    if SMOOTHED:
        b_total = tl.sum(b_totals + b_d * b_weights, axis=1)
        b_weight = 1.0 * i_end
        if p_class_weight is not None:
            b_weight = tl.sum(b_weights + tl.zeros([BLOCK_M, BLOCK_N], tl.float32), axis=1)
    if ARGMAX:
        b_col = b_places + tl.arange(0, BLOCK_N)[None, :].to(tl.float32)
        b_index = tl.min(tl.where(b_maxima == b_max[:, None], b_col, PAST_ALL_COLUMNS), axis=1)
    return b_max, b_sum, b_total, b_dot, b_index, b_squares, b_weight


@triton.jit
def statistics_of_rows(
    p_row, b_tail, s_row, n_rows, b_rate, p_bias, p_class_weight, logit_scale, softcap, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr,
    SQUARES: tl.constexpr
):  # fmt: skip
    """Statistics [BLOCK_M] of a tile of rows, whose columns behind the last whole block b_tail has."""
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    if N > N_FULL:
        b_max, b_sum, b_total, b_dot, b_index, b_squares, b_weight = tile_statistics(
            b_tail, N_FULL, p_class_weight, N - N_FULL, SMOOTHED, ENTROPY, ARGMAX, SQUARES
        )
    if N_FULL > 0:
        b_max1, b_sum1, b_total1, b_dot1, b_index1, b_squares1, b_weight1 = sweep_statistics(
            p_row, N_FULL, s_row, n_rows, b_rate, p_bias, p_class_weight, logit_scale, softcap, BLOCK_M, BLOCK_N, SMOOTHED,
            ENTROPY, ARGMAX, SQUARES
        )  # fmt: skip
        if N > N_FULL:
            if SQUARES:
                b_squares = merge_squares(b_max1, b_squares1, b_max, b_squares)
            if SMOOTHED:
                b_total = merge_totals(b_max1, b_total1, b_weight1, b_max, b_total, b_weight)
                b_weight += b_weight1
            b_max, b_sum, b_dot, b_index = merge_statistics(
                b_max1, b_sum1, b_dot1, b_index1, b_max, b_sum, b_dot, b_index, ENTROPY, ARGMAX
            )
        else:
            b_max, b_sum, b_total, b_dot, b_index, b_squares = b_max1, b_sum1, b_total1, b_dot1, b_index1, b_squares1
            b_weight = b_weight1
    return b_max, b_sum, b_total, b_dot, b_index, b_squares, b_weight


@triton.jit
def log_sum_exp(
    p_row, b_tail, s_row, n_rows, p_bias, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """The largest z and log sum exp(z - largest), [BLOCK_M], of a tile of rows; b_tail: as in `statistics_of_rows`."""
    b_max, b_sum, _, _, _, _, _ = statistics_of_rows(
        p_row, b_tail, s_row, n_rows, None, p_bias, None, logit_scale, softcap, N, BLOCK_M, BLOCK_N, False, False, False,
        False
    )  # fmt: skip
    return b_max, tl.log(b_sum)


@triton.jit
def store_statistics(
    p_row, p_statistics, b_tail, b_column, i_row, m_row, s_row, s_out, n_rows, n_left, p_bias, p_class_weight, first,
    logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MERGE: tl.constexpr,
    SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr
):  # fmt: skip
    """Stores the statistics of a tile of rows and their targets' z, and returns some of them.

    Args:
        p_statistics: of a tensor [7, rows].
        b_column: the targets' columns, of these or of others.
        MERGE: merged with the statistics of earlier columns, which are there already.

    Returns:
        Maximum, sum of exp, the target's z, whether the target is a column of this chunk, and that column or another one.
    """
    b_max, b_sum, b_total, b_dot, b_index, _, b_weight = statistics_of_rows(
        p_row, b_tail, s_row, n_rows, None, p_bias, p_class_weight, logit_scale, softcap, N, BLOCK_M, BLOCK_N, SMOOTHED,
        ENTROPY, ARGMAX, False
    )  # fmt: skip
    m_here, b_safe = target_column(b_column, N)
    b_z = target_logit(p_row, m_here, b_safe, s_row, n_left, p_bias, logit_scale, softcap)
    if ARGMAX:
        b_index += first.to(tl.float32)
    p_out = p_statistics + i_row + tl.arange(0, BLOCK_M)
    if MERGE:
        b_max0 = tl.load(p_out, mask=m_row, other=0.0)
        b_sum0 = tl.load(p_out + s_out, mask=m_row, other=1.0)
        b_z += tl.load(p_out + 2 * s_out, mask=m_row, other=0.0)
        b_dot0, b_index0 = 0.0, 0.0
        if SMOOTHED:
            b_total0 = tl.load(p_out + 3 * s_out, mask=m_row, other=0.0)
            b_weight0 = tl.load(p_out + 6 * s_out, mask=m_row, other=0.0)
            b_total = merge_totals(b_max0, b_total0, b_weight0, b_max, b_total, b_weight)
            b_weight += b_weight0
        if ENTROPY:
            b_dot0 = tl.load(p_out + 4 * s_out, mask=m_row, other=0.0)
        if ARGMAX:
            b_index0 = tl.load(p_out + 5 * s_out, mask=m_row, other=0.0)
        b_max, b_sum, b_dot, b_index = merge_statistics(
            b_max0, b_sum0, b_dot0, b_index0, b_max, b_sum, b_dot, b_index, ENTROPY, ARGMAX
        )
    tl.store(p_out, b_max, mask=m_row)
    tl.store(p_out + s_out, b_sum, mask=m_row)
    tl.store(p_out + 2 * s_out, b_z, mask=m_row)
    if SMOOTHED:
        tl.store(p_out + 3 * s_out, b_total, mask=m_row)
        tl.store(p_out + 6 * s_out, tl.zeros([BLOCK_M], tl.float32) + b_weight, mask=m_row)
    if ENTROPY:
        tl.store(p_out + 4 * s_out, b_dot, mask=m_row)
    if ARGMAX:
        tl.store(p_out + 5 * s_out, b_index, mask=m_row)
    return b_max, b_sum, b_z, m_here, b_safe
