"""Device code for logits that are kept until their gradient can be computed: statistics, and a copy of the logits.

The row maximum so far is subtracted from each logit that is kept: in a narrow dtype, likelier tokens are then rounded less.
"""

import triton
import triton.language as tl

from .statistics import store_statistics
from .tile import load_logits, load_tail, store_tile, tile_of_rows


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "first"])
def cross_entropy_keep_kernel(
    p_logits,  # [rows, N]
    p_kept,  # [rows, N], other memory
    p_target,  # int32 [rows], negative: none
    p_class_weight,  # [N]
    p_statistics,  # fp32 [7, rows], as in two_sweeps.py
    p_largest,  # fp32 [rows]: the row maximum subtracted from the logits that are kept
    n_rows,
    s_logits,
    s_kept,
    s_statistics,
    first,  # the column of the vocabulary that column 0 is
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,  # as in two_sweeps.py
    MERGE: tl.constexpr,  # with the statistics of earlier columns, that are there already
    SMOOTHED: tl.constexpr,
    ARGMAX: tl.constexpr,
):
    """Statistics of rows of logits, and a copy of the logits minus their row's maximum so far."""
    # lint: allow scalar-loop: one logit a row, the target's, comes from wherever it is
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it; bf16 tiles leave room for the next load
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; those not of whole 32 bytes are padded on chip
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M)
        b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1) - first  # [BLOCK_M]
        b_tail = load_tail(p_row, s_logits, n_left, None, None, None, N, BLOCK_M, BLOCK_N, TAIL_N)
        b_max, b_sum, b_z, m_here, b_safe = store_statistics(
            p_row, p_statistics, b_tail, b_column, i_row, m_row, s_logits, s_statistics, n_left, n_left, None,
            p_class_weight, first, None, None, N, BLOCK_M, BLOCK_N, MERGE, SMOOTHED, False, ARGMAX
        )  # fmt: skip
        tl.store(p_largest + i_row + o_row, b_max, mask=m_row)
        p_out = p_kept + i_row.to(tl.int64) * s_kept
        if TAIL_N > 0:
            if N_FULL > 0:
                b_tail = load_tail(p_row, s_logits, n_left, None, None, None, N, BLOCK_M, BLOCK_N, TAIL_N)
            store_tile(p_out, b_tail - b_max[:, None], N_FULL, s_kept, n_left, N - N_FULL, False)
        if N_FULL > 0:
            for i_block in tl.range(0, N_FULL, BLOCK_N):
                i_col = N_FULL - BLOCK_N - i_block
                b_tile = load_logits(p_row, i_col, s_logits, n_left, None, None, None, BLOCK_N, BLOCK_M, BLOCK_N)
                store_tile(p_out, b_tile - b_max[:, None], i_col, s_kept, n_left, BLOCK_N, False)
