"""The backward of one layer for Ascend, of one row a tile, where h was rounded.

The first sweep over a token's blocks keeps every e_i = <dh, v_i>, up to SLOTS, so that the second sweep multiplies and adds
alone. A mask and a sum pick the numbers of a block from tiles of SLOTS numbers, those of the next block while the current
one is computed. Statistics are [tokens, sources]: one load brings those of a token.

The kernel loads the next rows while it computes. With HALVES it takes a row as two halves, one after the other: where whole
rows fill the chip, compilers for Ascend would put a product where the next row goes. Before the second sweep it loads the
next token's statistics with HALVES, and the next token's dh without: there is no room for both.
"""

import triton
import triton.language as tl

from ..both.tile import ALIGNMENT, block_at, count_blocks, fetch_rows, fetch_whole_rows, store_rows
from ..formula import expanded_gradient

SLOTS = tl.constexpr(64)
MIN_OFFSET = tl.constexpr(-(2**62))  # of a gradient from its base; NO_GRADIENT is less, also with a token's offset
NO_SCORE = tl.constexpr(-1e30)  # of a slot without a source: its weight is zero


@triton.jit
def fetch_piece(p_row, N: tl.constexpr, C: tl.constexpr):
    """[1, C >= N] in the dtype of the memory, zero outside."""
    return fetch_rows(p_row, 0, 1, N, 1, C, N == C)


@triton.jit
def store_piece(p_row, b_row, N: tl.constexpr, C: tl.constexpr):
    """Stores N columns of [1, C >= N], in the dtype of the memory."""
    store_rows(p_row, 0, b_row, 1, N, 1, C, N == C)


@triton.jit
def load_statistics(p_score, p_rstd, p_lse, i_token, n_rows, n_tokens):
    """The scores and 1 / rms of a token [SLOTS], and its log-sum [1]; nothing is read of a token behind the last."""
    n_there = tl.where(i_token < n_tokens, n_rows, 0)
    m_slot = tl.arange(0, SLOTS) < n_there
    o_slot = i_token * n_rows + tl.arange(0, SLOTS)
    b_score = tl.load(p_score + o_slot, mask=m_slot, other=NO_SCORE)
    b_rstd = tl.load(p_rstd + o_slot, mask=m_slot, other=0.0)
    b_lse = tl.load(p_lse + i_token + tl.arange(0, 1), mask=tl.arange(0, 1) < n_there, other=0.0)
    return b_score, b_rstd, b_lse


@triton.jit
def factors(b_score, b_rstd, b_lse, p_count, n_blocks, n_slots, D: tl.constexpr):
    """alpha, alpha r and coef = slope alpha r, [SLOTS] each: the last two times e - delta are c and slope c."""
    if p_count is not None:  # what lies between the blocks and the prefix was never written
        o_slot = tl.arange(0, SLOTS).to(tl.float32)
        m_other = (o_slot >= tl.cast(n_blocks, tl.float32)) & (o_slot < tl.cast(n_slots, tl.float32))
        b_score = tl.where(m_other, NO_SCORE, b_score)
        b_rstd = tl.where(m_other, 0.0, b_rstd)
    b_alpha = tl.exp(b_score - b_lse)
    b_alpha_rstd = b_alpha * b_rstd
    return b_alpha, b_alpha_rstd, b_alpha_rstd * b_score * b_rstd * (1.0 / D)


@triton.jit
def pick(b_alpha, b_c, b_slope_c, i_slot):
    """The numbers of one source, [1] each."""
    m_slot = tl.arange(0, SLOTS).to(tl.float32) == tl.cast(i_slot, tl.float32)
    b_alpha = tl.sum(tl.where(m_slot, b_alpha, 0.0)[None, :], axis=1)
    b_c = tl.sum(tl.where(m_slot, b_c, 0.0)[None, :], axis=1)
    b_slope_c = tl.sum(tl.where(m_slot, b_slope_c, 0.0)[None, :], axis=1)
    return b_alpha, b_c, b_slope_c


@triton.jit
def gradient_of_piece(b_v, b_dh, b_g, b_dg, b_alpha, b_c, b_slope_c, HAS_DG: tl.constexpr):
    """dv of a piece of a row, and dg with its part."""
    b_dv = expanded_gradient(b_v, b_slope_c, b_g, b_c, b_dh, b_alpha)
    if HAS_DG:
        b_dg += b_v * b_c[:, None]
    return b_dv, b_dg


@triton.jit
def prefix_gradient(
    p_prefix, p_dprefix, p_dprefix_sum, b_dh, b_g, b_dg, b_alpha, b_c, b_slope_c,
    HAS_DG: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of a piece of a prefix, and returns dg with its part."""
    b_p = fetch_piece(p_prefix, N, C).to(tl.float32)
    b_dp, b_dg = gradient_of_piece(b_p, b_dh, b_g, b_dg, b_alpha, b_c, b_slope_c, HAS_DG)
    if p_dprefix_sum is not None:
        if p_dprefix is not None:
            b_dp += fetch_piece(p_dprefix, N, C).to(tl.float32)
        store_piece(p_dprefix_sum, b_dp, N, C)
    return b_dg


@triton.jit
def gradient_offset(p_dv_table, i_block, i_token, n_tokens, D: tl.constexpr):
    """From the gradients' base to the row of a block's gradient; NO_GRADIENT or little more where there is none."""
    if p_dv_table is None:
        return (i_block.to(tl.int64) * n_tokens + i_token) * D
    else:
        return tl.load(p_dv_table + i_block) + i_token * D


@triton.jit(do_not_specialize=["n_slots", "n_tokens"])
def attn_res_backward_row_kernel(
    # as of attn_res_backward_kernel, without h; p_score and p_rstd are fp32 [n_tokens, sources]
    p_dh, p_v, p_table, p_query, p_norm, p_score, p_rstd, p_lse, p_dv, p_dv_table, p_dg,
    p_count, p_prefix, p_dprefix, p_dprefix_sum,
    n_slots, n_tokens, s_block, s_token, s_dh, s_prefix, s_dprefix,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HALVES: tl.constexpr,  # BLOCK_D >= D
):  # fmt: skip
    """Gradients and partial sums of dg, one row a tile, every <dh, v_i> kept."""
    # lint: allow short-transfer: halves are rows of more than 4 KB; whole rows would fill the chip
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    # Columns of a piece, those of the first one and those of the second one that are no padding.
    C: tl.constexpr = (BLOCK_D + 2 * ALIGNMENT - 1) // (2 * ALIGNMENT) * ALIGNMENT if HALVES else BLOCK_D
    N: tl.constexpr = C if HALVES else D
    REST: tl.constexpr = D - C
    HAS_DG: tl.constexpr = p_dg is not None
    n_rows = n_slots if p_prefix is None else n_slots + 1
    n_blocks = count_blocks(p_count, n_slots)
    b_g = fetch_piece(p_query, N, C).to(tl.float32) * fetch_piece(p_norm, N, C).to(tl.float32)  # [1, C]
    b_dg = tl.zeros([1, C], tl.float32)
    if HALVES:
        b_g_rest = fetch_piece(p_query + C, REST, C).to(tl.float32) * fetch_piece(p_norm + C, REST, C).to(tl.float32)
        b_dg_rest = tl.zeros([1, C], tl.float32)
    p_first = p_v if p_table is None else block_at(p_v, p_table, s_block, 0)
    o_slot = tl.arange(0, SLOTS).to(tl.float32)
    i_next = tl.program_id(0).to(tl.int64)
    if HALVES:
        b_score, b_rstd, b_lse = load_statistics(p_score, p_rstd, p_lse, i_next, n_rows, n_tokens)
    else:
        b_dh_next = fetch_whole_rows(p_dh + i_next * s_dh, s_dh, n_tokens - i_next, D, 1, C)
    for i_tile in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        i_token = i_tile.to(tl.int64)
        i_next = i_token + tl.num_programs(0)
        n_next = (n_tokens - i_next).to(tl.int32)
        p_block = p_first + i_token * s_token
        if p_prefix is None:
            b_v = fetch_piece(p_block, N, C).to(tl.float32)  # [1, C]
        else:  # there may be no block
            b_v = fetch_whole_rows(p_block, s_token, n_blocks, N, 1, C).to(tl.float32)
        p_dh_row = p_dh + i_token * s_dh
        if HALVES:
            b_dh = fetch_piece(p_dh_row, N, C).to(tl.float32)
            b_dh_rest = fetch_piece(p_dh_row + C, REST, C).to(tl.float32)
        else:
            b_dh = b_dh_next.to(tl.float32)
            b_score, b_rstd, b_lse = load_statistics(p_score, p_rstd, p_lse, i_token, n_rows, n_tokens)
        if HALVES:
            b_alphas, b_alpha_rstds, b_coefs = factors(b_score, b_rstd, b_lse, p_count, n_blocks, n_slots, D)
        # Computed zeros, as n_next < n_tokens always: compilers for Ascend keep a constant tile on chip, to copy it from.
        b_e = tl.full([SLOTS], tl.where(n_next < n_tokens, 0.0, 1.0), tl.float32)
        if p_prefix is not None:
            p_prefix_row = p_prefix + i_token * s_prefix
            b_dot = tl.sum(b_dh * fetch_piece(p_prefix_row, N, C).to(tl.float32), axis=1)
            if HALVES:
                b_dot += tl.sum(b_dh_rest * fetch_piece(p_prefix_row + C, REST, C).to(tl.float32), axis=1)
            b_e = tl.where(o_slot == tl.cast(n_slots, tl.float32), b_dot, b_e)
        for i_block in tl.range(0, n_blocks):
            i_after = tl.where(i_block + 1 == n_blocks, 0, i_block + 1)  # the second sweep starts over
            p_after = block_at(p_v, p_table, s_block, i_after) + i_token * s_token
            if HALVES:
                b_load = fetch_piece(p_block + C, REST, C)
                p_block = p_after
                b_dot = tl.sum(b_dh * b_v, axis=1)  # [1]
                b_rest = b_load.to(tl.float32)
                b_load = fetch_piece(p_after, N, C)
                b_dot += tl.sum(b_dh_rest * b_rest, axis=1)
            else:
                b_load = fetch_piece(p_after, N, C)
                b_dot = tl.sum(b_dh * b_v, axis=1)  # [1]
            b_v = b_load.to(tl.float32)
            b_e = tl.where(o_slot == i_block.to(tl.float32), b_dot, b_e)
        if not HALVES:
            b_alphas, b_alpha_rstds, b_coefs = factors(b_score, b_rstd, b_lse, p_count, n_blocks, n_slots, D)
        b_e_minus_delta = b_e - tl.sum((b_alphas * b_e)[None, :], axis=1) / tl.sum(b_alphas[None, :], axis=1)
        b_cs, b_slope_cs = b_e_minus_delta * b_alpha_rstds, b_e_minus_delta * b_coefs
        b_alpha, b_c, b_slope_c = pick(b_alphas, b_cs, b_slope_cs, 0)
        if HALVES:
            b_score, b_rstd, b_lse = load_statistics(p_score, p_rstd, p_lse, i_next, n_rows, n_tokens)
        else:
            b_dh_next = fetch_whole_rows(p_dh + i_next * s_dh, s_dh, n_next, D, 1, C)
        for i_block in tl.range(0, n_blocks):
            is_last = i_block + 1 == n_blocks
            n_after = tl.where(is_last, 0, 1)
            p_after = block_at(p_v, p_table, s_block, tl.where(is_last, 0, i_block + 1)) + i_token * s_token
            if HALVES:
                b_load = fetch_piece(p_block + C, REST, C)
                p_block = p_after
            else:
                b_load = fetch_whole_rows(p_after, s_token, n_after, N, 1, C)
            b_alpha_after, b_c_after, b_slope_c_after = pick(b_alphas, b_cs, b_slope_cs, i_block + 1)
            b_dv, b_dg = gradient_of_piece(b_v, b_dh, b_g, b_dg, b_alpha, b_c, b_slope_c, HAS_DG)
            if p_dv is not None:
                i_out = gradient_offset(p_dv_table, i_block, i_token, n_tokens, D)
                is_wanted = True if p_dv_table is None else i_out >= MIN_OFFSET
                if is_wanted:
                    store_piece(p_dv + i_out, b_dv, N, C)
            if HALVES:
                b_rest = b_load.to(tl.float32)
                b_load = fetch_whole_rows(p_after, s_token, n_after, N, 1, C)
                b_dv, b_dg_rest = gradient_of_piece(b_rest, b_dh_rest, b_g_rest, b_dg_rest, b_alpha, b_c, b_slope_c, HAS_DG)
                if p_dv is not None:
                    if is_wanted:
                        store_piece(p_dv + i_out + C, b_dv, REST, C)
            b_alpha, b_c, b_slope_c = b_alpha_after, b_c_after, b_slope_c_after
            b_v = b_load.to(tl.float32)
        if p_prefix is not None:
            b_alpha, b_c, b_slope_c = pick(b_alphas, b_cs, b_slope_cs, n_slots)
            p_added = None if p_dprefix is None else p_dprefix + i_token * s_dprefix
            p_out = None if p_dprefix_sum is None else p_dprefix_sum + i_token * D
            b_dg = prefix_gradient(p_prefix_row, p_added, p_out, b_dh, b_g, b_dg, b_alpha, b_c, b_slope_c, HAS_DG, N, C)
            if HALVES:
                p_added = None if p_added is None else p_added + C
                p_out = None if p_out is None else p_out + C
                b_dg_rest = prefix_gradient(
                    p_prefix_row + C, p_added, p_out, b_dh_rest, b_g_rest, b_dg_rest, b_alpha, b_c, b_slope_c,
                    HAS_DG, REST, C,
                )  # fmt: skip
    if HAS_DG:
        p_partial = p_dg + tl.program_id(0).to(tl.int64) * D
        store_piece(p_partial, b_dg, N, C)
        if HALVES:
            store_piece(p_partial + C, b_dg_rest, REST, C)
