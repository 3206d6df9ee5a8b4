"""Blocks of columns on CUDA: powers of two, masked at the row's end where they do not divide it."""

import triton
import triton.language as tl


@triton.jit
def block_columns(i_block, BLOCK_N: tl.constexpr):
    """Columns [BLOCK_N] of a block."""
    return i_block * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def load_row(p_row, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """A block [BLOCK_N] of the row of N at `p_row`."""
    if N % BLOCK_N == 0:
        return tl.load(p_row + o_col)
    else:
        return tl.load(p_row + o_col, mask=o_col < N, other=0.0)


@triton.jit
def store_row(p_row, b_row, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores a block [BLOCK_N] of the row of N at `p_row`, in the dtype of the memory."""
    b_row = b_row.to(p_row.dtype.element_ty)
    if N % BLOCK_N == 0:
        tl.store(p_row + o_col, b_row)
    else:
        tl.store(p_row + o_col, b_row, mask=o_col < N)
