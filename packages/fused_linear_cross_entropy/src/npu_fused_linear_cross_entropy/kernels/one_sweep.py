"""Kernels of the cross entropy in one sweep. Formulas: exponentials.py."""

import triton
import triton.language as tl

from .exponentials import exponentials_of, place, put_targets_right, rescale, sweep, target_logit
from .factors import loss_factors
from .statistics import LOWEST
from .tile import load_raw, store_tile, transform_tile


@triton.jit
def store_statistics(p_statistics, s_statistics, i_row, n_left, b_reference, b_sum, b_z, BLOCK_M: tl.constexpr):
    """Stores three numbers of each row, in one transfer."""
    o_kind = tl.arange(0, 4)[:, None]
    o_row = tl.arange(0, BLOCK_M)[None, :]
    b_kind = o_kind.to(tl.float32)
    b_all = tl.where(b_kind == 0.0, b_reference[None, :], tl.where(b_kind == 1.0, b_sum[None, :], b_z[None, :]))
    tl.store(p_statistics + i_row + o_kind * s_statistics + o_row, b_all, mask=(o_kind < 3) & (o_row < n_left))


@triton.jit
def finish(
    p_exponentials, p_class_weight, p_factors, p_v, i_row, n_left, b_here, b_safe, b_z, b_reference, b_sum, s_exponentials,
    logit_scale, z_scale, N: tl.constexpr, BLOCK_M: tl.constexpr, BARRIER: tl.constexpr, Z_LOSS: tl.constexpr,
    TOKEN_SCALING: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """Stores what follows from the sums of rows: their targets' elements and their factors v."""
    o_row = tl.arange(0, BLOCK_M)
    p_out = p_exponentials + tl.cast(i_row, tl.int64) * s_exponentials
    m_here = b_here > 0.0
    b_lse = b_reference + tl.log(b_sum)
    b_a, b_b, _ = loss_factors(
        p_factors, p_class_weight, b_lse, b_z, m_here, b_safe, 0.0, z_scale, N, False, Z_LOSS, TOKEN_SCALING
    )  # fmt: skip
    b_v = put_targets_right(
        p_out, b_z, b_reference, b_lse, b_a, b_b, m_here, b_safe, n_left, s_exponentials, logit_scale, BLOCK_M, SCALED,
        BARRIER
    )  # fmt: skip
    tl.store(p_v + i_row + o_row, b_v, mask=o_row < n_left)


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "first"])
def cross_entropy_one_sweep_kernel(
    p_logits,  # [rows, N], all columns
    p_exponentials,  # [rows, N], over the logits' memory
    p_target,  # int32 [rows], negative: none
    p_bias,  # [N]
    p_class_weight,  # [N]
    p_factors,  # fp32: of the loss, of the z-loss, the sum of the class weights
    p_statistics,  # fp32 [6, rows]: k, sum of exp(z - k), the target's z
    p_v,  # fp32 [rows]: v E is the gradient of the raw logits
    n_rows,
    s_logits,
    s_exponentials,
    s_statistics,
    first,  # the column of the vocabulary that column 0 is
    logit_scale,
    z_scale,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,  # as in chunk.py
    TILES: tl.constexpr,  # at least the blocks of a row
    PADDED: tl.constexpr,  # the logits' memory has whole tiles of rows
    BARRIER: tl.constexpr,
    Z_LOSS: tl.constexpr,
    TOKEN_SCALING: tl.constexpr,
    SCALED: tl.constexpr,
):
    # time: rare: that a tile rises above the first one's maximum by e^30
    # lint: allow scalar-loop: one logit a row, the target's, comes from wherever it is
    # lint: allow single-buffer: CANN 9.0 gives the loop over two rows that stores the targets' elements one on an Ascend950
    # lint: allow scalar-reduction: once a row, whether its reference was raised
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; what is no multiple of 32 bytes is padded on chip
    # Rows that are one tile are finished while the next ones are loaded: what follows from their sums waits for numbers.
    # Before the first rows, those themselves are finished, as if they had no targets: no transfer is of no rows.
    LATE: tl.constexpr = N < BLOCK_N and not BARRIER
    o_row = tl.arange(0, BLOCK_M)
    i_late = tl.program_id(0) * BLOCK_M
    n_late = n_rows - i_late
    b_late_here, b_late_z = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    b_late_safe = tl.zeros([BLOCK_M], tl.int32)
    b_late_reference, b_late_sum = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], 1.0, tl.float32)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        n_left = n_rows - i_row
        p_row = p_logits + i_row.to(tl.int64) * s_logits
        p_out = p_exponentials + i_row.to(tl.int64) * s_exponentials
        if LATE:
            b_raw = load_raw(p_row, 0, s_logits, n_left, N, BLOCK_M, N, True, PADDED)
            finish(
                p_exponentials, p_class_weight, p_factors, p_v, i_late, n_late, b_late_here, b_late_safe, b_late_z,
                b_late_reference, b_late_sum, s_exponentials, logit_scale, z_scale, N, BLOCK_M, BARRIER, Z_LOSS,
                TOKEN_SCALING, SCALED
            )  # fmt: skip
        b_column = tl.load(p_target + i_row + tl.minimum(o_row, n_left - 1)) - first  # [BLOCK_M]
        m_here, b_safe = place(b_column, N)
        b_here = tl.where(m_here, 1.0, 0.0)
        b_z = target_logit(p_row, m_here, b_safe, s_logits, n_left, p_bias, logit_scale, BLOCK_M, SCALED)
        if BARRIER:
            tl.debug_barrier()
        b_reference = tl.full([BLOCK_M], LOWEST, tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        if LATE:
            b_tile = transform_tile(b_raw, 0, p_bias, logit_scale, 1.0, N, N, True, SCALED, False)
            b_e, b_reference, b_sum = exponentials_of(b_tile, b_reference, b_sum, 0, N, N, True)
            store_statistics(p_statistics, s_statistics, i_row, n_left, b_reference, b_sum, b_z, BLOCK_M)
            store_tile(p_out, b_e, 0, s_exponentials, n_left, N, BLOCK_M, N, True, BARRIER)
            i_late, n_late = i_row, n_left
            b_late_here, b_late_safe, b_late_z = b_here, b_safe, b_z
            b_late_reference, b_late_sum = b_reference, b_sum
        else:
            b_reference, b_sum = sweep(
                p_row, p_out, b_reference, b_sum, s_logits, s_exponentials, n_left, p_bias, logit_scale, N, BLOCK_M,
                BLOCK_N, TAIL_N, TILES, PADDED, SCALED, BARRIER
            )  # fmt: skip
            store_statistics(p_statistics, s_statistics, i_row, n_left, b_reference, b_sum, b_z, BLOCK_M)
            finish(
                p_exponentials, p_class_weight, p_factors, p_v, i_row, n_left, b_here, b_safe, b_z, b_reference, b_sum,
                s_exponentials, logit_scale, z_scale, N, BLOCK_M, BARRIER, Z_LOSS, TOKEN_SCALING, SCALED
            )  # fmt: skip
    if LATE:
        finish(
            p_exponentials, p_class_weight, p_factors, p_v, i_late, n_late, b_late_here, b_late_safe, b_late_z,
            b_late_reference, b_late_sum, s_exponentials, logit_scale, z_scale, N, BLOCK_M, BARRIER, Z_LOSS,
            TOKEN_SCALING, SCALED
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "first"])
def cross_entropy_exponentials_kernel(
    p_logits,  # [rows, N], some columns
    p_exponentials,  # [rows, N], over the logits' memory or elsewhere
    p_target,
    p_bias,
    p_statistics,  # as above
    p_reference,  # fp32 [rows]: k of these columns
    n_rows,
    s_logits,
    s_exponentials,
    s_statistics,
    first,
    logit_scale,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    BARRIER: tl.constexpr,
    MERGE: tl.constexpr,  # with the statistics of earlier columns, that are there already
    SCALED: tl.constexpr,
):
    """Exponentials and statistics of columns whose rows' sums are known later."""
    # time: rare: that a tile rises above the first one's maximum by e^30
    # lint: allow scalar-loop: one logit a row, the target's, comes from wherever it is
    # lint: allow scalar-reduction: once a row, whether its reference was raised
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; what is no multiple of 32 bytes is padded on chip
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        n_left = n_rows - i_row
        m_row = o_row < n_left
        p_row = p_logits + i_row.to(tl.int64) * s_logits
        p_out = p_exponentials + i_row.to(tl.int64) * s_exponentials
        b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1) - first  # [BLOCK_M]
        m_here, b_safe = place(b_column, N)
        b_z = target_logit(p_row, m_here, b_safe, s_logits, n_left, p_bias, logit_scale, BLOCK_M, SCALED)
        p_row_statistics = p_statistics + i_row + o_row
        if MERGE:
            b_reference = tl.load(p_row_statistics, mask=m_row, other=0.0)
            b_sum = tl.load(p_row_statistics + s_statistics, mask=m_row, other=0.0)
            b_z += tl.load(p_row_statistics + 2 * s_statistics, mask=m_row, other=0.0)
        else:
            b_reference = tl.full([BLOCK_M], LOWEST, tl.float32)
            b_sum = tl.zeros([BLOCK_M], tl.float32)
        if BARRIER:
            tl.debug_barrier()
        b_reference, b_sum = sweep(
            p_row, p_out, b_reference, b_sum, s_logits, s_exponentials, n_left, p_bias, logit_scale, N, BLOCK_M, BLOCK_N,
            TAIL_N, TILES, PADDED, SCALED, BARRIER
        )  # fmt: skip
        tl.store(p_row_statistics, b_reference, mask=m_row)
        tl.store(p_row_statistics + s_statistics, b_sum, mask=m_row)
        tl.store(p_row_statistics + 2 * s_statistics, b_z, mask=m_row)
        tl.store(p_reference + i_row + o_row, b_reference, mask=m_row)


@triton.jit(do_not_specialize=["n_rows", "s_coefficients", "first"])
def cross_entropy_settle_kernel(
    p_exponentials,  # [rows, N]
    p_target,  # int32 [rows], negative: none
    p_target_logit,  # fp32 [rows]: z of the targets
    p_reference,  # fp32 [rows]: k of these exponentials
    p_last,  # fp32 [rows]: the k that all are to have
    p_coefficients,  # fp32 [5, rows]: L, a, b and more
    p_v,  # fp32 [rows], as above
    n_rows,
    s_exponentials,
    s_coefficients,
    first,
    logit_scale,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    BARRIER: tl.constexpr,
    FIRST: tl.constexpr,  # of chunks of columns: others change v of rows whose target they have
    SCALED: tl.constexpr,
):
    """When the rows' sums are known: puts the targets' elements right and stores the rows' factors."""
    # time: rare: that later columns rise above the first ones by e^30
    # lint: allow scalar-loop: one element a row, the target's, is wherever it is
    # lint: allow single-buffer: compilers for an Ascend950 give the loop that stores the targets' elements one
    # lint: allow scalar-reduction: once a tile of rows, whether their reference was raised
    # lint: allow short-transfer: numbers of rows; exponentials only where a reference was raised
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; what is no multiple of 32 bytes is padded on chip
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    EXACT_N: tl.constexpr = N_FULL + TAIL_N == N
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        n_left = n_rows - i_row
        m_row = o_row < n_left
        p_out = p_exponentials + i_row.to(tl.int64) * s_exponentials
        b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1) - first  # [BLOCK_M]
        m_here, b_safe = place(b_column, N)
        b_z = tl.load(p_target_logit + i_row + o_row, mask=m_row, other=0.0)
        b_before = tl.load(p_reference + i_row + o_row, mask=m_row, other=0.0)
        b_reference = tl.load(p_last + i_row + o_row, mask=m_row, other=0.0)
        p_in = p_coefficients + i_row + o_row
        b_lse = tl.load(p_in, mask=m_row, other=0.0)
        b_a = tl.load(p_in + s_coefficients, mask=m_row, other=0.0)
        b_b = tl.load(p_in + 2 * s_coefficients, mask=m_row, other=0.0)
        if tl.max(tl.where(b_reference > b_before, 1.0, 0.0), axis=0) > 0:
            b_factor = tl.exp(b_before - b_reference)
            if TAIL_N > 0:
                rescale(p_out, b_factor, N_FULL, s_exponentials, n_left, N, BLOCK_M, TAIL_N, EXACT_N, BARRIER)
            if N_FULL > 0:
                for i_col in tl.range(0, N_FULL, BLOCK_N):
                    rescale(p_out, b_factor, i_col, s_exponentials, n_left, N, BLOCK_M, BLOCK_N, True, BARRIER)
        b_v = put_targets_right(
            p_out, b_z, b_reference, b_lse, b_a, b_b, m_here, b_safe, n_left, s_exponentials, logit_scale, BLOCK_M,
            SCALED, BARRIER
        )  # fmt: skip
        if not FIRST:
            b_v = tl.where(m_here, b_v, tl.load(p_v + i_row + o_row, mask=m_row, other=0.0))
        tl.store(p_v + i_row + o_row, b_v, mask=m_row)
