"""Device code of the forward. Formulas, tiles and blocks: tile.py.

Every block is read once: sums of exp(s_i - reference) v_i and of exp(s_i - reference) grow block by block. The reference is
the highest score so far, and what was summed up before is scaled whenever it rises.
"""

import triton
import triton.language as tl

from .tile import (
    block_at,
    count_blocks,
    count_rows,
    load_prefix,
    load_query,
    load_rows,
    normalise_rows,
    store_rows,
    store_statistic,
    widen,
)


@triton.jit
def score_rows(b_v, b_g, eps, D: tl.constexpr):
    """s, one of each row; r and sum(v^2), one of each row of v."""
    b_square, b_product = tl.sum(b_v * b_v, axis=1), tl.sum(b_v * b_g, axis=1)
    b_rstd = tl.rsqrt(b_square * (1.0 / D) + eps)
    return b_product * b_rstd, b_rstd, b_square


# fmt: off
@triton.jit
def store_scores(
    p_score, p_rstd, b_score, b_rstd, i_source, i_token, n_sources, n_tokens, n_rows, n_left,
    S: tl.constexpr, R: tl.constexpr, M: tl.constexpr, BY_TOKEN: tl.constexpr,
):
    # fmt: on
    """s and r of one source, from token i_token on; nothing where no backward will follow."""
    if p_score is not None:
        if BY_TOKEN:
            i_row = i_token * n_sources + i_source
            store_statistic(p_score + i_row, b_score, n_rows, R, n_sources)
            store_statistic(p_rstd + i_row, b_rstd, n_left, M, n_sources)
        else:
            i_row = tl.cast(i_source, tl.int64) * n_tokens + i_token
            store_statistic(p_score + i_row * S, b_score, n_rows, R)
            store_statistic(p_rstd + i_row, b_rstd, n_left, M)


@triton.jit
def store_lse(p_lse, b_reference, b_sum, i_row, n_rows, R: tl.constexpr):
    """Stores log(sum(exp(s))), from the sum of exp(s - reference), and returns 1 / that sum, a factor of o."""
    b_factor = 1.0 / b_sum
    if p_lse is not None:
        # Not + log(b_sum): CANN 8.5 sets a flag twice where the vector unit takes what the scalar unit summed in a loop.
        store_statistic(p_lse + i_row, b_reference - tl.log(b_factor), n_rows, R)
    return b_factor


@triton.jit
def store_output(
    p_weight, p_o, p_y, p_norm_rstd, b_stored, i_row, n_rows, norm_eps, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Stores o, in the dtype of its memory, and its RMSNorm where there is a weight."""
    store_rows(p_o + i_row * D, D, b_stored, n_rows, D, R, C, C == D)
    if p_weight is not None:
        normalise_rows(widen(b_stored), p_weight, p_y, p_norm_rstd, i_row, n_rows, norm_eps, D, R, C)


# fmt: off
@triton.jit
def append_rows(
    p_append, p_count, b_p, i_token, n_left, n_blocks, n_slots, s_block, s_token,
    D: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):
    # fmt: on
    """Stores rows of the prefix behind the blocks, where that is asked for, and where a bank of n_slots blocks has room."""
    if p_append is not None:
        p_end = p_append + tl.cast(n_blocks, tl.int64) * s_block + i_token * s_token
        if p_count is None or n_blocks < n_slots:
            store_rows(p_end, s_token, b_p, n_left, D, M, C, C == D)


# fmt: off
@triton.jit
def forward_tiles(
    p_v, p_table, p_weight, p_o, p_y, p_score, p_rstd, p_lse, p_norm_rstd,
    p_count, p_prefix, p_x, p_joined, p_append,
    b_g, i_first, i_end, n_step, n_blocks, n_tokens, s_block, s_token, eps, norm_eps, n_slots, s_prefix, s_x, s_joined,
    D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr, BY_TOKEN: tl.constexpr,
):
    # fmt: on
    """Tiles i_first, i_first + n_step, ... before i_end, with the highest score so far as the reference.

    The prefix, where there is one, comes first. Its statistics are row n_slots.
    """
    ROWS: tl.constexpr = BLOCK_M * BLOCK_S
    n_sources = n_slots if p_prefix is None else n_slots + 1
    for i_tile in tl.range(i_first, i_end, n_step):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        n_rows = count_rows(n_left, S)
        if p_prefix is None:
            b_max = tl.full([ROWS], float("-inf"), tl.float32)
            b_sum = tl.zeros([ROWS], tl.float32)
            # Zeros, of a number that is computed here: compilers for Ascend keep a constant tile on chip, to copy it from.
            b_o = tl.full([ROWS, BLOCK_D], tl.where(n_left > 0, 0.0, 1.0), tl.float32)
        else:
            b_p = load_prefix(p_prefix, p_x, p_joined, i_token, n_left, s_prefix, s_x, s_joined, D, BLOCK_M, BLOCK_D)
            append_rows(p_append, p_count, b_p, i_token, n_left, n_blocks, n_slots, s_block, s_token, D, BLOCK_M, BLOCK_D)
            b_max, b_rstd, _ = score_rows(b_p, b_g, eps, D)
            # fmt: off
            store_scores(
                p_score, p_rstd, b_max, b_rstd, n_slots, i_token, n_sources, n_tokens, n_rows, n_left,
                S, ROWS, BLOCK_M, BY_TOKEN,
            )
            # fmt: on
            b_sum = tl.full([ROWS], 1.0, tl.float32)
            # One, computed: with a sum that starts as b_p itself, compilers for Ascend keep it where the next blocks go.
            b_o = b_p * tl.exp(b_max - b_max)[:, None]
        for i_block in tl.range(0, n_blocks):
            p_block = block_at(p_v, p_table, s_block, i_block, ALIGNED) + i_token * s_token
            b_v = load_rows(p_block, s_token, n_left, D, BLOCK_M, BLOCK_D, BLOCK_D == D)  # [BLOCK_M, BLOCK_D]
            b_score, b_rstd, _ = score_rows(b_v, b_g, eps, D)  # [ROWS], [BLOCK_M]
            b_next = tl.where(b_score > b_max, b_score, b_max)
            b_shrink, b_weight = tl.exp(b_max - b_next), tl.exp(b_score - b_next)
            b_o = b_o * b_shrink[:, None] + b_v * b_weight[:, None]
            b_sum = b_sum * b_shrink + b_weight
            b_max = b_next
            # Last: what is stored has to stay until it has been.
            # fmt: off
            store_scores(
                p_score, p_rstd, b_score, b_rstd, i_block, i_token, n_sources, n_tokens, n_rows, n_left,
                S, ROWS, BLOCK_M, BY_TOKEN,
            )
            # fmt: on
        b_factor = store_lse(p_lse, b_max, b_sum, i_token * S, n_rows, ROWS)
        b_stored = (b_o * b_factor[:, None]).to(p_o.dtype.element_ty)
        store_output(p_weight, p_o, p_y, p_norm_rstd, b_stored, i_token * S, n_rows, norm_eps, D, ROWS, BLOCK_D)


@triton.jit(do_not_specialize=["n_blocks", "n_tokens", "n_slots"])
def attn_res_forward_kernel(
    p_v,
    p_table,  # None: block i lies at i * s_block
    p_query,
    p_norm,
    p_weight,  # of the RMSNorm of h; None: there is none
    p_o,
    p_y,
    p_score,  # fp32 [n_blocks, n_tokens, S], or BY_TOKEN [n_tokens, n_blocks]: s; None: no backward will follow
    p_rstd,  # fp32 [n_blocks, n_tokens], or BY_TOKEN [n_tokens, n_blocks]: r
    p_lse,  # fp32 [n_tokens, S]: log(sum(exp(s))); None: not asked for
    p_norm_rstd,
    p_count,  # int32 or int64: the number of blocks; None: n_blocks is
    p_prefix,  # the source that comes before the blocks; None: there is none
    p_x,  # what is added to the prefix first; None: nothing
    p_joined,  # where the sum goes
    p_append,  # where the blocks lie, and the prefix is stored as the next one; None: it is not
    n_blocks,
    n_tokens,
    s_block,
    s_token,
    s_norm,
    eps,
    norm_eps,
    n_slots,
    s_prefix,
    s_x,
    s_joined,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,  # >= D
    ALIGNED: tl.constexpr,
    BY_TOKEN: tl.constexpr = False,
):
    # lint: allow scalar-reduction: tiles are sized for the 910B's compilers, which need twice what the 950's do
    b_g = load_query(p_query, p_norm, s_norm, D, S, BLOCK_S, BLOCK_D)  # [BLOCK_S, BLOCK_D]
    n_blocks = count_blocks(p_count, n_blocks, n_slots)
    # fmt: off
    forward_tiles(
        p_v, p_table, p_weight, p_o, p_y, p_score, p_rstd, p_lse, p_norm_rstd,
        p_count, p_prefix, p_x, p_joined, p_append,
        b_g, tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0),
        n_blocks, n_tokens, s_block, s_token, eps, norm_eps, n_slots, s_prefix, s_x, s_joined,
        D, S, BLOCK_M, BLOCK_S, BLOCK_D, ALIGNED, BY_TOKEN,
    )
    # fmt: on
