"""The backward of one layer for Ascend, in tiles of rows. Two sweeps over a token's sources: delta, then the gradients.

e_i - delta cancels when the softmax is peaked, so delta must be accurate in fp32. Computed from an h that was rounded to
bf16 it would be off by about 2^-9 |dh| |h|, which dv_i multiplies by |g|. So a first sweep over a token's blocks sums delta
in fp32, and a second sweep, which finds the blocks in the cache (L2), computes the gradients. The forward keeps
scores, rstd and lse. Where h was not rounded (fp32), delta is <dh, h> and there is one sweep.

lse is rounded: where scores are in the hundreds, the weights exp(s - lse) sum to 1 + 1e-5. As a factor of all alpha_i that
is as small as the scores' own rounding. As a factor of delta alone it would be left over where e_i - delta cancels. So
delta is divided by the sum of its weights.

The first sweep over single rows loads the next block at the top of the loop, computes with the current one, and casts the
next one at the end; 4096 columns with a prefix are predicted to take 15 % more without it. The second sweep keeps more on
chip and gains nothing by it. The order of the reductions and the expression for dv decide where compilers for Ascend wait:
change neither without looking at timings.
"""

import triton
import triton.language as tl

from ..both.tile import (
    block_at,
    count_blocks,
    fetch_whole_rows,
    load_query,
    load_rows,
    load_statistic,
    store_gradient,
    store_partial_sum,
    store_rows,
)
from ..formula import expanded_gradient, score_gradient, slope


@triton.jit(do_not_specialize=["n_slots", "n_tokens"])
def attn_res_backward_kernel(
    # read: the gradient of h, h where it was not rounded (None: it was), the sources, their table, weights, statistics
    p_dh, p_h, p_v, p_table, p_query, p_norm, p_score, p_rstd, p_lse,
    # written: gradients of the sources (None: none is needed); fp32 partial sums of dg [programs, D] (None: not needed)
    # for both/weights.py, which makes dquery and drms_weight of them
    p_dv, p_dv_table, p_dg,
    # the number of blocks (None: n_slots); the prefix, a gradient that reaches it from elsewhere, its whole gradient
    p_count, p_prefix, p_dprefix, p_dprefix_sum,
    n_slots, n_tokens, s_block, s_token, s_dh, s_prefix, s_dprefix,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D >= D
):  # fmt: skip
    """Gradients of sources and prefix, and partial sums of dg; a tile has rows of one source, a token one or two sweeps."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    EXACT: tl.constexpr = BLOCK_D == D
    PREFETCH: tl.constexpr = p_h is None and BLOCK_M == 1  # in the first sweep
    n_blocks = count_blocks(p_count, n_slots)
    b_g = load_query(p_query, p_norm, D, D, 1, 1, BLOCK_D)  # [1, BLOCK_D]
    if p_dg is not None:
        b_dg = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0)):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        if PREFETCH:
            p_block = block_at(p_v, p_table, s_block, 0) + i_token * s_token
            b_v = load_rows(p_block, s_token, n_left, D, BLOCK_M, BLOCK_D, EXACT)  # [BLOCK_M, BLOCK_D]
        b_dh = load_rows(p_dh + i_token * s_dh, s_dh, n_left, D, BLOCK_M, BLOCK_D, EXACT)  # [BLOCK_M, BLOCK_D]
        b_lse = load_statistic(p_lse + i_token, n_left, BLOCK_M)  # [BLOCK_M]
        if p_prefix is not None:
            b_p = load_rows(p_prefix + i_token * s_prefix, s_prefix, n_left, D, BLOCK_M, BLOCK_D, EXACT)
            i_row = tl.cast(n_slots, tl.int64) * n_tokens + i_token
            b_p_score = load_statistic(p_score + i_row, n_left, BLOCK_M)
            b_p_rstd = load_statistic(p_rstd + i_row, n_left, BLOCK_M)
            b_p_alpha = tl.exp(b_p_score - b_lse)
            b_p_e = tl.sum(b_dh * b_p, axis=1)  # [BLOCK_M]
        if p_h is not None:
            b_h = load_rows(p_h + i_token * D, D, n_left, D, BLOCK_M, BLOCK_D, EXACT)
            b_delta = tl.sum(b_dh * b_h, axis=1)  # [BLOCK_M]
        else:
            if p_prefix is None:
                b_delta = tl.zeros([BLOCK_M], tl.float32)
                b_sum = tl.zeros([BLOCK_M], tl.float32)
            else:
                b_delta = b_p_alpha * b_p_e
                b_sum = b_p_alpha
            for i_block in tl.range(0, n_blocks):
                i_row = i_block.to(tl.int64) * n_tokens + i_token
                b_score = load_statistic(p_score + i_row, n_left, BLOCK_M)
                if PREFETCH:
                    is_last = i_block + 1 == n_blocks
                    p_block = block_at(p_v, p_table, s_block, tl.where(is_last, 0, i_block + 1)) + i_token * s_token
                    b_next = fetch_whole_rows(p_block, s_token, tl.where(is_last, 0, n_left), D, BLOCK_M, BLOCK_D)
                else:
                    p_block = block_at(p_v, p_table, s_block, i_block) + i_token * s_token
                    b_v = load_rows(p_block, s_token, n_left, D, BLOCK_M, BLOCK_D, EXACT)
                b_alpha = tl.exp(b_score - b_lse)
                b_e = tl.sum(b_dh * b_v, axis=1)
                b_sum += b_alpha
                b_delta += b_alpha * b_e
                if PREFETCH:
                    b_v = b_next.to(tl.float32)
            b_delta = b_delta / b_sum
        for i_block in tl.range(0, n_blocks):
            i_row = i_block.to(tl.int64) * n_tokens + i_token
            p_block = block_at(p_v, p_table, s_block, i_block) + i_token * s_token
            b_v = load_rows(p_block, s_token, n_left, D, BLOCK_M, BLOCK_D, EXACT)
            b_score = load_statistic(p_score + i_row, n_left, BLOCK_M)
            b_rstd = load_statistic(p_rstd + i_row, n_left, BLOCK_M)
            b_e = tl.sum(b_dh * b_v, axis=1)  # [BLOCK_M]
            b_alpha = tl.exp(b_score - b_lse)
            b_c = score_gradient(b_alpha, b_e, b_delta, b_rstd)  # [BLOCK_M]
            if p_dg is not None:
                b_dg += b_v * b_c[:, None]
            if p_dv is not None:
                b_dv = expanded_gradient(b_v, slope(b_score, b_rstd, D) * b_c, b_dh, b_alpha, b_g, b_c)
                store_gradient(p_dv, p_dv_table, b_dv, i_block, i_row, i_token, 0, n_left, D, BLOCK_M, BLOCK_D, EXACT)
        if p_prefix is not None:
            b_p = load_rows(p_prefix + i_token * s_prefix, s_prefix, n_left, D, BLOCK_M, BLOCK_D, EXACT)
            b_p_c = score_gradient(b_p_alpha, b_p_e, b_delta, b_p_rstd)
            if p_dg is not None:
                b_dg += b_p * b_p_c[:, None]
            if p_dprefix_sum is not None:
                b_dp = expanded_gradient(b_p, slope(b_p_score, b_p_rstd, D) * b_p_c, b_dh, b_p_alpha, b_g, b_p_c)
                if p_dprefix is not None:
                    b_dp += load_rows(p_dprefix + i_token * s_dprefix, s_dprefix, n_left, D, BLOCK_M, BLOCK_D, EXACT)
                store_rows(p_dprefix_sum + i_token * D, D, b_dp, n_left, D, BLOCK_M, BLOCK_D, EXACT)
    if p_dg is not None:
        store_partial_sum(p_dg, b_dg, D, BLOCK_D)
