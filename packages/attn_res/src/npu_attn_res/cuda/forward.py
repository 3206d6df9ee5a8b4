"""The forward of one layer for CUDA. A program has one token, and loads several of its sources at once.

A tile has BLOCK_N blocks by whole rows, in CHUNKS pieces of BLOCK_D columns: a row of 2560 is five pieces of 512, and not
one of 4096 of which a third is padding. Several tiles are loaded at once.
"""

import triton
import triton.language as tl

from ..both.tile import count_blocks
from ..formula import exponentials, rms_inverse
from .tile import add_pairs, block_rows, columns, load_chunk, load_tiles, store_chunk, widen_tile


@triton.jit
def add_tile(tiles, m_block, g, b_max, b_sum, o, eps, D: tl.constexpr, CHUNKS: tl.constexpr):
    """Adds a tile to the online softmax and to its weighted sum; returns the tile's scores and 1 / rms, too."""
    b_x = widen_tile(tiles[0])
    b_square, b_dot = b_x * b_x, b_x * g[0][None, :]
    widened = (b_x,)
    for i in tl.static_range(1, CHUNKS):
        b_x = widen_tile(tiles[i])
        b_square, b_dot = b_square + b_x * b_x, b_dot + b_x * g[i][None, :]
        widened = widened + (b_x,)
    b_square, b_dot = tl.reduce((b_square, b_dot), 1, add_pairs)  # both [BLOCK_N]; one exchange between warps
    b_rstd = rms_inverse(b_square, eps, D)
    b_score = b_dot * b_rstd
    b_seen = tl.where(m_block, b_score, float("-inf"))
    b_next = tl.maximum(b_max, tl.max(b_seen, axis=0))
    b_shrink, b_weight = exponentials(b_max, b_seen, b_next)
    sums = ()
    for i in tl.static_range(CHUNKS):
        sums = sums + (o[i] * b_shrink + tl.sum(widened[i] * b_weight[:, None], axis=0),)
    return b_score, b_rstd, b_next, b_sum * b_shrink + tl.sum(b_weight, axis=0), sums


@triton.jit(do_not_specialize=["n_slots", "n_tokens"])
def attn_res_forward_sources_kernel(
    # read: the sources (see block_rows), the weights of scores and of the RMSNorm of h (None: there is none)
    p_v, p_table, p_query, p_norm, p_weight,
    # written: h, its RMSNorm; fp32 s and r [sources, n_tokens] (None: no backward follows), lse, 1 / rms(h)
    p_o, p_y, p_score, p_rstd, p_lse, p_norm_rstd,
    # how many blocks count (None: n_slots); the prefix, the layer's output, the new prefix, and the bank that takes that
    p_count, p_prefix, p_x, p_new_prefix, p_append,
    others,  # a list's blocks after the first, a tuple; None: there is no list, or it is in the table
    n_slots, n_tokens, s_block, s_token, eps, norm_eps, s_prefix, s_x, s_new_prefix,
    D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr,  # BLOCK_D * CHUNKS >= D
    STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """h, its RMSNorm and the statistics, from one read of every source; a tile has several sources of a token."""
    g = ()
    for i in tl.static_range(CHUNKS):
        g = g + (load_chunk(p_query, i, D, BLOCK_D) * load_chunk(p_norm, i, D, BLOCK_D),)
    n_blocks = count_blocks(p_count, n_slots)
    for i_turn in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0)):
        i_token = i_turn.to(tl.int64)
        i_first = i_token * s_token
        o = ()
        if p_prefix is None:
            b_max = tl.full([], float("-inf"), tl.float32)
            b_sum = tl.zeros([], tl.float32)
            for _ in tl.static_range(CHUNKS):
                o = o + (tl.zeros([BLOCK_D], tl.float32),)
        else:
            b_square, b_dot = tl.zeros([BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
            for i in tl.static_range(CHUNKS):
                b_o = load_chunk(p_prefix + i_token * s_prefix, i, D, BLOCK_D)
                if p_x is not None:
                    b_o += load_chunk(p_x + i_token * s_x, i, D, BLOCK_D)
                    b_new_prefix = b_o.to(p_new_prefix.dtype.element_ty)
                    store_chunk(p_new_prefix + i_token * s_new_prefix, b_new_prefix, i, D, BLOCK_D)
                    b_o = b_new_prefix.to(tl.float32)
                if p_append is not None:
                    p_end = p_append + tl.cast(n_blocks, tl.int64) * s_block + i_token * s_token
                    o_col, m_col = columns(i, D, BLOCK_D)
                    if p_count is not None:
                        m_col &= n_blocks < n_slots
                    tl.store(p_end + o_col, b_o.to(p_end.dtype.element_ty), mask=m_col)
                b_square, b_dot = b_square + b_o * b_o, b_dot + b_o * g[i]
                o = o + (b_o,)
            b_square, b_dot = tl.reduce((b_square, b_dot), 0, add_pairs)
            b_prefix_rstd = rms_inverse(b_square, eps, D)
            b_max = b_dot * b_prefix_rstd
            b_sum = tl.full([], 1.0, tl.float32)
            if p_score is not None:
                i_row = tl.cast(n_slots, tl.int64) * n_tokens + i_token
                tl.store(p_score + i_row, b_max)
                tl.store(p_rstd + i_row, b_prefix_rstd)
        for i_tile in tl.range(0, tl.cdiv(n_blocks, BLOCK_N), num_stages=STAGES):
            o_block = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
            m_block = o_block < n_blocks
            p_row, m_row = block_rows(p_v, others, p_table, i_first, s_block, i_tile, m_block, BLOCK_N, ALIGNED)
            tiles = load_tiles(p_row, m_row, D, BLOCK_D, CHUNKS)
            b_score, b_rstd, b_max, b_sum, o = add_tile(tiles, m_block, g, b_max, b_sum, o, eps, D, CHUNKS)
            if p_score is not None:
                o_row = o_block.to(tl.int64) * n_tokens + i_token
                tl.store(p_score + o_row, b_score, mask=m_block)
                tl.store(p_rstd + o_row, b_rstd, mask=m_block)
        b_square = tl.zeros([BLOCK_D], tl.float32)
        h = ()
        for i in tl.static_range(CHUNKS):
            b_stored = (o[i] * (1.0 / b_sum)).to(p_o.dtype.element_ty)
            store_chunk(p_o + i_token * D, b_stored, i, D, BLOCK_D)
            if p_weight is not None:
                b_h = b_stored.to(tl.float32)
                b_square += b_h * b_h
                h = h + (b_h,)
        if p_lse is not None:
            tl.store(p_lse + i_token, b_max + tl.log(b_sum))
        if p_weight is not None:
            b_norm_rstd = rms_inverse(tl.sum(b_square, axis=0), norm_eps, D)
            for i in tl.static_range(CHUNKS):
                b_y = h[i] * b_norm_rstd * load_chunk(p_weight, i, D, BLOCK_D)
                store_chunk(p_y + i_token * D, b_y.to(p_y.dtype.element_ty), i, D, BLOCK_D)
            if p_norm_rstd is not None:
                tl.store(p_norm_rstd + i_token, b_norm_rstd)
