"""Device code of both chips: which row of the table an index names, which sorted positions a program sums, and where
rows of dy lie."""

import triton
import triton.language as tl


@triton.jit
def named_row(b_index, n_rows, first_row, i_padding):
    """int64: the row of this table that each index names, `n_rows` where it names none that gets a gradient."""
    b_row = b_index.to(tl.int64) - first_row
    m_named = (b_row >= 0) & (b_row < n_rows) & (b_row != i_padding)
    return tl.where(m_named, b_row, n_rows)


@triton.jit
def chunk_ends(i_chunk, n_chunks, i_begin, i_end):
    """First and stop of chunk `i_chunk`: the positions from i_begin to before i_end in `n_chunks` pieces of equal length."""
    n_each = tl.cdiv(i_end - i_begin, n_chunks)
    i_first = i_begin + i_chunk * n_each
    return i_first, tl.minimum(i_first + n_each, i_end)


@triton.jit
def dy_offset(i_dy, n_part, s_part, s_dy, IN_PARTS: tl.constexpr):
    """Where row `i_dy` of dy begins; IN_PARTS: of parts of `n_part` rows."""
    if IN_PARTS:
        i_part = i_dy // n_part
        return i_part.to(tl.int64) * s_part + (i_dy - i_part * n_part).to(tl.int64) * s_dy
    else:
        return i_dy.to(tl.int64) * s_dy
