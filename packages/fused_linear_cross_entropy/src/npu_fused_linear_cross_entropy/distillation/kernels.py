"""The kernel of distillation, and its launch.

It computes the divergence of each row of a student's logits from a teacher's, and its gradient in the place of the student's
logits. Formulas: plan.py. Tiles are as in loss/two_sweeps.py, of both matrices. The first sweeps compute maxima and log sum
exp, one of each matrix, and where labels have a weight and T is not 1, one more of the student's at T = 1. The next computes
the sums of a row, the last one, backwards, the gradient. "forward_kl" needs no sums for its gradient: the last sweep adds up
its loss. A temperature is part of the scales and softcaps: c tanh(s z / c) / T = (c / T) tanh((s / T) z / (c / T)).
"""

from __future__ import annotations

from typing import Any

from npu_tiling.device import tl, triton
from npu_tiling.plans import Plan

from ..call import DistillationOptions
from ..formula import (
    LOWEST,
    gradient_of_raw,
    inside,
    is_column,
    load_logits,
    load_tail,
    log_sum_exp,
    store_tile,
    target_column,
    target_logit,
    tile_of_rows,
)
from ..loss import launch_shape
from ..tiling import ChunkKernel, ChunkShape

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


@triton.jit
def load_both(
    p_row, p_teacher_row, i_col, s_row, n_rows, p_bias, p_teacher_bias, logit_scale, softcap, teacher_scale,
    teacher_softcap, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """z of the student and of the teacher, of a tile."""
    b_z = load_logits(p_row, i_col, s_row, n_rows, p_bias, logit_scale, softcap, COLUMNS, BLOCK_M, BLOCK_N)
    b_teacher = load_logits(
        p_teacher_row, i_col, s_row, n_rows, p_teacher_bias, teacher_scale, teacher_softcap, COLUMNS, BLOCK_M, BLOCK_N
    )
    return b_z, b_teacher


@triton.jit
def divergence_sums(
    p_row, p_teacher_row, b_tail, b_teacher_tail, b_max, b_log, b_teacher_max, b_teacher_log, s_row, n_rows, p_bias,
    p_teacher_bias, logit_scale, softcap, teacher_scale, teacher_softcap, beta, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIVERGENCE: tl.constexpr
):  # fmt: skip
    """D and k, [BLOCK_M] each, of a tile of rows, whose columns behind the last whole block the tails have."""
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    b_loss, b_k = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if N > N_FULL:
        b_last, b_last_slope, _ = divergence_terms(
            b_tail, b_teacher_tail, b_max, b_log, b_teacher_max, b_teacher_log, beta, DIVERGENCE
        )
        b_last, b_last_slope = inside(b_last, 0.0, N - N_FULL), inside(b_last_slope, 0.0, N - N_FULL)
        b_loss += tl.sum(b_last, axis=1)
        b_k += tl.sum(b_last_slope, axis=1)
    if N_FULL > 0:
        b_terms, b_slopes = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N_FULL, BLOCK_N):
            b_z, b_teacher = load_both(
                p_row, p_teacher_row, i_col, s_row, n_rows, p_bias, p_teacher_bias, logit_scale, softcap,
                teacher_scale, teacher_softcap, BLOCK_N, BLOCK_M, BLOCK_N
            )  # fmt: skip
            b_term, b_slope, b_p = divergence_terms(
                b_z, b_teacher, b_max, b_log, b_teacher_max, b_teacher_log, beta, DIVERGENCE
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
def store_gradient(
    p_out, b_z, b_slope, b_p, b_k, b_soft, b_hard, b_max, b_hard_log, b_column, m_counted, i_col, s_out, n_rows,
    logit_scale, softcap, temperature, COLUMNS: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the gradient of a tile of the student's raw logits.

    Args:
        b_soft, b_hard: [BLOCK_M], factors of the divergence's gradient and of the cross entropy's; b_hard: None for none.
        b_max, b_hard_log: [BLOCK_M], the largest z, and log sum exp(temperature (z - largest)), of the logits at T = 1;
            where T is 1, the temperature is None and p serves both.
    """
    b_g = (b_slope - b_p * b_k[:, None]) * b_soft[:, None]
    if b_hard is not None:
        if temperature is not None:
            b_p = tl.exp((b_z - b_max[:, None]) * temperature - b_hard_log[:, None])
        b_g += b_hard[:, None] * tl.where(is_column(b_column - i_col, b_z.shape[1]), b_p - 1.0, b_p)
    b_g = tl.where(m_counted, gradient_of_raw(b_g, b_z, None, logit_scale, softcap), 0.0)
    store_tile(p_out, b_g, i_col, s_out, n_rows, COLUMNS, BARRIER)


@triton.jit(do_not_specialize=["n_rows", "s_losses"])
def distillation_kernel(
    p_student,  # [rows, N], raw products
    p_gradient,  # [rows, N], over the student's memory
    p_teacher,  # [rows, N], raw products, rows as far apart as the student's
    p_target,  # int32 [rows], negative: none; None: their cross entropy has no weight
    p_bias,  # [N]
    p_teacher_bias,  # [N]
    p_factors,  # fp32 [rows], of the gradient
    p_losses,  # fp32 [2, rows]: divergences, and cross entropies of the targets
    n_rows, s_student, s_losses,
    logit_scale,  # these four divided by the temperature; None: 1
    softcap,  # None: there is none
    teacher_scale, teacher_softcap,
    temperature,  # None: 1
    beta, soft_weight, hard_weight,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, PADDED: tl.constexpr,
    BARRIER: tl.constexpr, DIVERGENCE: tl.constexpr,
):  # fmt: skip
    """Losses of whole rows, and the gradient of their sum times the factors, if there is memory for it."""
    # lint: allow scalar-loop: one logit a row, the target's, comes from wherever it is
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; those not of whole 32 bytes are padded on chip
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    RELOADS: tl.constexpr = TAIL_N > 0 and N >= BLOCK_N  # a tail is not kept while the other columns are swept
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_student, i_tile, n_rows, s_student, BLOCK_M)
        n_read = None if PADDED else n_left
        p_teacher_row = p_teacher + i_row.to(tl.int64) * s_student
        b_tail = load_tail(p_row, s_student, n_read, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N)
        b_max, b_log = log_sum_exp(p_row, b_tail, s_student, n_read, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N)
        b_hard_log, b_column = b_log, i_row
        if p_target is not None:
            b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1)  # [BLOCK_M]
            if temperature is not None:
                _, b_hard_log = log_sum_exp(
                    p_row, b_tail * temperature, s_student, n_read, p_bias,
                    temperature if logit_scale is None else logit_scale * temperature,
                    None if softcap is None else softcap * temperature,
                    N, BLOCK_M, BLOCK_N
                )  # fmt: skip
            m_here, b_safe = target_column(b_column, N)
            b_target = target_logit(p_row, m_here, b_safe, s_student, n_left, p_bias, logit_scale, softcap)
            b_apart = b_max - b_target if temperature is None else (b_max - b_target) * temperature
            tl.store(p_losses + s_losses + i_row + o_row, b_apart + b_hard_log, mask=m_row)
        b_teacher_tail = load_tail(
            p_teacher_row, s_student, n_read, p_teacher_bias, teacher_scale, teacher_softcap, N, BLOCK_M, BLOCK_N, TAIL_N
        )
        b_teacher_max, b_teacher_log = log_sum_exp(
            p_teacher_row, b_teacher_tail, s_student, n_read, p_teacher_bias, teacher_scale, teacher_softcap, N, BLOCK_M,
            BLOCK_N
        )  # fmt: skip
        b_k = tl.full([BLOCK_M], -1.0, tl.float32)
        b_loss = b_k  # a placeholder with its type: the branches below assign it
        if DIVERGENCE != "forward_kl" or p_gradient is None:  # the sums of a row, which its gradient needs
            if RELOADS:
                b_tail, b_teacher_tail = load_both(
                    p_row, p_teacher_row, N_FULL, s_student, n_read, p_bias, p_teacher_bias, logit_scale, softcap,
                    teacher_scale, teacher_softcap, N - N_FULL, BLOCK_M, TAIL_N
                )  # fmt: skip
            b_loss, b_k = divergence_sums(
                p_row, p_teacher_row, b_tail, b_teacher_tail, b_max, b_log, b_teacher_max, b_teacher_log, s_student,
                n_read, p_bias, p_teacher_bias, logit_scale, softcap, teacher_scale, teacher_softcap, beta, N,
                BLOCK_M, BLOCK_N, DIVERGENCE
            )  # fmt: skip
        if p_gradient is not None:
            b_factor = tl.load(p_factors + i_row + o_row, mask=m_row, other=0.0)
            m_counted = (b_factor != 0.0)[:, None]
            if RELOADS:
                b_tail, b_teacher_tail = load_both(
                    p_row, p_teacher_row, N_FULL, s_student, n_read, p_bias, p_teacher_bias, logit_scale, softcap,
                    teacher_scale, teacher_softcap, N - N_FULL, BLOCK_M, TAIL_N
                )  # fmt: skip
            HALVES: tl.constexpr = (
                p_student.dtype.element_ty.primitive_bitwidth // p_gradient.dtype.element_ty.primitive_bitwidth
            )
            s_gradient = s_student * HALVES  # rows of both begin in the same places
            p_out = p_gradient + i_row.to(tl.int64) * s_gradient
            b_soft, b_hard = b_factor * soft_weight, None
            if p_target is not None:
                b_hard = b_factor * (hard_weight if temperature is None else hard_weight * temperature)
            if DIVERGENCE == "forward_kl":
                b_loss = tl.zeros([BLOCK_M], tl.float32)
            if TAIL_N > 0:
                b_last, b_last_slope, b_last_p = divergence_terms(
                    b_tail, b_teacher_tail, b_max, b_log, b_teacher_max, b_teacher_log, beta, DIVERGENCE
                )
                store_gradient(
                    p_out, b_tail, b_last_slope, b_last_p, b_k, b_soft, b_hard, b_max, b_hard_log, b_column, m_counted,
                    N_FULL, s_gradient, n_left, logit_scale, softcap, temperature, N - N_FULL, BARRIER
                )  # fmt: skip
                if DIVERGENCE == "forward_kl":
                    b_loss += tl.sum(inside(b_last, 0.0, N - N_FULL), axis=1)
            if N_FULL > 0:
                b_terms = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                for i_block in tl.range(0, N_FULL, BLOCK_N):
                    i_col = N_FULL - BLOCK_N - i_block
                    b_z, b_teacher = load_both(
                        p_row, p_teacher_row, i_col, s_student, n_read, p_bias, p_teacher_bias, logit_scale,
                        softcap, teacher_scale, teacher_softcap, BLOCK_N, BLOCK_M, BLOCK_N
                    )  # fmt: skip
                    b_term, b_slope, b_p = divergence_terms(
                        b_z, b_teacher, b_max, b_log, b_teacher_max, b_teacher_log, beta, DIVERGENCE
                    )
                    store_gradient(
                        p_out, b_z, b_slope, b_p, b_k, b_soft, b_hard, b_max, b_hard_log, b_column, m_counted, i_col,
                        s_gradient, n_left, logit_scale, softcap, temperature, BLOCK_N, BARRIER
                    )  # fmt: skip
                    if DIVERGENCE == "forward_kl":
                        b_terms += b_term
                if DIVERGENCE == "forward_kl":
                    b_loss += tl.sum(b_terms, axis=1)
        tl.store(p_losses + i_row + o_row, b_loss, mask=m_row)


# The launch.


def losses_and_gradient(
    p: Plan,
    options: DistillationOptions,
    student: Any,
    teacher: Any,
    bias: Any,
    teacher_bias: Any,
    target: Any,
    factors: Any,
    gradient: Any,
    losses: Any,
) -> None:
    """See `write_losses_and_gradient` in plan.py."""
    (rows, width), temperature = student.shape, options.temperature
    scale, teacher_scale = options.logit_scale / temperature, options.teacher_logit_scale / temperature
    scales = {
        "logit_scale": None if scale == 1.0 else scale,
        "softcap": options.softcap and options.softcap / temperature,
        "teacher_scale": None if teacher_scale == 1.0 else teacher_scale,
        "teacher_softcap": options.teacher_softcap and options.teacher_softcap / temperature,
    }
    is_changed = any(each is not None for each in (bias, teacher_bias, *scales.values()))
    shape = ChunkShape(
        kernel=ChunkKernel.DISTILLATION,
        width=width,
        itemsize=student.dtype.itemsize,
        written_itemsize=0 if gradient is None else gradient.dtype.itemsize,
        transformed=is_changed,
    )
    of_rows = {"p_target": target if options.hard_weight else None, "p_factors": factors}
    launch_shape(
        p,
        distillation_kernel,
        shape,
        reads={"p_student": student, "p_teacher": teacher, "p_bias": bias, "p_teacher_bias": teacher_bias, **of_rows},
        writes={"p_gradient": gradient, "p_losses": losses},
        sizes={
            "n_rows": rows,
            "s_student": student.strides[0],
            "s_losses": losses.strides[0],
            **scales,
            "temperature": None if temperature == 1.0 else temperature,
            "beta": options.beta,
            "soft_weight": options.soft_weight,
            "hard_weight": options.hard_weight,
        },
        flags={"DIVERGENCE": options.divergence},
    )
