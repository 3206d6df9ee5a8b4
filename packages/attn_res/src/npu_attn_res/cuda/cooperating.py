"""The backward of one layer for CUDA where no program has registers for all sources of a token: programs share the token.

Each has some columns of some sources of a token in registers, so that every source is read once. It publishes its parts of
<dh, v_i> in words with a tag, the number of the token's turn, and waits for those of the others; meanwhile its next tokens
are on the way. npu_tiling's device/exchange.py says why no program waits for one that cannot start. Every program adds all
words in one order: equal calls on one kind of GPU give equal bits.
"""

import triton
import triton.language as tl
from npu_tiling.device.exchange import collect, publish

from ..both.tile import count_blocks
from ..formula import score_gradient, slope, source_gradient
from .tile import add_pairs, block_rows, store_gradients, widen_again, widen_tile

# Two slots suffice: a program publishes token t + 1 only after it has read token t from all, so that nobody still reads t
# when t + 2 overwrites it.
TURNS = tl.constexpr(2)


@triton.jit
def add_fours(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit(do_not_specialize=["n_slots", "n_tokens", "needed"])
def attn_res_backward_shared_kernel(
    # as of attn_res_backward_sources_kernel; p_dg: fp32 [programs / SHARE * TILES, D]
    p_dh, p_v, p_table, p_query, p_norm, p_score, p_rstd, p_lse, p_dv, p_dv_table, p_dg,
    p_count, p_prefix, p_dprefix, p_dprefix_sum,
    # int64, zeros before the launch: [programs / SHARE, TURNS, SHARE, BLOCK_N, or BLOCK_N + 1 with a prefix]
    p_words,
    others, gradients,
    n_slots, n_tokens, s_block, s_token, s_dh, s_prefix, s_dprefix,
    needed: tl.int64,
    D: tl.constexpr,
    PER_TILE: tl.constexpr, TILES: tl.constexpr,  # n_slots <= PER_TILE * TILES
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,  # a program's tile: BLOCK_N >= PER_TILE, SHARE * BLOCK_D >= D * TILES
    VECTOR: tl.constexpr,  # adjacent columns of a thread: warps divide columns; a thread has the same ones of every source
    STAGES: tl.constexpr, SHARE: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, >= SHARE
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Gradients of sources and prefix, and partial sums of dg, the gradient of query * rms_weight.

    Programs share a token and exchange parts of the products <dh, v_i>.
    """
    PROGRAMS: tl.constexpr = SHARE // TILES  # of a tile
    N_WORDS: tl.constexpr = BLOCK_N + (p_prefix is not None)
    n_groups = tl.num_programs(0) // SHARE
    i_group = tl.program_id(0) // SHARE
    i_part = tl.program_id(0) - i_group * SHARE
    i_tile = i_part // PROGRAMS if TILES > 1 else 0
    o_col = tl.max_contiguous((i_part - i_tile * PROGRAMS) * BLOCK_D + tl.arange(0, BLOCK_D), VECTOR)
    m_col = (o_col < D) | (D % BLOCK_D == 0)
    m_first = m_col & (i_tile == 0)  # the prefix comes with the first tile
    o_block = tl.arange(0, BLOCK_N)
    n_blocks = count_blocks(p_count, n_slots)
    n_in_tile = tl.minimum(n_blocks - i_tile * PER_TILE, PER_TILE)
    m_block = o_block < n_in_tile
    bits = ((needed >> (i_tile * PER_TILE)) & ((1 << PER_TILE) - 1)).to(tl.int32)  # as `needed`, of the program's blocks
    # All programs' words, [SLOTS * BLOCK_N]. In one dimension: in two, Triton gives loads and `collect` different layouts,
    # and waits in both.
    o_slot = tl.arange(0, SLOTS * BLOCK_N) // BLOCK_N
    o_in_tile = tl.arange(0, SLOTS * BLOCK_N) % BLOCK_N
    o_all = o_slot // PROGRAMS * PER_TILE + o_in_tile
    m_all = (o_slot < SHARE) & (o_in_tile < PER_TILE) & (o_all < n_blocks)
    m_same_tile = o_slot // PROGRAMS == i_tile
    m_first_part = o_slot == i_tile * PROGRAMS
    o_word = tl.minimum(o_slot, SHARE - 1) * N_WORDS + o_in_tile
    b_g = tl.load(p_query + o_col, mask=m_col, other=0.0).to(tl.float32)
    b_g *= tl.load(p_norm + o_col, mask=m_col, other=0.0).to(tl.float32)
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
        b_lse = tl.load(p_lse + i_token + tl.arange(0, 1))  # [1]: as in backward.py
        o_statistic = o_all.to(tl.int64) * n_tokens + i_token
        b_score = tl.load(p_score + o_statistic, mask=m_all, other=0.0)  # these [SLOTS * BLOCK_N]
        b_rstd = tl.load(p_rstd + o_statistic, mask=m_all, other=0.0)
        b_alpha = tl.where(m_all, tl.exp(b_score - b_lse), 0.0)
        p_part = p_words + (turn % TURNS) * (SHARE * N_WORDS)
        p_published = p_part + i_part * N_WORDS
        if p_prefix is not None:
            b_p = tl.load(p_prefix + i_token * s_prefix + o_col, mask=m_first, other=0.0).to(tl.float32)
            o_prefix = tl.cast(n_slots, tl.int64) * n_tokens + i_token + tl.arange(0, 1)
            b_p_score, b_p_rstd = tl.load(p_score + o_prefix), tl.load(p_rstd + o_prefix)
            publish(p_published + BLOCK_N, tl.sum(b_p * b_dh, axis=0), turn)
        publish(p_published + o_block, tl.sum(widen_tile(b_v) * b_dh[None, :], axis=1), turn)
        b_part = tl.where(m_all, collect(p_part + o_word, turn), 0.0)
        # A reduction of their own for sums over all sources: as more rows of the next one they take registers of the blocks.
        b_delta, b_sum = tl.reduce((b_alpha * b_part, b_alpha), 0, add_pairs)
        b_e, b_alpha, b_rstd, b_slope = tl.reduce(
            (
                tl.reshape(tl.where(m_same_tile, b_part, 0.0), [SLOTS, BLOCK_N]),
                tl.reshape(tl.where(m_first_part, b_alpha, 0.0), [SLOTS, BLOCK_N]),
                tl.reshape(tl.where(m_first_part, b_rstd, 0.0), [SLOTS, BLOCK_N]),
                tl.reshape(tl.where(m_first_part, slope(b_score, b_rstd, D), 0.0), [SLOTS, BLOCK_N]),
            ),
            0,
            add_fours,
        )  # all [BLOCK_N]
        b_delta = tl.zeros([1], tl.float32) + b_delta
        b_sum *= 1.0 / PROGRAMS  # every program's words have each alpha
        if p_prefix is not None:
            o_program = tl.arange(0, SLOTS)
            b_p_e = collect(p_part + tl.minimum(o_program, PROGRAMS - 1) * N_WORDS + BLOCK_N, turn)
            b_p_e = tl.sum(tl.where(o_program < PROGRAMS, b_p_e, 0.0), axis=0)
            b_p_alpha = tl.exp(b_p_score - b_lse)
            b_delta, b_sum = b_delta + b_p_alpha * b_p_e, b_sum + b_p_alpha
        b_delta = b_delta / b_sum  # as in backward.py: lse is rounded
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
