"""The forward of one layer for Ascend where the compiler orders loads: every source is read once, in an online softmax.

The prefix, where there is one, is the last source by number, so that its statistics are the last row; the kernel processes
it first. Statistics are [sources, tokens] or, BY_TOKEN, [tokens, sources]: backward_row.py loads those of a token at once.
"""

import triton
import triton.language as tl
from npu_tiling.device.rounding import widen

from ..both.tile import (
    block_at,
    count_blocks,
    load_prefix,
    load_query,
    load_rows,
    normalise_rows,
    store_lse,
    store_rows,
    store_statistic,
)
from ..formula import add_source, score_rows


@triton.jit
def store_scores(
    p_score, p_rstd, b_score, b_rstd, i_source, i_token, n_sources, n_tokens, n_left,
    M: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """s and r of one source, from token i_token on; nothing where no backward follows."""
    if p_score is not None:
        if BY_TOKEN:
            i_row = i_token * n_sources + i_source
            store_statistic(p_score + i_row, b_score, n_left, M, n_sources)
            store_statistic(p_rstd + i_row, b_rstd, n_left, M, n_sources)
        else:
            i_row = tl.cast(i_source, tl.int64) * n_tokens + i_token
            store_statistic(p_score + i_row, b_score, n_left, M)
            store_statistic(p_rstd + i_row, b_rstd, n_left, M)


@triton.jit
def store_output(
    p_weight, p_o, p_y, p_norm_rstd, b_stored, i_token, n_left, norm_eps, D: tl.constexpr, M: tl.constexpr, C: tl.constexpr
):
    """Stores h, in the dtype of its memory, and its RMSNorm where there is a weight."""
    store_rows(p_o + i_token * D, D, b_stored, n_left, D, M, C, C == D)
    if p_weight is not None:
        normalise_rows(widen(b_stored), p_weight, p_y, p_norm_rstd, i_token, n_left, norm_eps, D, M, C)


@triton.jit
def append_rows(
    p_append, p_count, b_p, i_token, n_left, n_blocks, n_slots, s_block, s_token,
    D: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores rows of the prefix behind the blocks where p_append is given; with a count on the device, only where the bank,
    whose capacity is n_slots then, has room."""
    if p_append is not None:
        p_end = p_append + tl.cast(n_blocks, tl.int64) * s_block + i_token * s_token
        if p_count is None or n_blocks < n_slots:
            store_rows(p_end, s_token, b_p, n_left, D, M, C, C == D)


@triton.jit
def forward_tiles(
    p_v, p_table, p_weight, p_o, p_y, p_score, p_rstd, p_lse, p_norm_rstd, p_count, p_prefix, p_x, p_new_prefix, p_append,
    b_g, i_first, i_end, n_step, n_blocks, n_tokens, s_block, s_token, eps, norm_eps, n_slots, s_prefix, s_x, s_new_prefix,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Tiles i_first, i_first + n_step, ... before i_end, with the highest score so far as the reference."""
    n_sources = n_slots if p_prefix is None else n_slots + 1
    for i_tile in tl.range(i_first, i_end, n_step):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        if p_prefix is None:
            b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            b_sum = tl.zeros([BLOCK_M], tl.float32)
            # Computed zeros: compilers for Ascend keep a constant tile on chip, to copy it from.
            b_o = tl.full([BLOCK_M, BLOCK_D], tl.where(n_left > 0, 0.0, 1.0), tl.float32)
        else:
            b_p = load_prefix(p_prefix, p_x, p_new_prefix, i_token, n_left, s_prefix, s_x, s_new_prefix, D, BLOCK_M, BLOCK_D)
            append_rows(p_append, p_count, b_p, i_token, n_left, n_blocks, n_slots, s_block, s_token, D, BLOCK_M, BLOCK_D)
            b_max, b_rstd, _ = score_rows(b_p, b_g, eps, D)
            store_scores(p_score, p_rstd, b_max, b_rstd, n_slots, i_token, n_sources, n_tokens, n_left, BLOCK_M, BY_TOKEN)
            b_sum = tl.full([BLOCK_M], 1.0, tl.float32)
            # A computed 1: with a sum that starts as b_p itself, compilers for Ascend keep it where the next blocks go.
            b_o = b_p * tl.exp(b_max - b_max)[:, None]
        for i_block in tl.range(0, n_blocks):
            p_block = block_at(p_v, p_table, s_block, i_block) + i_token * s_token
            b_v = load_rows(p_block, s_token, n_left, D, BLOCK_M, BLOCK_D, BLOCK_D == D)  # [BLOCK_M, BLOCK_D]
            b_score, b_rstd, _ = score_rows(b_v, b_g, eps, D)  # [BLOCK_M] both
            b_o, b_sum, b_max = add_source(b_v, b_score, b_o, b_sum, b_max)
            # Stored last: the buffer of the scores is busy until the transfer ends.
            store_scores(p_score, p_rstd, b_score, b_rstd, i_block, i_token, n_sources, n_tokens, n_left, BLOCK_M, BY_TOKEN)
        b_factor = store_lse(p_lse, b_max, b_sum, i_token, n_left, BLOCK_M)
        b_stored = (b_o * b_factor[:, None]).to(p_o.dtype.element_ty)
        store_output(p_weight, p_o, p_y, p_norm_rstd, b_stored, i_token, n_left, norm_eps, D, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["n_slots", "n_tokens"])
def attn_res_forward_kernel(
    # read: the sources, their table (None: source i lies at i * s_block), the weights of scores and of the RMSNorm of h
    p_v, p_table, p_query, p_norm, p_weight,
    # written: h, its RMSNorm (None: no weight); fp32 s and r (None: no backward follows), log(sum(exp(s))), 1 / rms(h)
    p_o, p_y, p_score, p_rstd, p_lse, p_norm_rstd,
    # the number of blocks (None: n_slots); the prefix, what is added to it, where the sum goes, and the blocks that take it
    p_count, p_prefix, p_x, p_new_prefix, p_append,
    # n_slots: the number of blocks, or the capacity of a bank whose count is on the device
    n_slots, n_tokens, s_block, s_token, eps, norm_eps, s_prefix, s_x, s_new_prefix,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D >= D
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """h, its RMSNorm and the statistics, from one read of every source; the compiler orders the loads."""
    # lint: allow scalar-reduction: tiles are sized for the 910B's compilers, which need twice what the 950's do
    b_g = load_query(p_query, p_norm, D, D, 1, 1, BLOCK_D)  # [1, BLOCK_D]
    n_blocks = count_blocks(p_count, n_slots)
    forward_tiles(
        p_v, p_table, p_weight, p_o, p_y, p_score, p_rstd, p_lse, p_norm_rstd, p_count, p_prefix, p_x, p_new_prefix,
        p_append, b_g, tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0),
        n_blocks, n_tokens, s_block, s_token, eps, norm_eps, n_slots, s_prefix, s_x, s_new_prefix,
        D, BLOCK_M, BLOCK_D, BY_TOKEN,
    )  # fmt: skip
