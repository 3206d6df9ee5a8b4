"""Device code for CUDA, where many warps share a tile: one token, several of its blocks at once. Formulas: tile.py.

A tile has BLOCK_N blocks by whole rows of BLOCK_D >= D columns, and all its loads are in flight together. Where a token's
blocks fit in one tile (SINGLE_PASS), the backward reads them once and holds them in registers. Otherwise it sweeps over them
twice, as backward.py does, and finds them in the L2 cache the second time. Its tiles are [BLOCK_N, BLOCK_D] and its rows
[BLOCK_D], so it does not share the loads and stores of tile.py, whose tiles have rows of one block.
"""

import triton
import triton.language as tl

from .backward import NO_GRADIENT
from .tile import ALIGNMENT


@triton.jit
def load_row(p_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp32 [BLOCK_D], zero outside."""
    o_col = tl.arange(0, BLOCK_D)
    return tl.load(p_row + o_col, mask=o_col < D, other=0.0).to(tl.float32)


@triton.jit
def block_offsets(p_table, s_block, o_block, m_block, EXCEPT: tl.constexpr, ALIGNED: tl.constexpr):
    """64-bit [BLOCK_N]; EXCEPT for blocks past the end."""
    if p_table is None:
        return o_block.to(tl.int64) * s_block
    else:
        o_offset = tl.load(p_table + o_block, mask=m_block, other=EXCEPT)
        if ALIGNED:
            o_offset = tl.multiple_of(o_offset, ALIGNMENT)
        return o_offset


@triton.jit
def load_blocks(
    p_token,
    p_table,
    s_block,
    o_block,
    m_block,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
    KEEP: tl.constexpr,  # the cache's policy
):
    """The rows of one token in several blocks, [BLOCK_N, BLOCK_D] in their dtype, zero outside."""
    o_col = tl.arange(0, BLOCK_D)
    o_offset = block_offsets(p_table, s_block, o_block, m_block, 0, ALIGNED)
    m_tile = m_block[:, None] & (o_col < D)[None, :]
    return tl.load(p_token + o_offset[:, None] + o_col[None, :], mask=m_tile, other=0.0, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["n_blocks", "n_tokens", "n_slots"])
def attn_res_forward_sources_kernel(
    p_v,
    p_table,
    p_query,
    p_norm,
    p_weight,
    p_o,
    p_y,
    p_score,  # fp32 [n_blocks, n_tokens]
    p_rstd,
    p_lse,
    p_norm_rstd,
    p_count,  # these, and the numbers that go with them, as in attn_res_forward_kernel
    p_prefix,
    p_x,
    p_joined,
    p_append,
    n_blocks,
    n_tokens,
    s_block,
    s_token,
    eps,
    norm_eps,
    n_slots,
    s_prefix,
    s_x,
    s_joined,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    o_col = tl.arange(0, BLOCK_D)
    b_g = load_row(p_query, D, BLOCK_D) * load_row(p_norm, D, BLOCK_D)
    if p_count is not None:
        n_blocks = tl.load(p_count).to(tl.int32)
    for i_tile in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        i_token = i_tile.to(tl.int64)
        if p_prefix is None:
            b_max = tl.full([], float("-inf"), tl.float32)
            b_sum = tl.zeros([], tl.float32)
            b_o = tl.zeros([BLOCK_D], tl.float32)
        else:
            b_o = load_row(p_prefix + i_token * s_prefix, D, BLOCK_D)
            if p_x is not None:
                b_o += load_row(p_x + i_token * s_x, D, BLOCK_D)
                b_joined = b_o.to(p_joined.dtype.element_ty)
                tl.store(p_joined + i_token * s_joined + o_col, b_joined, mask=o_col < D)
                b_o = b_joined.to(tl.float32)
            if p_append is not None:
                p_end = p_append + tl.cast(n_blocks, tl.int64) * s_block + i_token * s_token
                m_end = o_col < D
                if p_count is not None:
                    m_end &= n_blocks < n_slots
                tl.store(p_end + o_col, b_o.to(p_end.dtype.element_ty), mask=m_end)
            b_prefix_rstd = tl.rsqrt(tl.sum(b_o * b_o, axis=0) * (1.0 / D) + eps)
            b_max = tl.sum(b_o * b_g, axis=0) * b_prefix_rstd
            b_sum = tl.full([], 1.0, tl.float32)
            if p_score is not None:
                i_row = tl.cast(n_slots, tl.int64) * n_tokens + i_token
                tl.store(p_score + i_row, b_max)
                tl.store(p_rstd + i_row, b_prefix_rstd)
        for i_first in tl.range(0, n_blocks, BLOCK_N, num_stages=STAGES):
            o_block = i_first + tl.arange(0, BLOCK_N)
            m_block = o_block < n_blocks
            b_v = load_blocks(p_v + i_token * s_token, p_table, s_block, o_block, m_block, D, BLOCK_D, ALIGNED, "")
            b_x = b_v.to(tl.float32)  # [BLOCK_N, BLOCK_D]
            b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) * (1.0 / D) + eps)  # [BLOCK_N]
            b_score = tl.sum(b_x * b_g[None, :], axis=1) * b_rstd
            if p_score is not None:
                o_row = o_block.to(tl.int64) * n_tokens + i_token
                tl.store(p_score + o_row, b_score, mask=m_block)
                tl.store(p_rstd + o_row, b_rstd, mask=m_block)
            b_score = tl.where(m_block, b_score, float("-inf"))
            b_next = tl.maximum(b_max, tl.max(b_score, axis=0))
            b_shrink, b_weight = tl.exp(b_max - b_next), tl.exp(b_score - b_next)
            b_o = b_o * b_shrink + tl.sum(b_x * b_weight[:, None], axis=0)
            b_sum = b_sum * b_shrink + tl.sum(b_weight, axis=0)
            b_max = b_next
        b_stored = (b_o * (1.0 / b_sum)).to(p_o.dtype.element_ty)
        tl.store(p_o + i_token * D + o_col, b_stored, mask=o_col < D)
        if p_lse is not None:
            tl.store(p_lse + i_token, b_max + tl.log(b_sum))
        if p_weight is not None:
            b_h = b_stored.to(tl.float32)
            b_norm_rstd = tl.rsqrt(tl.sum(b_h * b_h, axis=0) * (1.0 / D) + norm_eps)
            b_y = b_h * b_norm_rstd * load_row(p_weight, D, BLOCK_D)
            tl.store(p_y + i_token * D + o_col, b_y.to(p_y.dtype.element_ty), mask=o_col < D)
            if p_norm_rstd is not None:
                tl.store(p_norm_rstd + i_token, b_norm_rstd)


@triton.jit
def load_weights(p_score, b_lse, o_row, m_block):
    """s and alpha, [BLOCK_N], zero past the end."""
    b_score = tl.load(p_score + o_row, mask=m_block, other=0.0)
    return b_score, tl.where(m_block, tl.exp(b_score - b_lse), 0.0)


@triton.jit(do_not_specialize=["n_blocks", "n_tokens", "n_slots"])
def attn_res_backward_sources_kernel(
    p_dh,
    p_v,
    p_table,
    p_query,
    p_norm,
    p_score,
    p_rstd,
    p_lse,
    p_dv,
    p_dv_table,
    p_dg,
    p_count,  # these, and the numbers that go with them, as in attn_res_backward_kernel
    p_prefix,
    p_djoined,
    p_dprefix,
    n_blocks,
    n_tokens,
    s_block,
    s_token,
    s_dh,
    n_slots,
    s_prefix,
    s_djoined,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE_PASS: tl.constexpr,  # n_blocks <= BLOCK_N
    ALIGNED: tl.constexpr,
):
    o_col = tl.arange(0, BLOCK_D)
    b_g = load_row(p_query, D, BLOCK_D) * load_row(p_norm, D, BLOCK_D)
    if p_count is not None:
        n_blocks = tl.load(p_count).to(tl.int32)
    if p_dg is not None:
        b_dg = tl.zeros([BLOCK_D], tl.float32)
    for i_tile in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        i_token = i_tile.to(tl.int64)
        p_token = p_v + i_token * s_token
        if SINGLE_PASS:
            o_block = tl.arange(0, BLOCK_N)
            b_held = load_blocks(p_token, p_table, s_block, o_block, o_block < n_blocks, D, BLOCK_D, ALIGNED, "")
        b_dh = load_row(p_dh + i_token * s_dh, D, BLOCK_D)
        b_lse = tl.load(p_lse + i_token)
        if p_prefix is not None:
            b_p = load_row(p_prefix + i_token * s_prefix, D, BLOCK_D)
            i_row = tl.cast(n_slots, tl.int64) * n_tokens + i_token
            b_p_score, b_p_rstd = tl.load(p_score + i_row), tl.load(p_rstd + i_row)
            b_p_alpha = tl.exp(b_p_score - b_lse)
            b_p_e = tl.sum(b_p * b_dh, axis=0)
            b_delta = b_p_alpha * b_p_e
            if SINGLE_PASS:
                o_row = o_block.to(tl.int64) * n_tokens + i_token
                _, b_alpha = load_weights(p_score, b_lse, o_row, o_block < n_blocks)
                b_delta += tl.sum(b_alpha * tl.sum(b_held.to(tl.float32) * b_dh[None, :], axis=1), axis=0)
        if not SINGLE_PASS:
            b_products = tl.zeros([BLOCK_N], tl.float32)
            for i_first in tl.range(0, n_blocks, BLOCK_N, num_stages=STAGES):
                o_block = i_first + tl.arange(0, BLOCK_N)
                m_block = o_block < n_blocks
                b_v = load_blocks(p_token, p_table, s_block, o_block, m_block, D, BLOCK_D, ALIGNED, "evict_last")
                _, b_alpha = load_weights(p_score, b_lse, o_block.to(tl.int64) * n_tokens + i_token, m_block)
                b_products += b_alpha * tl.sum(b_v.to(tl.float32) * b_dh[None, :], axis=1)
            if p_prefix is None:
                b_delta = tl.sum(b_products, axis=0)
            else:
                b_delta += tl.sum(b_products, axis=0)
        for i_first in tl.range(0, n_blocks, BLOCK_N, num_stages=STAGES):
            o_block = i_first + tl.arange(0, BLOCK_N)
            m_block = o_block < n_blocks
            if SINGLE_PASS:
                b_x = b_held.to(tl.float32)
            else:
                b_v = load_blocks(p_token, p_table, s_block, o_block, m_block, D, BLOCK_D, ALIGNED, "evict_first")
                b_x = b_v.to(tl.float32)
            o_row = o_block.to(tl.int64) * n_tokens + i_token
            b_score, b_alpha = load_weights(p_score, b_lse, o_row, m_block)
            b_rstd = tl.load(p_rstd + o_row, mask=m_block, other=0.0)
            b_e = tl.sum(b_x * b_dh[None, :], axis=1)
            if SINGLE_PASS and p_prefix is None:
                b_delta = tl.sum(b_alpha * b_e, axis=0)
            b_c = b_alpha * (b_e - b_delta) * b_rstd  # ds r, [BLOCK_N]
            if p_dg is not None:
                b_dg += tl.sum(b_x * b_c[:, None], axis=0)
            if p_dv is not None:
                b_dv_coef = b_score * b_rstd * (1.0 / D)
                b_dv = b_dh[None, :] * b_alpha[:, None] + (b_g[None, :] - b_x * b_dv_coef[:, None]) * b_c[:, None]
                if p_dv_table is None:
                    o_offset = o_row * D
                    m_out = m_block
                else:
                    o_offset = block_offsets(p_dv_table, 0, o_block, m_block, NO_GRADIENT, ALIGNED)
                    m_out = m_block & (o_offset != NO_GRADIENT)
                    o_offset += i_token * D
                    if ALIGNED and D % ALIGNMENT == 0:
                        o_offset = tl.multiple_of(o_offset, ALIGNMENT)  # said again: a load that is pipelined loses it
                m_tile = m_out[:, None] & (o_col < D)[None, :]
                b_dv = b_dv.to(p_dv.dtype.element_ty)
                tl.store(p_dv + o_offset[:, None] + o_col[None, :], b_dv, mask=m_tile, eviction_policy="evict_first")
        if p_prefix is not None:
            b_p_c = b_p_alpha * (b_p_e - b_delta) * b_p_rstd
            if p_dg is not None:
                b_dg += b_p * b_p_c
            if p_dprefix is not None:
                b_dp = b_dh * b_p_alpha + (b_g - b_p * (b_p_score * b_p_rstd * (1.0 / D))) * b_p_c
                if p_djoined is not None:
                    b_dp += load_row(p_djoined + i_token * s_djoined, D, BLOCK_D)
                tl.store(p_dprefix + i_token * D + o_col, b_dp.to(p_dprefix.dtype.element_ty), mask=o_col < D)
    if p_dg is not None:
        tl.store(p_dg + tl.program_id(0).to(tl.int64) * D + o_col, b_dg, mask=o_col < D)
