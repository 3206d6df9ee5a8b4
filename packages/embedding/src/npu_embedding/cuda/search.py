"""Device code of the gradient of few indices on CUDA: there is no sort, since each program scans all indices.

One launch. There is a program for each place in the indices and each block of columns. It sums the row that its index names
if that index is the row's first one; otherwise it ends. Further programs store zeros in rows that get no gradient. Rows of
dy are loaded a tile at a time, in the order of the indices. Sums are fp32, rounded once; each row of dweight is stored once.
"""

import triton
import triton.language as tl

from ..formula import dy_offset
from .columns import block_columns, store_row
from .rank import load_keys
from .sums import store_zeros


@triton.jit
def either(a, b):
    """Bitwise or."""
    return a | b


@triton.jit
def sum_named(
    p_dy,
    p_index,
    p_dweight,
    n,
    n_rows,
    first_row,
    i_padding,
    n_part,
    s_part,
    s_dy,
    i,
    i_row,
    n_equal,
    o_col,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """Stores one block of columns of `i_row`: the sum of dy at the places from `i` on whose index names that row."""
    b_sum = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    n_left = n_equal
    i_tile = i // BLOCK_K * BLOCK_K
    while (n_left > 0) & (i_tile < n):
        o_i = i_tile + tl.arange(0, BLOCK_K)
        m_equal = load_keys(p_index, o_i, n, n_rows, first_row, i_padding) == i_row  # [BLOCK_K]
        n_tile = tl.sum(m_equal.to(tl.int32), axis=0)
        if n_tile > 0:
            p_rows = p_dy + dy_offset(o_i, n_part, s_part, s_dy, IN_PARTS)
            m_tile = m_equal[:, None]
            if N % BLOCK_N != 0:
                m_tile = m_tile & (o_col < N)[None, :]
            b_sum += tl.load(p_rows[:, None] + o_col[None, :], mask=m_tile, other=0.0).to(tl.float32)
        n_left -= n_tile
        i_tile += BLOCK_K
    b_row = tl.sum(b_sum, axis=0)
    if SCALE_BY_COUNT:
        b_row = b_row / n_equal
    store_row(p_dweight + i_row * N, b_row, o_col, N, BLOCK_N)


@triton.jit(do_not_specialize=["n", "n_rows", "first_row", "i_padding", "n_part"])
def sum_searched_kernel(
    p_dy,
    p_index,
    p_dweight,
    n,  # at most BLOCK_M
    n_rows,
    first_row,
    i_padding,  # the row that gets no gradient, -1 for none
    n_part,  # rows of a part of dy
    s_part,
    s_dy,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
    IN_PARTS: tl.constexpr,
    ZERO_M: tl.constexpr,  # at most 32
    ZERO_N: tl.constexpr,
):
    """One row of the table in one block of columns, or zeros in those of ZERO_M rows that get no gradient."""
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n_sums = n * n_blocks
    o_m = tl.arange(0, BLOCK_M)
    b_row = load_keys(p_index, o_m, n, n_rows, first_row, i_padding)  # [BLOCK_M]
    if tl.program_id(0) < n_sums:
        i = tl.program_id(0) // n_blocks
        i_row = load_keys(p_index, i, n, n_rows, first_row, i_padding)
        m_equal = b_row == i_row
        n_before = tl.sum((m_equal & (o_m < i)).to(tl.int32), axis=0)
        if (n_before == 0) & (i_row < n_rows):
            o_col = block_columns(tl.program_id(0) % n_blocks, BLOCK_N)
            n_equal = tl.sum(m_equal.to(tl.int32), axis=0)
            # fmt: off
            sum_named(
                p_dy, p_index, p_dweight, n, n_rows, first_row, i_padding, n_part, s_part, s_dy, i, i_row, n_equal, o_col,
                N, BLOCK_K, BLOCK_N, SCALE_BY_COUNT, IN_PARTS,
            )
            # fmt: on
    else:
        i_row = (tl.program_id(0) - n_sums).to(tl.int64) * ZERO_M
        b_place = b_row - i_row
        b_bit = tl.where((b_place >= 0) & (b_place < ZERO_M), 1 << (b_place & 31).to(tl.int32), 0)
        i_bits = tl.reduce(b_bit, 0, either)  # bit r: row i_row + r gets a gradient
        o_z = tl.arange(0, ZERO_M)
        m_zero = (((i_bits >> o_z) & 1) == 0) & (o_z < n_rows - i_row)
        store_zeros(p_dweight, i_row, m_zero, N, ZERO_M, ZERO_N)
