"""Device code of the embedding's backward on CUDA alone: which rows have a run, and few indices without a sort."""

import triton
import triton.language as tl

from .tile import block_columns, load_row, store_row


@triton.jit(do_not_specialize=["n", "n_rows", "first", "i_padding"])
def mark_rows_kernel(
    p_index,
    p_key,
    p_marks,  # [n_rows], zeros beforehand
    n,
    n_rows,
    first,
    i_padding,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Marks the rows that have a run and, with KEYS, stores what to sort by: what lies outside stays outside."""
    o_index = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_index = o_index < n
    b_index = tl.load(p_index + o_index, mask=m_index, other=0).to(tl.int64)  # [BLOCK_M]
    b_row = b_index - first
    tl.store(p_marks + b_row, 1, mask=m_index & (b_row >= 0) & (b_row < n_rows) & (b_row != i_padding))
    if KEYS:
        b_key = tl.minimum(tl.maximum(b_index, first.to(tl.int64) - 1), first.to(tl.int64) + n_rows)
        tl.store(p_key + o_index, b_key.to(p_key.dtype.element_ty), mask=m_index)


@triton.jit(do_not_specialize=["n", "n_rows", "first", "i_padding"])
def sum_few_kernel(
    p_dy,
    p_index,
    p_dweight,  # zeros beforehand
    n,
    n_rows,
    first,
    i_padding,  # the row that gets no gradient, -1 for none
    s_dy,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least n
):
    """The gradient of few indices without a sort: every program looks through all of them.

    Program i stores the row that index i names, a block of its columns, unless an index before i names it.

    Its rows of dy are added in their order, in fp32.
    """
    i_block = tl.program_id(0) // n
    i = tl.program_id(0) - i_block * n
    o_m = tl.arange(0, BLOCK_M)
    i_row = tl.load(p_index + i).to(tl.int64) - first
    b_row = tl.load(p_index + o_m, mask=o_m < n, other=0).to(tl.int64) - first  # [BLOCK_M]
    m_same = (b_row == i_row) & (o_m < n)
    i_dy = tl.min(tl.where(m_same, o_m, BLOCK_M), axis=0)
    if (i_dy == i) & (i_row >= 0) & (i_row < n_rows) & (i_row != i_padding):
        o_col = block_columns(i_block, N, BLOCK_N, MASK_COLUMNS)
        n_same = tl.sum(m_same.to(tl.int32), axis=0)
        b_sum = tl.zeros([BLOCK_N], tl.float32)
        for _ in tl.range(0, n_same):
            b_sum += load_row(p_dy + i_dy.to(tl.int64) * s_dy, o_col, N, MASK_COLUMNS).to(tl.float32)
            i_dy = tl.min(tl.where(m_same & (o_m > i_dy), o_m, BLOCK_M), axis=0)
        if SCALE_BY_COUNT:
            b_sum = b_sum / n_same.to(tl.float32)
        store_row(p_dweight + i_row * N, b_sum, o_col, N, MASK_COLUMNS)
