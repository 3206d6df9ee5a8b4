"""Device code of the embedding's backward on CUDA alone: which rows have a run, found beside the sort."""

import triton
import triton.language as tl


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
