"""The forward of one layer for Ascend that loads the next source ahead.

The sums are those of forward.py, with the first source's score as the reference. They are never scaled, which takes a third
off the vector unit's work. They would overflow if a later score were higher by 88. So from the first tile on in which a
score is higher by 30, a program computes its tiles again, with the highest score so far as the reference. (CANN 8.5 compiles
a branch inside the loop wrongly: it overwrites the reference.)

The kernel computes with one source while the next is loaded. Compilers for Ascend double a load's buffer themselves, but
when the Unified Buffer is full they reuse the idle half. They do not reuse tiles that a loop carries, so the loop carries
the next source.
"""

import triton
import triton.language as tl

from ..both.tile import block_at, count_blocks, fetch_whole_rows, load_prefix, load_query, store_lse
from ..formula import score_rows
from .forward import append_rows, forward_tiles, store_output, store_scores

MAX_SUM = tl.constexpr(1e13)  # e^30: of exp(s - reference); above it the reference was too low
MAX_SQUARE = tl.constexpr(3e38)  # a larger sum of squares counts as infinite


@triton.jit
def next_block(p_v, p_table, s_block, s_token, i_block, n_blocks, i_token, n_tokens, M: tl.constexpr):
    """Where a block of tokens i_token on lies, and how many tokens are left there; after the last block the first one of
    this program's next tokens."""
    is_last = i_block >= n_blocks
    i_next = tl.where(is_last, i_token + tl.num_programs(0) * M, i_token)
    p_block = block_at(p_v, p_table, s_block, tl.where(is_last, 0, i_block)) + i_next * s_token
    return p_block, (n_tokens - i_next).to(tl.int32)


@triton.jit(do_not_specialize=["n_slots", "n_tokens"])
def attn_res_forward_prefetch_kernel(
    p_v, p_table, p_query, p_norm, p_weight, p_o, p_y, p_score, p_rstd, p_lse, p_norm_rstd,
    p_count, p_prefix, p_x, p_new_prefix, p_append,
    n_slots, n_tokens, s_block, s_token, eps, norm_eps, s_prefix, s_x, s_new_prefix,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """h, its RMSNorm and the statistics; loads the next source ahead. The arguments are those of attn_res_forward_kernel."""
    # time: rare: that a score is higher by 30 than the first block's
    # lint: allow scalar-reduction: once a tile, whether its sums are too large; and tiles are sized for the 910B's compilers
    # lint: allow strided-transfer: statistics by token, of two or three rows a tile; a backward loads them at once
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    n_blocks = count_blocks(p_count, n_slots)
    b_g = load_query(p_query, p_norm, D, D, 1, 1, BLOCK_D)  # [1, BLOCK_D]
    i_first = tl.program_id(0).to(tl.int64) * BLOCK_M
    p_block = block_at(p_v, p_table, s_block, 0) + i_first * s_token
    n_next = tl.where(n_blocks > 0, n_tokens - i_first, 0).to(tl.int32)  # beside a prefix there may be no block
    b_v = fetch_whole_rows(p_block, s_token, n_next, D, BLOCK_M, BLOCK_D).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    n_tiles = tl.cdiv(n_tokens, BLOCK_M)
    n_sources = n_slots if p_prefix is None else n_slots + 1
    i_again = n_tiles
    for i_tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        if p_prefix is None:
            p_block, n_next = next_block(p_v, p_table, s_block, s_token, 1, n_blocks, i_token, n_tokens, BLOCK_M)
            b_second = fetch_whole_rows(p_block, s_token, n_next, D, BLOCK_M, BLOCK_D)
            b_first = b_v
        else:
            b_first = load_prefix(
                p_prefix, p_x, p_new_prefix, i_token, n_left, s_prefix, s_x, s_new_prefix, D, BLOCK_M, BLOCK_D
            )
            append_rows(
                p_append, p_count, b_first, i_token, n_left, n_blocks, n_slots, s_block, s_token, D, BLOCK_M, BLOCK_D
            )
        b_reference, b_first_rstd, _ = score_rows(b_first, b_g, eps, D)  # [BLOCK_M] each
        b_sum = tl.full([BLOCK_M], 1.0, tl.float32)
        # A computed 1: with a sum that starts as b_first itself, compilers for Ascend keep it where the next blocks go.
        b_o = b_first * tl.exp(b_reference - b_reference)[:, None]
        if p_prefix is None:
            b_v = b_second.to(tl.float32)
        for i_block in tl.range(1 if p_prefix is None else 0, n_blocks):
            i_next = i_block + 1
            p_block, n_next = next_block(p_v, p_table, s_block, s_token, i_next, n_blocks, i_token, n_tokens, BLOCK_M)
            b_next = fetch_whole_rows(p_block, s_token, n_next, D, BLOCK_M, BLOCK_D)
            b_score, b_rstd, b_square = score_rows(b_v, b_g, eps, D)
            # Where squares of v overflow, its score is 0. Above a low reference its weight is large; v times it overflows.
            b_sum = tl.where(b_square > MAX_SQUARE, 2.0 * MAX_SUM, b_sum)  # false of NaN, which spoils its own token alone
            b_weight = tl.exp(b_score - b_reference)
            b_o += b_v * b_weight[:, None]
            b_sum += b_weight
            b_v = b_next.to(tl.float32)
            store_scores(p_score, p_rstd, b_score, b_rstd, i_block, i_token, n_sources, n_tokens, n_left, BLOCK_M, BY_TOKEN)
        i_source = 0 if p_prefix is None else n_slots
        store_scores(
            p_score, p_rstd, b_reference, b_first_rstd, i_source, i_token, n_sources, n_tokens, n_left, BLOCK_M, BY_TOKEN
        )
        if tl.max(tl.where(b_sum > MAX_SUM, 1.0, 0.0), axis=0) > 0:  # not max(b_sum): a NaN would hide other rows
            i_again = tl.minimum(i_again, i_tile)
        b_factor = store_lse(p_lse, b_reference, b_sum, i_token, n_left, BLOCK_M)
        b_stored = (b_o * b_factor[:, None]).to(p_o.dtype.element_ty)
        store_output(p_weight, p_o, p_y, p_norm_rstd, b_stored, i_token, n_left, norm_eps, D, BLOCK_M, BLOCK_D)
    if BLOCK_M == 1:
        # A computed 1: behind the loop the scalar unit writes a number that the vector unit takes. Without it CANN 8.5 sets
        # a flag before the last wait for it, where the vector unit uses bytes again that the scalar unit used.
        b_unit = tl.exp(tl.full([1], (i_again - n_tiles).to(tl.float32), tl.float32) * 0.0)
        b_g *= b_unit[:, None]
    if i_again < n_tiles:
        # The prefix as it was stored, which may be where it was.
        p_stored = p_prefix if p_x is None else p_new_prefix
        s_stored = s_prefix if p_x is None else s_new_prefix
        forward_tiles(
            p_v, p_table, p_weight, p_o, p_y, None, None, p_lse, p_norm_rstd, None, p_stored, None, None, None,
            b_g, i_again, n_tiles, tl.num_programs(0),
            n_blocks, n_tokens, s_block, s_token, eps, norm_eps, n_slots, s_stored, 0, 0,
            D, BLOCK_M, BLOCK_D, BY_TOKEN,
        )  # fmt: skip
