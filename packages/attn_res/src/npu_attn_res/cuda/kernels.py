"""Forward and backward of one layer for CUDA. A program has one token, and loads several of its sources at once.

In the forward a tile has BLOCK_N blocks by whole rows, in CHUNKS pieces of BLOCK_D columns: a row of 2560 is five pieces of
512, and not one of 4096 of which a third is padding. Several tiles are loaded at once.

In the backward, HELD: all blocks of a token stay in registers while those of the next token are loaded. Otherwise a tile has
a few blocks, and a token takes two sweeps, as in ascend/kernels.py: the second sweep finds the blocks in the L2 cache. Where
no program has registers for all sources of a token, several share it.

Sources are reached by a stride, through a table, or through arguments.
"""

import os

from npu_tiling.device import collect, publish, tl, triton

from ..formula import ALIGNMENT, NO_GRADIENT, count_blocks, exponentials, rms_inverse, score_gradient, slope, source_gradient
from . import tiling

_ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # which Triton's interpreter does not know
TURNS = tl.constexpr(tiling.TURNS)


@triton.jit
def add_pairs(a0, a1, b0, b1):
    """The sums of two numbers each, for `tl.reduce`."""
    return a0 + b0, a1 + b1


@triton.jit
def widen_tile(b_v):
    """fp32. From bf16 it takes one instruction an element; Triton's cast takes three for two elements."""
    if _ASSEMBLY and b_v.dtype == tl.bfloat16 and b_v.numel > 1:  # pairs
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [b_v], tl.float32, is_pure=True, pack=2
        )
    else:
        return b_v.to(tl.float32)


@triton.jit
def widen_again(b_v):
    """As `widen_tile`, by another instruction, for a tile's second use: the compiler would keep results of the same one."""
    if _ASSEMBLY and b_v.dtype == tl.bfloat16 and b_v.numel > 1:  # pairs
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;", "=r,=r,r", [b_v], tl.float32, is_pure=True, pack=2
        )
    else:
        return b_v.to(tl.float32)


@triton.jit
def load_row(p_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp32 [BLOCK_D], zero outside."""
    o_col = tl.arange(0, BLOCK_D)
    return tl.load(p_row + o_col, mask=o_col < D, other=0.0).to(tl.float32)


@triton.jit
def columns(I_CHUNK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The columns of a chunk of a row, and the mask of those inside the row."""
    o_col = I_CHUNK * BLOCK_D + tl.arange(0, BLOCK_D)
    return o_col, (o_col < D) | ((I_CHUNK + 1) * BLOCK_D <= D)


@triton.jit
def load_chunk(p_row, I_CHUNK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp32 [BLOCK_D], zero outside."""
    o_col, m_col = columns(I_CHUNK, D, BLOCK_D)
    return tl.load(p_row + o_col, mask=m_col, other=0.0).to(tl.float32)


@triton.jit
def store_chunk(p_row, b_chunk, I_CHUNK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    o_col, m_col = columns(I_CHUNK, D, BLOCK_D)
    tl.store(p_row + o_col, b_chunk, mask=m_col)


@triton.jit
def load_tiles(p_row, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr):
    """CHUNKS times [BLOCK_N, BLOCK_D], zero outside, of rows that begin at p_row [BLOCK_N]."""
    tiles = ()
    for i in tl.static_range(CHUNKS):
        o_col, m_col = columns(i, D, BLOCK_D)
        m_tile = m_row[:, None] & m_col[None, :]
        b_v = tl.load(p_row[:, None] + o_col[None, :], mask=m_tile, other=0.0)
        tiles = tiles + (b_v,)
    return tiles


@triton.jit
def block_rows(
    p_v,
    others,
    p_table,
    i_row,
    s_block,
    i_tile,
    m_block,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    PER_TILE: tl.constexpr = None,
):
    """Where a row of the blocks of a tile begins, and whether there is one, both [BLOCK_N].

    Args:
        p_v: the first block.
        others: pointers to the blocks that follow it, a tuple; None: they are reached from p_v.
        p_table: the distance from p_v to each, or NO_GRADIENT; None: block i is i * s_block away.
        i_row: from a block's begin to the row, in elements.
        m_block: which blocks there are.
        PER_TILE: how many blocks a tile has, at most BLOCK_N; None: BLOCK_N.
    """
    o_block = tl.arange(0, BLOCK_N)
    N_TILE: tl.constexpr = BLOCK_N if PER_TILE is None else PER_TILE
    if others is not None:
        p_row = p_v + o_block * 0
        for i in tl.static_range(len(others)):
            # The place in the tile is known when this is compiled, so that a row is chosen among those of its place alone.
            is_here = (o_block == (i + 1) % N_TILE) & (i_tile == (i + 1) // N_TILE)
            p_row = tl.where(is_here, others[i], p_row)
        return p_row + i_row, m_block
    elif p_table is None:
        return p_v + ((o_block + i_tile * N_TILE).to(tl.int64) * s_block + i_row), m_block
    else:
        o_offset = tl.load(p_table + i_tile * N_TILE + o_block, mask=m_block, other=NO_GRADIENT)
        m_block &= o_offset != NO_GRADIENT
        if ALIGNED:
            o_offset = tl.multiple_of(o_offset, ALIGNMENT)
        return p_v + (o_offset + i_row), m_block


@triton.jit
def store_gradients(
    p_dv, gradients, p_table, b_dv, i_token, n_tokens, i_tile, m_needed, o_col, m_col,
    D: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, PER_TILE: tl.constexpr = None
):  # fmt: skip
    """Stores the gradients of a tile's blocks, contiguous [n_tokens, D] each, at the columns o_col of a token's row.

    m_needed: which blocks need one. p_dv, gradients and p_table lead to them as `block_rows` says.
    """
    s_block = tl.cast(n_tokens, tl.int64) * D
    p_row, m_row = block_rows(p_dv, gradients, p_table, i_token * D, s_block, i_tile, m_needed, BLOCK_N, ALIGNED, PER_TILE)
    b_dv = b_dv.to(p_dv.dtype.element_ty)
    m_tile = m_row[:, None] & m_col[None, :]
    tl.store(p_row[:, None] + o_col[None, :], b_dv, mask=m_tile, eviction_policy="evict_first")


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


@triton.jit(do_not_specialize=["max_blocks", "n_tokens"])
def attn_res_forward_sources_kernel(
    # read: the sources (see block_rows), the weights of scores and of the RMSNorm of h (None: there is none)
    p_v, p_table, p_query, p_rms_weight, p_output_rms_weight,
    # written: h, its RMSNorm; fp32 s and r [sources, n_tokens] (None: no backward follows), lse, 1 / rms(h)
    p_h, p_y, p_score, p_rstd, p_lse, p_norm_rstd,
    # how many blocks count (None: max_blocks); the prefix, the layer's output, the new prefix, and the bank that takes that
    p_count, p_prefix, p_x, p_new_prefix, p_append,
    others,  # a list's blocks after the first, a tuple; None: there is no list, or it is in the table
    max_blocks, n_tokens, s_block, s_token, eps, norm_eps, s_prefix, s_x, s_new_prefix,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """h, its RMSNorm and the statistics, from one read of every source; a tile has several sources of a token."""
    CHUNKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    g = ()
    for i in tl.static_range(CHUNKS):
        g = g + (load_chunk(p_query, i, D, BLOCK_D) * load_chunk(p_rms_weight, i, D, BLOCK_D),)
    n_blocks = count_blocks(p_count, max_blocks)
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
                        m_col &= n_blocks < max_blocks
                    tl.store(p_end + o_col, b_o.to(p_end.dtype.element_ty), mask=m_col)
                b_square, b_dot = b_square + b_o * b_o, b_dot + b_o * g[i]
                o = o + (b_o,)
            b_square, b_dot = tl.reduce((b_square, b_dot), 0, add_pairs)
            b_prefix_rstd = rms_inverse(b_square, eps, D)
            b_max = b_dot * b_prefix_rstd
            b_sum = tl.full([], 1.0, tl.float32)
            if p_score is not None:
                i_row = tl.cast(max_blocks, tl.int64) * n_tokens + i_token
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
            b_stored = (o[i] * (1.0 / b_sum)).to(p_h.dtype.element_ty)
            store_chunk(p_h + i_token * D, b_stored, i, D, BLOCK_D)
            if p_output_rms_weight is not None:
                b_h = b_stored.to(tl.float32)
                b_square += b_h * b_h
                h = h + (b_h,)
        if p_lse is not None:
            tl.store(p_lse + i_token, b_max + tl.log(b_sum))
        if p_output_rms_weight is not None:
            b_norm_rstd = rms_inverse(tl.sum(b_square, axis=0), norm_eps, D)
            for i in tl.static_range(CHUNKS):
                b_y = h[i] * b_norm_rstd * load_chunk(p_output_rms_weight, i, D, BLOCK_D)
                store_chunk(p_y + i_token * D, b_y.to(p_y.dtype.element_ty), i, D, BLOCK_D)
            if p_norm_rstd is not None:
                tl.store(p_norm_rstd + i_token, b_norm_rstd)


@triton.jit
def load_weights(p_score, p_rstd, b_lse, o_row, m_block):
    """s, alpha and r, [BLOCK_N], zero past the end."""
    b_score = tl.load(p_score + o_row, mask=m_block, other=0.0)
    b_rstd = tl.load(p_rstd + o_row, mask=m_block, other=0.0)
    return b_score, tl.where(m_block, tl.exp(b_score - b_lse), 0.0), b_rstd


@triton.jit(do_not_specialize=["max_blocks", "n_tokens", "needed"])
def attn_res_backward_sources_kernel(
    # read: the gradient of h, the sources (see block_rows), the weights, the forward's statistics
    p_dh, p_v, p_table, p_query, p_rms_weight, p_score, p_rstd, p_lse,
    # written: gradients of the sources (None: none is needed); fp32 partial sums of dg [programs, D] (None: not needed)
    # for attn_res_add_partials_kernel, which makes dquery and drms_weight of them
    p_dv, p_dv_table, p_dg,
    # how many blocks count (None: max_blocks); the prefix, a gradient that reaches it from elsewhere, its whole gradient
    p_count, p_prefix, p_dprefix, p_dprefix_sum,
    others, gradients,  # a list's blocks after the first, and their gradients, tuples; None: as block_rows says
    max_blocks, n_tokens, s_block, s_token, s_dh, s_prefix, s_dprefix,
    needed: tl.int64,  # bit i: block i of a list needs a gradient
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    HELD: tl.constexpr,  # max_blocks <= BLOCK_N
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Gradients of sources and prefix, and partial sums of dg; a tile has several sources of a token."""
    SUM_H: tl.constexpr = BLOCK_D <= 8192
    o_col = tl.arange(0, BLOCK_D)
    b_g = load_row(p_query, D, BLOCK_D) * load_row(p_rms_weight, D, BLOCK_D)
    n_blocks = count_blocks(p_count, max_blocks)
    b_dg = tl.zeros([BLOCK_D], tl.float32)
    for i_turn in tl.range(tl.program_id(0), n_tokens, tl.num_programs(0), num_stages=STAGES if HELD else 1):
        i_token = i_turn.to(tl.int64)
        i_row = i_token * s_token
        b_dh = load_row(p_dh + i_token * s_dh, D, BLOCK_D)
        b_lse = tl.load(p_lse + i_token + tl.arange(0, 1))  # [1]: Triton loads no scalar ahead
        if p_prefix is not None:
            b_p = load_row(p_prefix + i_token * s_prefix, D, BLOCK_D)
            o_prefix = tl.cast(max_blocks, tl.int64) * n_tokens + i_token + tl.arange(0, 1)
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


# A backward whose programs share a token. Each has some columns of some sources of a token in registers, so that every
# source is read once. It publishes its parts of <dh, v_i> in words with a tag, the number of the token's turn, and waits for
# those of the others; meanwhile its next tokens are on the way. npu_tiling/device.py says why no program waits for one that
# cannot start. Every program adds all words in one order: equal calls on one kind of GPU give equal bits.


@triton.jit
def add_fours(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit(do_not_specialize=["max_blocks", "n_tokens", "needed"])
def attn_res_backward_shared_kernel(
    # as of attn_res_backward_sources_kernel; p_dg: fp32 [programs / SHARE * TILES, D]
    p_dh, p_v, p_table, p_query, p_rms_weight, p_score, p_rstd, p_lse, p_dv, p_dv_table, p_dg,
    p_count, p_prefix, p_dprefix, p_dprefix_sum,
    # int64, zeros before the launch: [programs / SHARE, TURNS, SHARE, BLOCK_N, or BLOCK_N + 1 with a prefix]
    p_words,
    others, gradients,
    max_blocks, n_tokens, s_block, s_token, s_dh, s_prefix, s_dprefix,
    needed: tl.int64,
    D: tl.constexpr,
    PER_TILE: tl.constexpr, TILES: tl.constexpr,  # max_blocks <= PER_TILE * TILES
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,  # a program's tile: BLOCK_N >= PER_TILE
    VECTOR: tl.constexpr,  # adjacent columns of a thread: warps divide columns; a thread has the same ones of every source
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two, >= SHARE
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Gradients of sources and prefix, and partial sums of dg, the gradient of query * rms_weight.

    SHARE programs have a token and exchange parts of the products <dh, v_i>.
    """
    PROGRAMS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D  # of a tile
    SHARE: tl.constexpr = PROGRAMS * TILES
    N_WORDS: tl.constexpr = BLOCK_N + (p_prefix is not None)
    n_groups = tl.num_programs(0) // SHARE
    i_group = tl.program_id(0) // SHARE
    i_part = tl.program_id(0) - i_group * SHARE
    i_tile = i_part // PROGRAMS if TILES > 1 else 0
    o_col = tl.max_contiguous((i_part - i_tile * PROGRAMS) * BLOCK_D + tl.arange(0, BLOCK_D), VECTOR)
    m_col = (o_col < D) | (D % BLOCK_D == 0)
    m_first = m_col & (i_tile == 0)  # the prefix comes with the first tile
    o_block = tl.arange(0, BLOCK_N)
    n_blocks = count_blocks(p_count, max_blocks)
    n_in_tile = tl.minimum(n_blocks - i_tile * PER_TILE, PER_TILE)
    m_block = o_block < n_in_tile
    bits = ((needed >> (i_tile * PER_TILE)) & ((1 << PER_TILE) - 1)).to(tl.int32)  # as `needed`, of the program's blocks
    # All programs' words, [PARTS * BLOCK_N]. In one dimension: in two, Triton gives loads and `collect` different layouts,
    # and waits in both.
    o_part = tl.arange(0, PARTS * BLOCK_N) // BLOCK_N
    o_in_tile = tl.arange(0, PARTS * BLOCK_N) % BLOCK_N
    o_all = o_part // PROGRAMS * PER_TILE + o_in_tile
    m_all = (o_part < SHARE) & (o_in_tile < PER_TILE) & (o_all < n_blocks)
    m_same_tile = o_part // PROGRAMS == i_tile
    m_first_part = o_part == i_tile * PROGRAMS
    o_word = tl.minimum(o_part, SHARE - 1) * N_WORDS + o_in_tile
    b_g = tl.load(p_query + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_g *= tl.load(p_rms_weight + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_dg = tl.zeros([BLOCK_D], tl.float32)
    p_words += tl.cast(i_group, tl.int64) * (TURNS * SHARE * N_WORDS)
    turn = 1
    for i_turn in tl.range(i_group, n_tokens, n_groups, num_stages=STAGES):
        i_token = i_turn.to(tl.int64)
        p_row, m_row = block_rows(
            p_v, others, p_table, i_token * s_token, s_block, i_tile, m_block, BLOCK_N, ALIGNED, PER_TILE
        )
        b_v = tl.load(p_row[:, None] + o_col[None, :], mask=m_row[:, None] & m_col[None, :], other=0.0)
        b_dh = tl.load(p_dh + i_token * s_dh + o_col, mask=m_col, other=0.0).to(tl.float32)
        b_lse = tl.load(p_lse + i_token + tl.arange(0, 1))  # [1]: as in attn_res_backward_sources_kernel
        o_statistic = o_all.to(tl.int64) * n_tokens + i_token
        b_score = tl.load(p_score + o_statistic, mask=m_all, other=0.0)  # these [PARTS * BLOCK_N]
        b_rstd = tl.load(p_rstd + o_statistic, mask=m_all, other=0.0)
        b_alpha = tl.where(m_all, tl.exp(b_score - b_lse), 0.0)
        p_part = p_words + (turn % TURNS) * (SHARE * N_WORDS)
        p_published = p_part + i_part * N_WORDS
        if p_prefix is not None:
            b_p = tl.load(p_prefix + i_token * s_prefix + o_col, mask=m_first, other=0.0).to(tl.float32)
            o_prefix = tl.cast(max_blocks, tl.int64) * n_tokens + i_token + tl.arange(0, 1)
            b_p_score, b_p_rstd = tl.load(p_score + o_prefix), tl.load(p_rstd + o_prefix)
            publish(p_published + BLOCK_N, tl.sum(b_p * b_dh, axis=0), turn)
        publish(p_published + o_block, tl.sum(widen_tile(b_v) * b_dh[None, :], axis=1), turn)
        b_part = tl.where(m_all, collect(p_part + o_word, turn), 0.0)
        # A reduction of their own for sums over all sources: as more rows of the next one they take registers of the blocks.
        b_delta, b_sum = tl.reduce((b_alpha * b_part, b_alpha), 0, add_pairs)
        b_e, b_alpha, b_rstd, b_slope = tl.reduce(
            (
                tl.reshape(tl.where(m_same_tile, b_part, 0.0), [PARTS, BLOCK_N]),
                tl.reshape(tl.where(m_first_part, b_alpha, 0.0), [PARTS, BLOCK_N]),
                tl.reshape(tl.where(m_first_part, b_rstd, 0.0), [PARTS, BLOCK_N]),
                tl.reshape(tl.where(m_first_part, slope(b_score, b_rstd, D), 0.0), [PARTS, BLOCK_N]),
            ),
            0,
            add_fours,
        )  # all [BLOCK_N]
        b_delta = tl.zeros([1], tl.float32) + b_delta
        b_sum *= 1.0 / PROGRAMS  # every program's words have each alpha
        if p_prefix is not None:
            o_program = tl.arange(0, PARTS)
            b_p_e = collect(p_part + tl.minimum(o_program, PROGRAMS - 1) * N_WORDS + BLOCK_N, turn)
            b_p_e = tl.sum(tl.where(o_program < PROGRAMS, b_p_e, 0.0), axis=0)
            b_p_alpha = tl.exp(b_p_score - b_lse)
            b_delta, b_sum = b_delta + b_p_alpha * b_p_e, b_sum + b_p_alpha
        b_delta = b_delta / b_sum  # as in attn_res_backward_sources_kernel: lse is rounded
        if p_prefix is not None:
            b_p_c = score_gradient(b_p_alpha, b_p_e, b_delta, b_p_rstd)
            if p_dg is not None:
                b_dg += b_p * b_p_c
            if p_dprefix_sum is not None:
                b_dp = source_gradient(b_p, b_dh, b_g, b_p_alpha, b_p_c, slope(b_p_score, b_p_rstd, D))
                if p_dprefix is not None:
                    b_dp += tl.load(p_dprefix + i_token * s_dprefix + o_col, mask=m_first, other=0.0).to(tl.float32)
                tl.store(p_dprefix_sum + i_token * D + o_col, b_dp.to(p_dprefix_sum.dtype.element_ty), mask=m_first)
        b_c = score_gradient(b_alpha, b_e, b_delta, b_rstd)  # [BLOCK_N]
        b_x = widen_again(b_v)
        if p_dg is not None:
            b_dg += tl.sum(b_x * b_c[:, None], axis=0)
        if p_dv is not None:
            b_dv = source_gradient(b_x, b_dh[None, :], b_g[None, :], b_alpha[:, None], b_c[:, None], b_slope[:, None])
            m_needed = m_block
            if gradients is not None:
                m_needed &= ((bits >> o_block) & 1) != 0
            store_gradients(
                p_dv, gradients, p_dv_table, b_dv, i_token, n_tokens, i_tile, m_needed, o_col, m_col, D, BLOCK_N, ALIGNED,
                PER_TILE
            )  # fmt: skip
        turn += 1
    if p_dg is not None:
        tl.store(p_dg + tl.cast(i_group * TILES + i_tile, tl.int64) * D + o_col, b_dg, mask=m_col)
