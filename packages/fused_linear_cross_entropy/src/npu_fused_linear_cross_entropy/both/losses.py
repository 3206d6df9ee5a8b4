"""Device code of the arithmetic on rows: from statistics to losses and to the gradient's factors; statistics of ranks are
joined. Formulas: reference.

Tiles and sums are as in targets.py.
"""

import triton
import triton.language as tl

from ..formula import merge_statistics, merge_totals, row_coefficients
from .targets import IGNORED, PARTIAL_WIDTH, add_partials, partial_number, partial_row, store_first


@triton.jit
def store_sums(loss, z_loss, right, p_factors, p_loss, p_z_loss, p_accuracy, REDUCED: tl.constexpr):
    """Stores the results that are one number: the reduced loss and z-loss, and the accuracy."""
    if REDUCED:
        nothing = tl.where(tl.load(p_factors + 3) > 0.0, 0.0, tl.load(p_factors))  # NaN: no row counts, the divisor is 0
        store_first(p_loss, loss + nothing, 1)
        if p_z_loss is not None:
            store_first(p_z_loss, z_loss + nothing, 1)
    if p_accuracy is not None:
        store_first(p_accuracy, right / tl.maximum(tl.load(p_factors + 3), 1.0), 1)


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "vocab_size"])
def cross_entropy_losses_kernel(
    p_statistics,  # fp32 [7, rows], see two_sweeps.py
    p_columns,  # int32 [rows]
    p_target_weight,  # fp32 [rows]
    p_factors,  # fp32 [PARTIAL_WIDTH]: of the loss, of the z-loss, the sum of the class weights, how many rows count
    p_loss,  # fp32, [rows] or REDUCED one number, as the next one
    p_z_loss,
    p_accuracy,  # fp32, one number
    p_predicted,  # int64 [rows]
    p_lse,  # fp32 [rows]
    p_entropy,  # fp32 [rows]
    p_partials,  # fp32 [programs, PARTIAL_WIDTH]: loss, z-loss, rows whose largest logit is the target's; not LAST
    n_rows,
    s_statistics,
    vocab_size,
    smoothing,
    z_scale,
    BLOCK_M: tl.constexpr,
    SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    REDUCED: tl.constexpr,
    LAST: tl.constexpr,
):
    """Losses and other outputs of rows from their statistics; reduced outputs as numbers or (not LAST) as partial sums."""
    o_row = tl.arange(0, BLOCK_M)
    b_losses = tl.zeros([BLOCK_M], tl.float32)
    b_z_losses = tl.zeros([BLOCK_M], tl.float32)
    b_rights = tl.zeros([BLOCK_M], tl.float32)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        m_row = o_row < n_rows - i_row
        p_row = p_statistics + i_row + o_row
        b_column = tl.load(p_columns + i_row + o_row, mask=m_row, other=IGNORED).to(tl.float32)  # [BLOCK_M]
        b_sum = tl.load(p_row + s_statistics, mask=m_row, other=1.0)
        b_log = tl.log(b_sum)
        b_reference = tl.load(p_row, mask=m_row, other=0.0)
        b_nll = (b_reference - tl.load(p_row + 2 * s_statistics, mask=m_row, other=0.0)) + b_log
        b_lse = b_reference + b_log
        b_loss = b_nll
        if p_target_weight is not None:
            b_loss *= tl.load(p_target_weight + i_row + o_row, mask=m_row, other=0.0)
        if SMOOTHED:
            weights = vocab_size.to(tl.float32)
            per_column = smoothing / weights
            if p_target_weight is not None:
                weights = tl.load(p_factors + 2)
            b_total = tl.load(p_row + 3 * s_statistics, mask=m_row, other=0.0)
            b_loss = (1.0 - smoothing) * b_loss + per_column * (b_log * weights - b_total)
        b_loss *= tl.load(p_factors)
        if Z_LOSS:
            b_z_loss = z_scale * b_lse * b_lse * tl.load(p_factors + 1)
            b_loss += b_z_loss
        if TOKEN_SCALING:
            b_probability = tl.exp(-b_nll)
            b_loss *= b_probability
            if Z_LOSS:
                b_z_loss *= b_probability
        b_absent = tl.where(b_column == 1.0 * IGNORED, 0.0, float("nan"))  # 0 if ignored, NaN outside the vocabulary
        m_known = b_column >= 0.0
        b_loss = tl.where(m_known, b_loss, b_absent)
        if REDUCED:
            b_losses += b_loss
        else:
            tl.store(p_loss + i_row + o_row, b_loss, mask=m_row)
        if p_z_loss is not None:
            b_z_loss = tl.where(m_known, b_z_loss, b_absent)
            if REDUCED:
                b_z_losses += b_z_loss
            else:
                tl.store(p_z_loss + i_row + o_row, b_z_loss, mask=m_row)
        m_counted = b_column != 1.0 * IGNORED
        if p_lse is not None:
            tl.store(p_lse + i_row + o_row, tl.where(m_counted, b_lse, 0.0), mask=m_row)
        if p_entropy is not None:
            b_dot = tl.load(p_row + 4 * s_statistics, mask=m_row, other=0.0)
            tl.store(p_entropy + i_row + o_row, tl.where(m_counted, b_log - b_dot / b_sum, 0.0), mask=m_row)
        if (p_accuracy is not None) or (p_predicted is not None):
            b_place = tl.load(p_row + 5 * s_statistics, mask=m_row, other=0.0)
            if p_accuracy is not None:
                b_rights += tl.where(b_place == b_column, 1.0, 0.0)
            if p_predicted is not None:
                # A row of NaN has no maximum.
                b_inside = tl.minimum(tl.maximum(b_place, 0.0), vocab_size.to(tl.float32) - 1.0)
                tl.store(p_predicted + i_row + o_row, tl.where(m_counted, b_inside, -1.0).to(tl.int64), mask=m_row)
    if REDUCED or (p_accuracy is not None):
        loss, z_loss, right = tl.sum(b_losses), tl.sum(b_z_losses), tl.sum(b_rights)
        if LAST:
            store_sums(loss, z_loss, right, p_factors, p_loss, p_z_loss, p_accuracy, REDUCED)
        else:
            p_partial = p_partials + tl.program_id(0) * PARTIAL_WIDTH
            tl.store(p_partial + tl.arange(0, PARTIAL_WIDTH), partial_row(loss, z_loss, right, 0.0))


@triton.jit(do_not_specialize=["n_partials"])
def cross_entropy_sums_kernel(
    p_partials, p_factors, p_loss, p_z_loss, p_accuracy, n_partials, BLOCK_P: tl.constexpr, REDUCED: tl.constexpr
):  # fmt: skip
    """One program adds partial sums and stores what a single program of `cross_entropy_losses_kernel` would."""
    b_sums = add_partials(p_partials, n_partials, BLOCK_P)
    store_sums(
        partial_number(b_sums, 0),
        partial_number(b_sums, 1),
        partial_number(b_sums, 2),
        p_factors,
        p_loss,
        p_z_loss,
        p_accuracy,
        REDUCED,
    )


@triton.jit
def load_upstream(p_value, o_row, m_row, EACH: tl.constexpr):
    """The gradient that each row's output received, or the one that all did."""
    if EACH:
        b_value = tl.load(p_value + o_row, mask=m_row, other=0.0)
    else:
        b_value = tl.load(p_value)
    return b_value


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "s_coefficients", "vocab_size"])
def cross_entropy_coefficients_kernel(
    p_statistics,  # fp32 [7, rows]
    p_columns,  # int32 [rows]
    p_target_weight,  # fp32 [rows]
    p_factors,  # fp32 [PARTIAL_WIDTH], as above, of the gradient
    p_dloss,  # fp32 [rows] or one number; with LOSS, None for 1
    p_dentropy,  # fp32 [rows] or one number
    p_coefficients,  # fp32 [5, rows]: k, a, b, c, q
    n_rows,
    s_statistics,
    s_coefficients,
    vocab_size,
    smoothing,
    z_scale,
    BLOCK_M: tl.constexpr,
    LOSS: tl.constexpr,
    EACH_LOSS: tl.constexpr,
    ENTROPY: tl.constexpr,  # the last row is asked for
    EACH_ENTROPY: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
):
    """Factors of each row's gradient, from its statistics and the gradients that the outputs received."""
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        m_row = o_row < n_rows - i_row
        p_row = p_statistics + i_row + o_row
        p_out = p_coefficients + i_row + o_row
        b_column = tl.load(p_columns + i_row + o_row, mask=m_row, other=IGNORED).to(tl.float32)  # [BLOCK_M]
        b_sum = tl.load(p_row + s_statistics, mask=m_row, other=1.0)
        b_reference = tl.load(p_row, mask=m_row, other=0.0)
        b_zero = b_column * 0.0  # computed in each iteration, so that stores overlap
        b_a, b_b, b_c, b_q = b_zero, b_zero, b_zero, b_zero
        if LOSS:
            m_known, b_up = b_column >= 0.0, 1.0
            if p_dloss is not None:
                b_up = load_upstream(p_dloss, i_row + o_row, m_row, EACH_LOSS)
            b_main = tl.where(m_known, b_up * tl.load(p_factors), 0.0)
            b_of_z_loss = tl.where(m_known, b_up * tl.load(p_factors + 1), 0.0)
            b_weight, b_z = 0.0, 0.0
            if p_target_weight is not None:
                b_weight = tl.load(p_target_weight + i_row + o_row, mask=m_row, other=0.0)
            if TOKEN_SCALING:
                b_z = tl.load(p_row + 2 * s_statistics, mask=m_row, other=0.0)
            b_a, b_b, b_c = row_coefficients(
                b_main, b_of_z_loss, b_weight, p_factors + 2, b_reference, b_sum, b_z, smoothing,
                smoothing / vocab_size.to(tl.float32), z_scale, p_target_weight is not None, True, True, TOKEN_SCALING
            )  # fmt: skip
        if p_dentropy is not None:
            b_on = load_upstream(p_dentropy, i_row + o_row, m_row, EACH_ENTROPY)
            b_q = tl.where(b_column != 1.0 * IGNORED, -b_on, 0.0)
            b_dot = tl.load(p_row + 4 * s_statistics, mask=m_row, other=0.0)
            b_a -= b_q * (b_dot / b_sum)
        tl.store(p_out, b_reference, mask=m_row)
        tl.store(p_out + s_coefficients, b_a / b_sum, mask=m_row)
        tl.store(p_out + 2 * s_coefficients, b_b, mask=m_row)
        tl.store(p_out + 3 * s_coefficients, b_c, mask=m_row)
        if ENTROPY:
            tl.store(p_out + 4 * s_coefficients, b_q / b_sum, mask=m_row)


@triton.jit
def load_statistics(p_row, s_statistics, m_row):
    """The seven statistics of rows."""
    b_max = tl.load(p_row, mask=m_row, other=0.0)
    b_sum = tl.load(p_row + s_statistics, mask=m_row, other=1.0)
    b_z = tl.load(p_row + 2 * s_statistics, mask=m_row, other=0.0)
    b_total = tl.load(p_row + 3 * s_statistics, mask=m_row, other=0.0)
    b_dot = tl.load(p_row + 4 * s_statistics, mask=m_row, other=0.0)
    b_place = tl.load(p_row + 5 * s_statistics, mask=m_row, other=0.0)
    b_weight = tl.load(p_row + 6 * s_statistics, mask=m_row, other=0.0)
    return b_max, b_sum, b_z, b_total, b_dot, b_place, b_weight


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "n_ranks"])
def cross_entropy_join_kernel(
    p_parts,  # fp32 [ranks, 7, rows], contiguous: statistics of each rank's columns
    p_statistics,  # fp32 [7, rows]: of all columns
    n_rows,
    s_statistics,
    n_ranks,
    BLOCK_M: tl.constexpr,
):
    """Joins the statistics of a vocabulary's parts, in any order. Statistics that no option asks for are undefined."""
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        m_row = o_row < n_rows - i_row
        p_part = p_parts + i_row + o_row
        b_max, b_sum, b_z, b_total, b_dot, b_place, b_weight = load_statistics(p_part, n_rows, m_row)
        for i_rank in tl.range(1, n_ranks):
            p_next = p_part + i_rank.to(tl.int64) * (7 * n_rows)
            b_max1, b_sum1, b_z1, b_total1, b_dot1, b_place1, b_weight1 = load_statistics(p_next, n_rows, m_row)
            b_total = merge_totals(b_max, b_total, b_weight, b_max1, b_total1, b_weight1)
            b_place = tl.where(b_max1 == b_max, tl.minimum(b_place, b_place1), b_place)  # the first of equal maxima
            b_max, b_sum, b_dot, b_place = merge_statistics(
                b_max, b_sum, b_dot, b_place, b_max1, b_sum1, b_dot1, b_place1, True, True
            )
            b_z += b_z1
            b_weight += b_weight1
        p_out = p_statistics + i_row + o_row
        tl.store(p_out, b_max, mask=m_row)
        tl.store(p_out + s_statistics, b_sum, mask=m_row)
        tl.store(p_out + 2 * s_statistics, b_z, mask=m_row)
        tl.store(p_out + 3 * s_statistics, b_total, mask=m_row)
        tl.store(p_out + 4 * s_statistics, b_dot, mask=m_row)
        tl.store(p_out + 5 * s_statistics, b_place, mask=m_row)
        tl.store(p_out + 6 * s_statistics, b_weight, mask=m_row)
