"""Blocks of columns, and rows of a tile.

With MASK_COLUMNS the last block is masked (CUDA, where a block is a power of two); otherwise it is moved
back to end with the row, so that no transfer needs a mask, and a few columns are computed twice to the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def block_columns(i_block, N: tl.constexpr, BLOCK_N: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """Columns [BLOCK_N] of a block."""
    i_col = i_block * BLOCK_N
    if N % BLOCK_N != 0 and not MASK_COLUMNS:
        i_col = tl.minimum(i_col, N - BLOCK_N)
    return i_col + tl.arange(0, BLOCK_N)


@triton.jit
def load_row(p_row, o_col, N: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A block [BLOCK_N] of the row at `p_row`."""
    if MASK_COLUMNS:
        return tl.load(p_row + o_col, mask=o_col < N, other=0.0)
    else:
        return tl.load(p_row + o_col)


@triton.jit
def store_row(p_row, b_row, o_col, N: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """Stores a block [BLOCK_N] of the row at `p_row`, in the dtype of the memory."""
    b_row = b_row.to(p_row.dtype.element_ty)
    if MASK_COLUMNS:
        tl.store(p_row + o_col, b_row, mask=o_col < N)
    else:
        tl.store(p_row + o_col, b_row)
