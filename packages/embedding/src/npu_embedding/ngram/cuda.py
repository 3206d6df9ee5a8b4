"""The n-gram look-up on CUDA, as ascend.py has it: the kernel and its grid. Integers of 64 bits are its own here."""

from math import ceil

from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling

from ..formula import column_block


@triton.jit
def load_tokens(p_ids, p_history, o_place, n, n_tokens, eos, SHIFT: tl.constexpr, CONTEXT: tl.constexpr):
    """int64 [BLOCK_M]: the ids SHIFT places before each token; before the first the history, or EOS."""
    i_batch = o_place // n_tokens
    i_source = o_place - i_batch * n_tokens - SHIFT
    b_id = tl.load(p_ids + o_place - SHIFT, mask=(o_place < n) & (i_source >= 0), other=eos).to(tl.int64)
    if (p_history is not None) and SHIFT > 0:
        p_before = p_history + i_batch * CONTEXT + CONTEXT + i_source
        b_before = tl.load(p_before, mask=(o_place < n) & (i_source < 0), other=eos).to(tl.int64)
        b_id = tl.where(i_source < 0, b_before, b_id)
    return b_id


@triton.jit
def mixed_tokens(
    p_ids, p_history, p_factors, o_place, n, n_tokens, n_terms, eos, fill, CONTEXT: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """int64 [BLOCK_M]: products of the n_terms ids that end with each token and factors, added or by exclusive or."""
    b_mixed = load_tokens(p_ids, p_history, o_place, n, n_tokens, eos, 0, CONTEXT) * tl.load(p_factors)
    m_apart = o_place < 0  # EOS stands between
    for k in tl.static_range(1, CONTEXT + 1):
        b_id = load_tokens(p_ids, p_history, o_place, n, n_tokens, eos, k, CONTEXT)
        m_apart = m_apart | (b_id == eos)
        b_term = tl.where(m_apart, fill, b_id) * tl.load(p_factors + k)
        b_mixed = tl.where(k < n_terms, b_mixed + b_term if ADD else b_mixed ^ b_term, b_mixed)
    return b_mixed


@triton.jit
def find_rows(b_mixed, p_sizes, p_offsets, i_head, n_rows):
    """int64 [BLOCK_M]: the row of the table of each token for one head; -1 where the table does not have the head's rows."""
    i_size, i_offset = tl.load(p_sizes + i_head), tl.load(p_offsets + i_head)
    has = (i_size > 0) & (i_size <= n_rows) & (i_offset >= 0) & (i_offset <= n_rows - i_size)
    i_size = tl.where(has, i_size, 1)
    b_rest = b_mixed % i_size  # with the sign of the number
    return tl.where(has, tl.where(b_rest < 0, b_rest + i_size, b_rest) + i_offset, -1)


@triton.jit(do_not_specialize=["n", "n_tokens", "n_rows", "eos", "fill"])
def ngram_rows_kernel(
    # As those of Ascend's kernel; n: tokens of all sequences.
    p_ids, p_history, p_multipliers, p_sizes, p_offsets, p_table, p_out, p_rows,
    n, n_tokens, n_rows, eos, fill, s_table,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, CONTEXT: tl.constexpr, HEADS: tl.constexpr,
    ADD: tl.constexpr, OWN: tl.constexpr, CONCAT: tl.constexpr, NAN: tl.constexpr,
):  # fmt: skip
    """Finds the rows of the table that n-grams hash to, and copies them (CONCAT) or adds those of a token.

    A program takes BLOCK_M tokens by BLOCK_N columns, of one head where CONCAT, else of all.
    """
    N_HEADS: tl.constexpr = CONTEXT * HEADS
    PARTS: tl.constexpr = N_HEADS if CONCAT else 1
    N_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    o_col = column_block(tl.program_id(0) % N_BLOCKS, BLOCK_N)
    i_part = tl.program_id(0) // N_BLOCKS % PARTS
    o_place = (tl.program_id(0) // (N_BLOCKS * PARTS)).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_tile = (o_place < n)[:, None] & (o_col < N)[None, :]
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_head in tl.range(i_part, i_part + N_HEADS // PARTS):
        p_factors = p_multipliers
        if OWN:
            p_factors += i_head * (CONTEXT + 1)
        n_terms = i_head // HEADS + 2
        b_mixed = mixed_tokens(p_ids, p_history, p_factors, o_place, n, n_tokens, n_terms, eos, fill, CONTEXT, ADD)
        b_row = find_rows(b_mixed, p_sizes, p_offsets, i_head, n_rows)
        tl.store(p_rows + n.to(tl.int64) * i_head + o_place, b_row.to(tl.int32), mask=o_place < n)
        p_tile = p_table + tl.maximum(b_row, 0)[:, None] * s_table + o_col[None, :]
        b_rows = tl.load(
            p_tile, mask=m_tile & (b_row >= 0)[:, None], other=NAN if CONCAT else float("nan")
        )  # [BLOCK_M, BLOCK_N]
        if CONCAT:
            p_tile = p_out + (o_place * N_HEADS + i_head)[:, None] * N + o_col[None, :]
            tl.store(p_tile, b_rows, mask=m_tile)
        else:
            b_sum += b_rows.to(tl.float32)
    if not CONCAT:
        tl.store(p_out + o_place[:, None] * N + o_col[None, :], b_sum.to(p_out.dtype.element_ty), mask=m_tile)


def grid(tiling: CountTiling, n_batches: int, n_tokens: int, heads: int) -> int:
    """Programs, each of which takes tokens through one of the heads, or through all where heads is 1."""
    return ceil(n_batches * n_tokens / tiling.per_program) * tiling.column_blocks * heads
