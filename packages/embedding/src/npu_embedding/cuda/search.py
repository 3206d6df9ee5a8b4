"""Device code of the gradient of few indices on CUDA: every program looks through all of them, in place of a sort.

The rows of dy of one row of the table are added in their order, in fp32, and rounded once.
"""

import triton
import triton.language as tl

from ..formula import named_row
from .columns import block_columns, load_row, store_row


@triton.jit(do_not_specialize=["n", "n_rows", "first_row", "i_padding"])
def sum_searched_kernel(
    p_dy,
    p_index,
    p_dweight,  # zeros beforehand
    n,
    n_rows,
    first_row,
    i_padding,  # the row that gets no gradient, -1 for none
    s_dy,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least n
):
    """Program i stores a block of the row that index i names, unless an index before i names the row."""
    i_block = tl.program_id(0) // n
    i = tl.program_id(0) - i_block * n
    o_m = tl.arange(0, BLOCK_M)
    i_row = named_row(tl.load(p_index + i), n_rows, first_row, i_padding)
    b_row = named_row(tl.load(p_index + o_m, mask=o_m < n, other=0), n_rows, first_row, i_padding)  # [BLOCK_M]
    m_same = (b_row == i_row) & (o_m < n)
    i_dy = tl.min(tl.where(m_same, o_m, BLOCK_M), axis=0)
    if (i_dy == i) & (i_row < n_rows):
        o_col = block_columns(i_block, BLOCK_N)
        n_same = tl.sum(m_same.to(tl.int32), axis=0)
        b_sum = tl.zeros([BLOCK_N], tl.float32)
        for _ in tl.range(0, n_same):
            b_sum += load_row(p_dy + i_dy.to(tl.int64) * s_dy, o_col, N, BLOCK_N).to(tl.float32)
            i_dy = tl.min(tl.where(m_same & (o_m > i_dy), o_m, BLOCK_M), axis=0)
        if SCALE_BY_COUNT:
            b_sum = b_sum / n_same.to(tl.float32)
        store_row(p_dweight + i_row * N, b_sum, o_col, N, BLOCK_N)
