"""Device code that several modules share: where rows of dy lie, and blocks of columns.

On Ascend (`block_columns`) the last block of a row is moved back. On CUDA (`column_block`, `load_row`, `store_row`) blocks
are powers of two, masked at the row's end where they do not divide it.
"""

from npu_tiling.device import load_block, places_below, store_block, tl, triton


@triton.jit
def dy_offset(i_dy, n_part, s_part, s_dy, IN_PARTS: tl.constexpr):
    """Where row `i_dy` of dy begins; IN_PARTS: of parts of `n_part` rows."""
    if IN_PARTS:
        i_part = i_dy // n_part
        return i_part.to(tl.int64) * s_part + (i_dy - i_part * n_part).to(tl.int64) * s_dy
    else:
        return i_dy.to(tl.int64) * s_dy


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


@triton.jit
def column_block(i_block, BLOCK_N: tl.constexpr):
    """Columns [BLOCK_N] of a block."""
    return i_block * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def load_row(p_row, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """A block [BLOCK_N] of the row of N at `p_row`."""
    return load_block(p_row + o_col, m_block=places_below(o_col, N, N % BLOCK_N == 0))


@triton.jit
def store_row(p_row, b_row, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores a block [BLOCK_N] of the row of N at `p_row`, in the dtype of the memory."""
    b_row = b_row.to(p_row.dtype.element_ty)
    store_block(p_row + o_col, b_row, m_block=places_below(o_col, N, N % BLOCK_N == 0))
