"""Forward and backward of one layer for Ascend: forward where the compiler orders loads, forward that loads the next source
ahead, backward in tiles of rows, and backward of one row a tile that keeps <dh, v_i>.

In the forward every source is read once, in an online softmax. The prefix, where there is one, is the last source by number,
so that its statistics are the last row; the kernel processes it first. Statistics are [sources, tokens] or, BY_TOKEN,
[tokens, sources]: the backward of one row a tile loads those of a token at once.
"""

from npu_tiling.device import tl, triton, widen

from ..formula import (
    ALIGNMENT,
    add_source,
    block_at,
    count_blocks,
    expanded_gradient,
    fetch_rows,
    fetch_whole_rows,
    load_prefix,
    load_query,
    load_rows,
    load_statistic,
    normalise_rows,
    score_gradient,
    score_rows,
    slope,
    store_gradient,
    store_lse,
    store_partial_sum,
    store_rows,
    store_statistic,
)
from .tiling import MAX_KEPT_SOURCES

MAX_SUM = tl.constexpr(1e13)  # e^30: of exp(s - reference); above it the reference was too low
MAX_SQUARE = tl.constexpr(3e38)  # a larger sum of squares counts as infinite
MAX_SOURCES = tl.constexpr(MAX_KEPT_SOURCES)
MIN_OFFSET = tl.constexpr(-(2**62))  # of a gradient from its base; NO_GRADIENT is less, also with a token's offset
NO_SCORE = tl.constexpr(-1e30)  # of a place without a source: its weight is zero


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
    p_output_rms_weight, p_h, p_y, p_norm_rstd, b_stored, i_token, n_left, norm_eps,
    D: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores h, in the dtype of its memory, and its RMSNorm where there is a weight."""
    store_rows(p_h + i_token * D, D, b_stored, n_left, D, M, C, C == D)
    if p_output_rms_weight is not None:
        normalise_rows(widen(b_stored), p_output_rms_weight, p_y, p_norm_rstd, i_token, n_left, norm_eps, D, M, C)


@triton.jit
def append_rows(
    p_append, p_count, b_p, i_token, n_left, n_blocks, max_blocks, s_block, s_token,
    D: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores rows of the prefix behind the blocks, where p_append is given and the bank has room: the host has checked it,
    unless the count is on the device."""
    if p_append is not None:
        p_end = p_append + tl.cast(n_blocks, tl.int64) * s_block + i_token * s_token
        if p_count is None or n_blocks < max_blocks:
            store_rows(p_end, s_token, b_p, n_left, D, M, C, C == D)


@triton.jit
def forward_tiles(
    p_v, p_table, p_output_rms_weight, p_h, p_y, p_score, p_rstd, p_lse, p_norm_rstd, p_count, p_prefix, p_x, p_new_prefix,
    p_append, b_g, i_first, n_blocks, n_tokens, s_block, s_token, eps, norm_eps, max_blocks, s_prefix, s_x, s_new_prefix,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """A program's tiles from i_first on, with the highest score so far as the reference."""
    n_sources = max_blocks if p_prefix is None else max_blocks + 1
    for i_tile in tl.range(i_first, tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0)):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        if p_prefix is None:
            b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            b_sum = tl.zeros([BLOCK_M], tl.float32)
            # Computed zeros: compilers for Ascend keep a constant tile on chip, to copy it from.
            b_o = tl.full([BLOCK_M, BLOCK_D], tl.where(n_left > 0, 0.0, 1.0), tl.float32)
        else:
            b_p = load_prefix(p_prefix, p_x, p_new_prefix, i_token, n_left, s_prefix, s_x, s_new_prefix, D, BLOCK_M, BLOCK_D)
            append_rows(p_append, p_count, b_p, i_token, n_left, n_blocks, max_blocks, s_block, s_token, D, BLOCK_M, BLOCK_D)
            b_max, b_rstd, _ = score_rows(b_p, b_g, eps, D)
            store_scores(p_score, p_rstd, b_max, b_rstd, max_blocks, i_token, n_sources, n_tokens, n_left, BLOCK_M, BY_TOKEN)
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
        b_stored = (b_o * b_factor[:, None]).to(p_h.dtype.element_ty)
        store_output(p_output_rms_weight, p_h, p_y, p_norm_rstd, b_stored, i_token, n_left, norm_eps, D, BLOCK_M, BLOCK_D)


@triton.jit(do_not_specialize=["max_blocks", "n_tokens"])
def attn_res_forward_kernel(
    # read: the sources, their table (None: source i lies at i * s_block), the weights of scores and of the RMSNorm of h
    p_v, p_table, p_query, p_rms_weight, p_output_rms_weight,
    # written: h, its RMSNorm (None: no weight); fp32 s and r (None: no backward follows), log(sum(exp(s))), 1 / rms(h)
    p_h, p_y, p_score, p_rstd, p_lse, p_norm_rstd,
    # how many blocks count (None: max_blocks); the prefix, the layer's output, the new prefix, and the bank that takes that
    p_count, p_prefix, p_x, p_new_prefix, p_append,
    max_blocks, n_tokens, s_block, s_token, eps, norm_eps, s_prefix, s_x, s_new_prefix,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D >= D
    BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """h, its RMSNorm and the statistics, from one read of every source; the compiler orders the loads."""
    b_g = load_query(p_query, p_rms_weight, D, D, 1, 1, BLOCK_D)  # [1, BLOCK_D]
    n_blocks = count_blocks(p_count, max_blocks)
    forward_tiles(
        p_v, p_table, p_output_rms_weight, p_h, p_y, p_score, p_rstd, p_lse, p_norm_rstd, p_count, p_prefix, p_x,
        p_new_prefix, p_append, b_g, tl.program_id(0), n_blocks, n_tokens, s_block, s_token, eps, norm_eps, max_blocks,
        s_prefix, s_x, s_new_prefix, D, BLOCK_M, BLOCK_D, BY_TOKEN,
    )  # fmt: skip


# A forward that loads the next source ahead.
#
# The sums are those of attn_res_forward_kernel, with the first source's score as the reference. They are never scaled, which
# takes a third off the vector unit's work. They would overflow if a later score were higher by 88. So from the first tile on
# in which a score is higher by 30, a program computes its tiles again, with the highest score so far as the reference. (CANN
# 8.5 compiles a branch inside the loop wrongly: it overwrites the reference.)
#
# The kernel computes with one source while the next is loaded. Compilers for Ascend double a load's buffer themselves, but
# when the Unified Buffer is full they reuse the idle half. They do not reuse tiles that a loop carries, so the loop carries
# the next source.


@triton.jit
def next_block(p_v, p_table, s_block, s_token, i_block, n_blocks, i_token, n_tokens, M: tl.constexpr):
    """Where a block of tokens i_token on lies, and how many tokens are left there; after the last block the first one of
    this program's next tokens."""
    is_last = i_block >= n_blocks
    i_next = tl.where(is_last, i_token + tl.num_programs(0) * M, i_token)
    p_block = block_at(p_v, p_table, s_block, tl.where(is_last, 0, i_block)) + i_next * s_token
    return p_block, (n_tokens - i_next).to(tl.int32)


@triton.jit(do_not_specialize=["max_blocks", "n_tokens"])
def attn_res_forward_prefetch_kernel(
    p_v, p_table, p_query, p_rms_weight, p_output_rms_weight, p_h, p_y, p_score, p_rstd, p_lse, p_norm_rstd,
    p_count, p_prefix, p_x, p_new_prefix, p_append,
    max_blocks, n_tokens, s_block, s_token, eps, norm_eps, s_prefix, s_x, s_new_prefix,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """h, its RMSNorm and the statistics; loads the next source ahead. The arguments are those of attn_res_forward_kernel."""
    # time: rare: that a score is higher by 30 than the first block's
    # lint: allow scalar-reduction: once a tile, whether its sums are too large; and tiles are sized for the 910B's compilers
    # lint: allow strided-transfer: statistics by token, of two or three rows a tile; a backward loads them at once
    # lint: allow single-buffer: the loop carries the tile of the next source; in fp32 that is the one that is loaded
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    n_blocks = count_blocks(p_count, max_blocks)
    b_g = load_query(p_query, p_rms_weight, D, D, 1, 1, BLOCK_D)  # [1, BLOCK_D]
    i_first = tl.program_id(0).to(tl.int64) * BLOCK_M
    p_block = block_at(p_v, p_table, s_block, 0) + i_first * s_token
    n_next = tl.where(n_blocks > 0, n_tokens - i_first, 0).to(tl.int32)  # beside a prefix there may be no block
    b_v = fetch_whole_rows(p_block, s_token, n_next, D, BLOCK_M, BLOCK_D).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    n_tiles = tl.cdiv(n_tokens, BLOCK_M)
    n_sources = max_blocks if p_prefix is None else max_blocks + 1
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
                p_append, p_count, b_first, i_token, n_left, n_blocks, max_blocks, s_block, s_token, D, BLOCK_M, BLOCK_D
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
        i_source = 0 if p_prefix is None else max_blocks
        store_scores(
            p_score, p_rstd, b_reference, b_first_rstd, i_source, i_token, n_sources, n_tokens, n_left, BLOCK_M, BY_TOKEN
        )
        if tl.max(tl.where(b_sum > MAX_SUM, 1.0, 0.0), axis=0) > 0:  # not max(b_sum): a NaN would hide other rows
            i_again = tl.minimum(i_again, i_tile)
        b_factor = store_lse(p_lse, b_reference, b_sum, i_token, n_left, BLOCK_M)
        b_stored = (b_o * b_factor[:, None]).to(p_h.dtype.element_ty)
        store_output(p_output_rms_weight, p_h, p_y, p_norm_rstd, b_stored, i_token, n_left, norm_eps, D, BLOCK_M, BLOCK_D)
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
            p_v, p_table, p_output_rms_weight, p_h, p_y, None, None, p_lse, p_norm_rstd, None, p_stored, None, None, None,
            b_g, i_again, n_blocks, n_tokens, s_block, s_token, eps, norm_eps, max_blocks, s_stored, 0, 0,
            D, BLOCK_M, BLOCK_D, BY_TOKEN,
        )  # fmt: skip


# The backward of one layer for Ascend, in tiles of rows. Two sweeps over a token's sources: delta, then the gradients.
#
# e_i - delta cancels when the softmax is peaked, so delta must be accurate in fp32. Computed from an h that was rounded to
# bf16 it would be off by about 2^-9 |dh| |h|, which dv_i multiplies by |g|. So a first sweep over a token's blocks sums
# delta in fp32, and a second sweep, which finds the blocks in the cache (L2), computes the gradients. The forward keeps
# scores, rstd and lse. Where h was not rounded (fp32), delta is <dh, h> and there is one sweep.
#
# lse is rounded: where scores are in the hundreds, the weights exp(s - lse) sum to 1 + 1e-5. In every alpha_i that factor is
# as small as the scores' own rounding. But delta must not have it: e_i - delta would not cancel where it should. So delta is
# divided by the sum of its weights.
#
# The first sweep over single rows loads the next block at the top of the loop, computes with the current one, and casts the
# next one at the end; 4096 columns with a prefix are predicted to take 15 % more without it. The second sweep keeps more on
# chip and gains nothing by it. The order of the reductions and the expression for dv decide where compilers for Ascend wait:
# change neither without looking at timings.


@triton.jit(do_not_specialize=["max_blocks", "n_tokens"])
def attn_res_backward_kernel(
    # read: the gradient of h, h where it was not rounded (None: it was), the sources, their table, weights, statistics
    p_dh, p_h, p_v, p_table, p_query, p_rms_weight, p_score, p_rstd, p_lse,
    # written: gradients of the sources (None: none is needed); fp32 partial sums of dg [programs, D] (None: not needed)
    # for attn_res_add_partials_kernel, which makes dquery and drms_weight of them
    p_dv, p_dv_table, p_dg,
    # how many blocks count (None: max_blocks); the prefix, a gradient that reaches it from elsewhere, its whole gradient
    p_count, p_prefix, p_dprefix, p_dprefix_sum,
    max_blocks, n_tokens, s_block, s_token, s_dh, s_prefix, s_dprefix,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D >= D
):  # fmt: skip
    """Gradients of sources and prefix, and partial sums of dg; a tile has rows of one source, a token one or two sweeps."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    EXACT: tl.constexpr = BLOCK_D == D
    PREFETCH: tl.constexpr = p_h is None and BLOCK_M == 1  # in the first sweep
    n_blocks = count_blocks(p_count, max_blocks)
    b_g = load_query(p_query, p_rms_weight, D, D, 1, 1, BLOCK_D)  # [1, BLOCK_D]
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
            i_row = tl.cast(max_blocks, tl.int64) * n_tokens + i_token
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


# The backward of one layer for Ascend, of one row a tile, where h was rounded.
#
# The first sweep over a token's sources keeps every e_i = <dh, v_i> in a tile of MAX_SOURCES numbers, so that the second one
# only multiplies and adds. A mask and a sum pick the numbers of one source, those of the next block while the current one is
# computed. Statistics are [tokens, sources]: one load brings those of a token.
#
# The kernel loads the next rows while it computes. With HALVES it takes a row as two halves, one after the other: where
# whole rows fill the chip, compilers for Ascend would put a product where the next row goes. Before the second sweep it
# loads the next token's statistics with HALVES, and the next token's dh without: there is no room for both.


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
    """The scores and 1 / rms of a token [MAX_SOURCES], and its log-sum [1]; nothing is read of a token behind the last."""
    n_there = tl.where(i_token < n_tokens, n_rows, 0)
    m_source = tl.arange(0, MAX_SOURCES) < n_there
    o_source = i_token * n_rows + tl.arange(0, MAX_SOURCES)
    b_score = tl.load(p_score + o_source, mask=m_source, other=NO_SCORE)
    b_rstd = tl.load(p_rstd + o_source, mask=m_source, other=0.0)
    b_lse = tl.load(p_lse + i_token + tl.arange(0, 1), mask=tl.arange(0, 1) < n_there, other=0.0)
    return b_score, b_rstd, b_lse


@triton.jit
def factors(b_score, b_rstd, b_lse, p_count, n_blocks, max_blocks, D: tl.constexpr):
    """alpha, alpha r and coef = slope alpha r, [MAX_SOURCES] each: the last two times e - delta are c and slope c."""
    if p_count is not None:  # what lies between the blocks and the prefix was never written
        o_source = tl.arange(0, MAX_SOURCES).to(tl.float32)
        m_other = (o_source >= tl.cast(n_blocks, tl.float32)) & (o_source < tl.cast(max_blocks, tl.float32))
        b_score = tl.where(m_other, NO_SCORE, b_score)
        b_rstd = tl.where(m_other, 0.0, b_rstd)
    b_alpha = tl.exp(b_score - b_lse)
    b_alpha_rstd = b_alpha * b_rstd
    return b_alpha, b_alpha_rstd, b_alpha_rstd * b_score * b_rstd * (1.0 / D)


@triton.jit
def pick(b_alpha, b_c, b_slope_c, i_source):
    """The numbers of one source, [1] each."""
    m_source = tl.arange(0, MAX_SOURCES).to(tl.float32) == tl.cast(i_source, tl.float32)
    b_alpha = tl.sum(tl.where(m_source, b_alpha, 0.0)[None, :], axis=1)
    b_c = tl.sum(tl.where(m_source, b_c, 0.0)[None, :], axis=1)
    b_slope_c = tl.sum(tl.where(m_source, b_slope_c, 0.0)[None, :], axis=1)
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


@triton.jit(do_not_specialize=["max_blocks", "n_tokens"])
def attn_res_backward_row_kernel(
    # as of attn_res_backward_kernel, without h; p_score and p_rstd are fp32 [n_tokens, sources]
    p_dh, p_v, p_table, p_query, p_rms_weight, p_score, p_rstd, p_lse, p_dv, p_dv_table, p_dg,
    p_count, p_prefix, p_dprefix, p_dprefix_sum,
    max_blocks, n_tokens, s_block, s_token, s_dh, s_prefix, s_dprefix,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HALVES: tl.constexpr,  # BLOCK_D >= D
):  # fmt: skip
    """Gradients and partial sums of dg, one row a tile, every <dh, v_i> kept."""
    # lint: allow short-transfer: halves are rows of more than 4 KB; whole rows would fill the chip
    # Columns of a piece, those of the first one and those of the second one that are no padding.
    C: tl.constexpr = (BLOCK_D + 2 * ALIGNMENT - 1) // (2 * ALIGNMENT) * ALIGNMENT if HALVES else BLOCK_D
    N: tl.constexpr = C if HALVES else D
    REST: tl.constexpr = D - C
    HAS_DG: tl.constexpr = p_dg is not None
    n_rows = max_blocks if p_prefix is None else max_blocks + 1
    n_blocks = count_blocks(p_count, max_blocks)
    b_g = fetch_piece(p_query, N, C).to(tl.float32) * fetch_piece(p_rms_weight, N, C).to(tl.float32)  # [1, C]
    b_dg = tl.zeros([1, C], tl.float32)
    if HALVES:
        b_g_rest = fetch_piece(p_query + C, REST, C).to(tl.float32) * fetch_piece(p_rms_weight + C, REST, C).to(tl.float32)
        b_dg_rest = tl.zeros([1, C], tl.float32)
    p_first = p_v if p_table is None else block_at(p_v, p_table, s_block, 0)
    o_source = tl.arange(0, MAX_SOURCES).to(tl.float32)
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
            b_alphas, b_alpha_rstds, b_coefs = factors(b_score, b_rstd, b_lse, p_count, n_blocks, max_blocks, D)
        # Computed zeros, as n_next < n_tokens always: compilers for Ascend keep a constant tile on chip, to copy it from.
        b_e = tl.full([MAX_SOURCES], tl.where(n_next < n_tokens, 0.0, 1.0), tl.float32)
        if p_prefix is not None:
            p_prefix_row = p_prefix + i_token * s_prefix
            b_dot = tl.sum(b_dh * fetch_piece(p_prefix_row, N, C).to(tl.float32), axis=1)
            if HALVES:
                b_dot += tl.sum(b_dh_rest * fetch_piece(p_prefix_row + C, REST, C).to(tl.float32), axis=1)
            b_e = tl.where(o_source == tl.cast(max_blocks, tl.float32), b_dot, b_e)
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
            b_e = tl.where(o_source == i_block.to(tl.float32), b_dot, b_e)
        if not HALVES:
            b_alphas, b_alpha_rstds, b_coefs = factors(b_score, b_rstd, b_lse, p_count, n_blocks, max_blocks, D)
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
            b_alpha, b_c, b_slope_c = pick(b_alphas, b_cs, b_slope_cs, max_blocks)
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
