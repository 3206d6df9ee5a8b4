"""Device code of distillation: the divergence of each row of a student's logits from a teacher's, and its gradient in the
place of the student's logits. Formulas: divergences.py.

Tiles are those of two_sweeps.py, of both matrices. Each matrix is swept for its log sum exp; both are swept for the sums of
a row; and backwards for the gradient. "forward_kl" has two sweeps: its gradient needs no sums, and its loss is summed there.
A temperature is part of the scales and softcaps: c tanh(s z / c) / T = (c / T) tanh((s / T) z / (c / T)).
"""

import triton
import triton.language as tl

from ..formula import gradient_before_softcap, merge_statistics
from .divergences import divergence_terms
from .statistics import sweep_statistics, tile_statistics
from .tile import load_logits, load_tail, store_tile, target_column, target_logit, tile_of_rows


@triton.jit
def row_lse(
    p_row, b_tail, s_row, n_left, p_bias, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """log sum exp z, [BLOCK_M], of a tile of rows, whose last columns b_tail has."""
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    if TAIL_N > 0:
        b_max, b_sum, b_total, b_dot, b_index = tile_statistics(
            b_tail, N_FULL, None, N, TAIL_N, N_FULL + TAIL_N == N, False, False, False
        )
    if N_FULL > 0:
        b_max1, b_sum1, b_total1, b_dot1, b_index1 = sweep_statistics(
            p_row, N_FULL, s_row, n_left, p_bias, None, logit_scale, softcap, N, BLOCK_M, BLOCK_N, False, False, False,
            SCALED, SOFTCAP, PADDED
        )  # fmt: skip
        if TAIL_N > 0:
            b_max, b_sum, b_dot, b_index = merge_statistics(
                b_max1, b_sum1, b_dot1, b_index1, b_max, b_sum, b_dot, b_index, False, False
            )
        else:
            b_max, b_sum = b_max1, b_sum1
    return b_max + tl.log(b_sum)


@triton.jit
def divergence_sums(
    p_row, p_teacher_row, b_tail, b_teacher_tail, b_lse, b_teacher_lse, s_row, s_teacher, n_left, p_bias, p_teacher_bias,
    logit_scale, softcap, teacher_scale, teacher_softcap, beta, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, DIVERGENCE: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    TEACHER_SCALED: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """D and k, [BLOCK_M] each, of a tile of rows, whose last columns the tails have."""
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    b_loss, b_k = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if TAIL_N > 0:
        b_last, b_last_slope, b_last_p = divergence_terms(
            b_tail - b_lse[:, None], b_teacher_tail - b_teacher_lse[:, None], beta, DIVERGENCE
        )
        if N_FULL + TAIL_N != N:
            m_col = (tl.arange(0, TAIL_N) < N - N_FULL)[None, :]
            b_last, b_last_slope = tl.where(m_col, b_last, 0.0), tl.where(m_col, b_last_slope, 0.0)
        b_loss += tl.sum(b_last, axis=1)
        b_k += tl.sum(b_last_slope, axis=1)
    if N_FULL > 0:
        b_terms = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_slopes = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N_FULL, BLOCK_N):
            b_z = load_logits(
                p_row, i_col, s_row, n_left, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, True, SCALED, SOFTCAP, PADDED
            )  # fmt: skip
            b_teacher = load_logits(
                p_teacher_row, i_col, s_teacher, n_left, p_teacher_bias, teacher_scale, teacher_softcap, N, BLOCK_M, BLOCK_N,
                True, TEACHER_SCALED, TEACHER_SOFTCAP, PADDED
            )  # fmt: skip
            b_term, b_slope, b_p = divergence_terms(
                b_z - b_lse[:, None], b_teacher - b_teacher_lse[:, None], beta, DIVERGENCE
            )
            b_terms += b_term
            if DIVERGENCE == "jensen_shannon" or DIVERGENCE == "total_variation":
                b_slopes += b_slope
        b_loss += tl.sum(b_terms, axis=1)
        b_k += tl.sum(b_slopes, axis=1)
    if DIVERGENCE == "reverse_kl":
        b_k = b_loss
    return b_loss, b_k


@triton.jit
def store_distilled(
    p_out, b_z, b_teacher, b_lse, b_teacher_lse, b_hard_lse, b_k, b_soft, b_hard, b_column, m_counted, i_col, s_out, n_left,
    logit_scale, softcap, temperature, beta, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EXACT_N: tl.constexpr, DIVERGENCE: tl.constexpr, HARD: tl.constexpr, TEMPERED: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the gradient of a tile of raw logits, given z of both and the rows' numbers; returns the tile's f."""
    b_term, b_slope, b_p = divergence_terms(b_z - b_lse[:, None], b_teacher - b_teacher_lse[:, None], beta, DIVERGENCE)
    b_g = (b_slope - b_p * b_k[:, None]) * b_soft[:, None]
    if HARD:
        if TEMPERED:
            b_p = tl.exp(b_z * temperature - b_hard_lse[:, None])
        # fp32 compares: those of integers are loops over elements on Ascend. Exact below 2^24; a
        # larger distance is never rounded to less, so that it equals no column.
        m_target = (b_column - i_col)[:, None].to(tl.float32) == tl.arange(0, BLOCK_N)[None, :].to(tl.float32)
        b_g += b_hard[:, None] * tl.where(m_target, b_p - 1.0, b_p)
    b_g = gradient_before_softcap(b_g, b_z, logit_scale, softcap, SCALED, SOFTCAP)
    b_g = tl.where(m_counted, b_g, 0.0)
    store_tile(p_out, b_g, i_col, s_out, n_left, N, BLOCK_M, BLOCK_N, EXACT_N, BARRIER)
    if not EXACT_N:
        b_term = tl.where((tl.arange(0, BLOCK_N) < N - i_col)[None, :], b_term, 0.0)
    return b_term


@triton.jit
def sweep_distilled(
    p_row, p_teacher_row, p_out, b_tail, b_teacher_tail, b_lse, b_teacher_lse, b_hard_lse, b_k, b_soft, b_hard, b_column,
    m_counted, s_row, s_teacher, s_out, n_left, p_bias, p_teacher_bias, logit_scale, softcap, teacher_scale, teacher_softcap,
    temperature, beta, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    DIVERGENCE: tl.constexpr, HARD: tl.constexpr, TEMPERED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    TEACHER_SCALED: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, PADDED: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the gradient of a tile of rows, whose last columns the tails have, backwards; returns D of the forward one."""
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    b_loss = tl.zeros([BLOCK_M], tl.float32)
    if TAIL_N > 0:
        b_last = store_distilled(
            p_out, b_tail, b_teacher_tail, b_lse, b_teacher_lse, b_hard_lse, b_k, b_soft, b_hard, b_column, m_counted,
            N_FULL, s_out, n_left, logit_scale, softcap, temperature, beta, N, BLOCK_M, TAIL_N, N_FULL + TAIL_N == N,
            DIVERGENCE, HARD, TEMPERED, SCALED, SOFTCAP, BARRIER
        )  # fmt: skip
        if DIVERGENCE == "forward_kl":
            b_loss += tl.sum(b_last, axis=1)
    if N_FULL > 0:
        b_terms = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_block in tl.range(0, N_FULL, BLOCK_N):
            i_col = N_FULL - BLOCK_N - i_block
            b_z = load_logits(
                p_row, i_col, s_row, n_left, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, True, SCALED, SOFTCAP, PADDED
            )  # fmt: skip
            b_teacher = load_logits(
                p_teacher_row, i_col, s_teacher, n_left, p_teacher_bias, teacher_scale, teacher_softcap, N, BLOCK_M, BLOCK_N,
                True, TEACHER_SCALED, TEACHER_SOFTCAP, PADDED
            )  # fmt: skip
            b_term = store_distilled(
                p_out, b_z, b_teacher, b_lse, b_teacher_lse, b_hard_lse, b_k, b_soft, b_hard, b_column, m_counted, i_col,
                s_out, n_left, logit_scale, softcap, temperature, beta, N, BLOCK_M, BLOCK_N, True, DIVERGENCE, HARD,
                TEMPERED, SCALED, SOFTCAP, BARRIER
            )  # fmt: skip
            if DIVERGENCE == "forward_kl":
                b_terms += b_term
        if DIVERGENCE == "forward_kl":
            b_loss += tl.sum(b_terms, axis=1)
    return b_loss


@triton.jit(do_not_specialize=["n_rows", "s_losses"])
def distillation_kernel(
    p_student,  # [rows, N], raw products
    p_gradient,  # [rows, N], over the student's memory
    p_teacher,  # [rows, N], raw products
    p_target,  # int32 [rows], negative: none; with HARD
    p_bias,  # [N]
    p_teacher_bias,  # [N]
    p_factors,  # fp32 [rows], of the gradient
    p_losses,  # fp32 [2, rows]: divergences, and cross entropies of the targets
    n_rows,
    s_student,
    s_gradient,
    s_teacher,
    s_losses,
    logit_scale,  # these four divided by the temperature
    softcap,
    teacher_scale,
    teacher_softcap,
    temperature,
    beta,
    soft_weight,
    hard_weight,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    PADDED: tl.constexpr,
    BARRIER: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    HARD: tl.constexpr,
    TEMPERED: tl.constexpr,  # the targets' cross entropy has probabilities of its own
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEACHER_SCALED: tl.constexpr,
    TEACHER_SOFTCAP: tl.constexpr,
):
    """Losses of whole rows, and the gradient of their sum times the factors, if there is memory for it."""
    # lint: allow scalar-loop: one logit a row, the target's, comes from wherever it is
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; what is no multiple of 32 bytes is padded on chip
    RELOADS: tl.constexpr = TAIL_N > 0 and N >= BLOCK_N  # a tail is not kept while the other columns are swept
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_student, i_tile, n_rows, s_student, BLOCK_M)
        p_teacher_row = p_teacher + i_row.to(tl.int64) * s_teacher
        b_tail = load_tail(
            p_row, s_student, n_left, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N, SCALED, SOFTCAP, PADDED
        )  # fmt: skip
        b_lse = row_lse(
            p_row, b_tail, s_student, n_left, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N, SCALED, SOFTCAP,
            PADDED
        )  # fmt: skip
        b_hard_lse, b_column = b_lse, i_row
        if HARD:
            b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1)  # [BLOCK_M]
            if TEMPERED:
                b_hard_lse = row_lse(
                    p_row, b_tail * temperature, s_student, n_left, p_bias, logit_scale * temperature, softcap * temperature,
                    N, BLOCK_M, BLOCK_N, TAIL_N, True, SOFTCAP, PADDED
                )  # fmt: skip
            m_here, b_safe = target_column(b_column, N)
            b_target = target_logit(
                p_row, m_here, b_safe, s_student, n_left, p_bias, logit_scale, softcap, BLOCK_M, SCALED, SOFTCAP
            )
            tl.store(p_losses + s_losses + i_row + o_row, b_hard_lse - b_target * temperature, mask=m_row)
        b_teacher_tail = load_tail(
            p_teacher_row, s_teacher, n_left, p_teacher_bias, teacher_scale, teacher_softcap, N, BLOCK_M, BLOCK_N, TAIL_N,
            TEACHER_SCALED, TEACHER_SOFTCAP, PADDED
        )  # fmt: skip
        b_teacher_lse = row_lse(
            p_teacher_row, b_teacher_tail, s_teacher, n_left, p_teacher_bias, teacher_scale, teacher_softcap, N, BLOCK_M,
            BLOCK_N, TAIL_N, TEACHER_SCALED, TEACHER_SOFTCAP, PADDED
        )  # fmt: skip
        b_k = tl.full([BLOCK_M], -1.0, tl.float32)
        b_loss = b_k
        if DIVERGENCE != "forward_kl" or p_gradient is None:
            if RELOADS:
                b_tail = load_tail(
                    p_row, s_student, n_left, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N, SCALED, SOFTCAP,
                    PADDED
                )  # fmt: skip
                b_teacher_tail = load_tail(
                    p_teacher_row, s_teacher, n_left, p_teacher_bias, teacher_scale, teacher_softcap, N, BLOCK_M, BLOCK_N,
                    TAIL_N, TEACHER_SCALED, TEACHER_SOFTCAP, PADDED
                )  # fmt: skip
            b_loss, b_k = divergence_sums(
                p_row, p_teacher_row, b_tail, b_teacher_tail, b_lse, b_teacher_lse, s_student, s_teacher, n_left, p_bias,
                p_teacher_bias, logit_scale, softcap, teacher_scale, teacher_softcap, beta, N, BLOCK_M, BLOCK_N, TAIL_N,
                DIVERGENCE, SCALED, SOFTCAP, TEACHER_SCALED, TEACHER_SOFTCAP, PADDED
            )  # fmt: skip
        if p_gradient is not None:
            b_factor = tl.load(p_factors + i_row + o_row, mask=m_row, other=0.0)
            m_counted = (b_factor != 0.0)[:, None]
            if RELOADS:
                b_tail = load_tail(
                    p_row, s_student, n_left, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N, SCALED, SOFTCAP,
                    PADDED
                )  # fmt: skip
                b_teacher_tail = load_tail(
                    p_teacher_row, s_teacher, n_left, p_teacher_bias, teacher_scale, teacher_softcap, N, BLOCK_M, BLOCK_N,
                    TAIL_N, TEACHER_SCALED, TEACHER_SOFTCAP, PADDED
                )  # fmt: skip
            b_forward = sweep_distilled(
                p_row, p_teacher_row, p_gradient + i_row.to(tl.int64) * s_gradient, b_tail, b_teacher_tail, b_lse,
                b_teacher_lse, b_hard_lse, b_k, b_factor * soft_weight, b_factor * (hard_weight * temperature), b_column,
                m_counted, s_student, s_teacher, s_gradient, n_left, p_bias, p_teacher_bias, logit_scale, softcap,
                teacher_scale, teacher_softcap, temperature, beta, N, BLOCK_M, BLOCK_N, TAIL_N, DIVERGENCE, HARD, TEMPERED,
                SCALED, SOFTCAP, TEACHER_SCALED, TEACHER_SOFTCAP, PADDED, BARRIER
            )  # fmt: skip
            if DIVERGENCE == "forward_kl":
                b_loss = b_forward
        tl.store(p_losses + i_row + o_row, b_loss, mask=m_row)
