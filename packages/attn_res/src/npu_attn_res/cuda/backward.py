"""The backward of one layer for CUDA: gradients of several sources of a token at once.

HELD: all blocks of a token stay in registers while those of the next token are loaded. Otherwise a tile has a few blocks,
and a token takes two sweeps, as in ascend/backward.py: the second sweep finds the blocks in the L2 cache. Where several
programs share a token: cooperating.py.
"""

import triton
import triton.language as tl

from ..both.tile import count_blocks
from ..formula import score_gradient, slope, source_gradient
from .tile import block_rows, load_row, store_gradients, widen_again, widen_tile


@triton.jit
def load_weights(p_score, p_rstd, b_lse, o_row, m_block):
    """s, alpha and r, [BLOCK_N], zero past the end."""
    b_score = tl.load(p_score + o_row, mask=m_block, other=0.0)
    b_rstd = tl.load(p_rstd + o_row, mask=m_block, other=0.0)
    return b_score, tl.where(m_block, tl.exp(b_score - b_lse), 0.0), b_rstd


@triton.jit(do_not_specialize=["n_slots", "n_tokens", "needed"])
def attn_res_backward_sources_kernel(
    # read: the gradient of h, the sources (see block_rows), the weights, the forward's statistics
    p_dh, p_v, p_table, p_query, p_norm, p_score, p_rstd, p_lse,
    # written: gradients of the sources (None: none is needed); fp32 partial sums of dg [programs, D] (None: not needed)
    # for both/weights.py, which makes dquery and drms_weight of them
    p_dv, p_dv_table, p_dg,
    # how many blocks count (None: n_slots); the prefix, a gradient that reaches it from elsewhere, its whole gradient
    p_count, p_prefix, p_dprefix, p_dprefix_sum,
    others, gradients,  # a list's blocks after the first, and their gradients, tuples; None: as block_rows says
    n_slots, n_tokens, s_block, s_token, s_dh, s_prefix, s_dprefix,
    needed: tl.int64,  # bit i: block i of a list needs a gradient
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    HELD: tl.constexpr,  # n_slots <= BLOCK_N
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Gradients of sources and prefix, and partial sums of dg; a tile has several sources of a token."""
    SUM_H: tl.constexpr = BLOCK_D <= 8192
    o_col = tl.arange(0, BLOCK_D)
    b_g = load_row(p_query, D, BLOCK_D) * load_row(p_norm, D, BLOCK_D)
    n_blocks = count_blocks(p_count, n_slots)
    b_dg = tl.zeros([BLOCK_D], tl.float32)
    for i_turn in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0), num_stages=STAGES if HELD else 1):
        i_token = i_turn.to(tl.int64)
        i_row = i_token * s_token
        b_dh = load_row(p_dh + i_token * s_dh, D, BLOCK_D)
        b_lse = tl.load(p_lse + i_token + tl.arange(0, 1))  # [1]: Triton loads no scalar ahead
        if p_prefix is not None:
            b_p = load_row(p_prefix + i_token * s_prefix, D, BLOCK_D)
            o_prefix = tl.cast(n_slots, tl.int64) * n_tokens + i_token + tl.arange(0, 1)
            b_p_score, b_p_rstd = tl.load(p_score + o_prefix), tl.load(p_rstd + o_prefix)
            b_p_alpha = tl.exp(b_p_score - b_lse)
            b_p_e = tl.sum(b_p * b_dh, axis=0)
            b_delta = b_p_alpha * b_p_e
            b_sum = b_p_alpha
        else:
            b_delta = tl.zeros([1], tl.float32)
            b_sum = tl.zeros([1], tl.float32)
        if HELD:
            o_block = tl.arange(0, BLOCK_N)
            m_block = o_block < n_blocks
            p_row, m_row = block_rows(p_v, others, p_table, i_row, s_block, 0, m_block, BLOCK_N, ALIGNED)
            b_v = tl.load(p_row[:, None] + o_col[None, :], mask=m_row[:, None] & (o_col < D)[None, :], other=0.0)
            o_statistic = o_block.to(tl.int64) * n_tokens + i_token
            b_score, b_alpha, b_rstd = load_weights(p_score, p_rstd, b_lse, o_statistic, m_block)
            b_e = tl.sum(widen_tile(b_v) * b_dh[None, :], axis=1)
            b_delta = (b_delta + tl.sum(b_alpha * b_e, axis=0)) / (b_sum + tl.sum(b_alpha, axis=0))
        else:
            # delta = <dh, h> of an h that is not rounded takes one sum over warps a token, and not one a tile. Where
            # registers are short, delta is the sum of alpha_i <dh, v_i>, which needs no row of h.
            if SUM_H:
                b_h = tl.zeros([BLOCK_D], tl.float32)
            for i_tile in tl.range(0, tl.cdiv(n_blocks, BLOCK_N), num_stages=STAGES):
                o_block = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                m_block = o_block < n_blocks
                p_row, m_row = block_rows(p_v, others, p_table, i_row, s_block, i_tile, m_block, BLOCK_N, ALIGNED)
                m_tile = m_row[:, None] & (o_col < D)[None, :]
                b_v = tl.load(p_row[:, None] + o_col[None, :], mask=m_tile, other=0.0, eviction_policy="evict_last")
                o_statistic = o_block.to(tl.int64) * n_tokens + i_token
                _, b_alpha, _ = load_weights(p_score, p_rstd, b_lse, o_statistic, m_block)
                b_sum += tl.sum(b_alpha, axis=0)
                if SUM_H:
                    b_h += tl.sum(widen_tile(b_v) * b_alpha[:, None], axis=0)
                else:
                    b_delta += tl.sum(b_alpha * tl.sum(widen_tile(b_v) * b_dh[None, :], axis=1), axis=0)
            if SUM_H:
                b_delta += tl.sum(b_h * b_dh, axis=0)
            b_delta = b_delta / b_sum
        for i_tile in tl.range(0, 1 if HELD else tl.cdiv(n_blocks, BLOCK_N), num_stages=1 if HELD else STAGES):
            if not HELD:
                o_block = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                m_block = o_block < n_blocks
                p_row, m_row = block_rows(p_v, others, p_table, i_row, s_block, i_tile, m_block, BLOCK_N, ALIGNED)
                m_tile = m_row[:, None] & (o_col < D)[None, :]
                b_v = tl.load(p_row[:, None] + o_col[None, :], mask=m_tile, other=0.0, eviction_policy="evict_first")
                o_statistic = o_block.to(tl.int64) * n_tokens + i_token
                b_score, b_alpha, b_rstd = load_weights(p_score, p_rstd, b_lse, o_statistic, m_block)
                b_e = tl.sum(widen_tile(b_v) * b_dh[None, :], axis=1)
            b_c = score_gradient(b_alpha, b_e, b_delta, b_rstd)  # [BLOCK_N]
            b_x = widen_again(b_v)
            if p_dg is not None:
                b_dg += tl.sum(b_x * b_c[:, None], axis=0)
            if p_dv is not None:
                b_slope = slope(b_score, b_rstd, D)
                b_dv = source_gradient(b_x, b_dh[None, :], b_g[None, :], b_alpha[:, None], b_c[:, None], b_slope[:, None])
                m_needed = m_block
                if gradients is not None:
                    m_needed &= ((needed >> (i_tile * BLOCK_N + tl.arange(0, BLOCK_N))) & 1) != 0
                store_gradients(
                    p_dv, gradients, p_dv_table, b_dv, i_token, n_tokens, i_tile, m_needed, o_col, o_col < D, D, BLOCK_N,
                    ALIGNED
                )  # fmt: skip
        if p_prefix is not None:
            b_p_c = score_gradient(b_p_alpha, b_p_e, b_delta, b_p_rstd)
            if p_dg is not None:
                b_dg += b_p * b_p_c
            if p_dprefix_sum is not None:
                b_dp = source_gradient(b_p, b_dh, b_g, b_p_alpha, b_p_c, slope(b_p_score, b_p_rstd, D))
                if p_dprefix is not None:
                    b_dp += load_row(p_dprefix + i_token * s_dprefix, D, BLOCK_D)
                tl.store(p_dprefix_sum + i_token * D + o_col, b_dp.to(p_dprefix_sum.dtype.element_ty), mask=o_col < D)
    if p_dg is not None:
        tl.store(p_dg + tl.program_id(0).to(tl.int64) * D + o_col, b_dg, mask=o_col < D)
