"""Blocks of columns on Ascend."""

import triton
import triton.language as tl


@triton.jit
def block_columns(i_block, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Columns [BLOCK_N] of a block of a row of N.

    The last block is moved back to end with the row: no transfer needs a mask, and a few columns are computed twice to the
    same bits.
    """
    i_col = i_block * BLOCK_N
    if N % BLOCK_N != 0:
        i_col = tl.minimum(i_col, N - BLOCK_N)
    return i_col + tl.arange(0, BLOCK_N)
