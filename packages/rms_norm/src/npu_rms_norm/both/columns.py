"""Blocks of columns of single rows, and where rows lie.

Rows lie on two levels, n_outer groups of n_inner rows, and every tensor has a stride for each level: a slice of a wider
tensor is read in place. ORDER says which rows a program takes:

    "one"      there is one group
    "groups"   the rows of all groups, group after group
    "heads"    a group is a head with parameters of its own: a program takes rows of one head
"""

import triton
import triton.language as tl


@triton.jit
def rows_of_program(i_program, n_programs, n_outer, n_inner, ORDER: tl.constexpr):
    """This program's first row, where its rows stop, the step between them, and its head. Heads count their own rows."""
    if ORDER == "heads":
        return i_program // n_outer, n_inner, n_programs // n_outer, i_program % n_outer
    elif ORDER == "groups":
        return i_program, n_outer * n_inner, n_programs, 0
    else:
        return i_program, n_inner, n_programs, 0


@triton.jit
def row_position(i_row, i_head, n_inner, ORDER: tl.constexpr):
    """Group, and row of that group, of one of `rows_of_program`; and its number among all rows."""
    if ORDER == "heads":
        return i_head, i_row, tl.cast(i_head, tl.int64) * n_inner + i_row
    elif ORDER == "groups":
        i_outer = i_row // n_inner
        return i_outer, i_row - i_outer * n_inner, i_row
    else:
        return 0, i_row, i_row


@triton.jit
def result_strides(n_outer, n_inner, N: tl.constexpr, BY_HEAD: tl.constexpr):
    """From group to group and from row to row of a contiguous tensor; BY_HEAD: the heads of a token stand side by side."""
    if BY_HEAD:
        return N, tl.cast(n_outer, tl.int64) * N
    else:
        return tl.cast(n_inner, tl.int64) * N, N


@triton.jit
def row_at(p_rows, s_outer, s_inner, i_outer, i_inner):
    """The first element of a row; None for None."""
    if p_rows is not None:
        return p_rows + tl.cast(i_outer, tl.int64) * s_outer + tl.cast(i_inner, tl.int64) * s_inner


@triton.jit
def load_columns(p_row, i_col, N: tl.constexpr, BLOCK_N: tl.constexpr, EVICTION: tl.constexpr):
    """fp32 [1, BLOCK_N], zero past the row's end."""
    p_block = p_row + i_col + tl.arange(0, BLOCK_N)[None, :]
    if N % BLOCK_N == 0:
        return tl.load(p_block, eviction_policy=EVICTION).to(tl.float32)
    else:
        m_block = (tl.arange(0, BLOCK_N) < N - i_col)[None, :]
        return tl.load(p_block, mask=m_block, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def store_columns(p_row, b_block, i_col, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rounds [1, BLOCK_N] to the tensor's dtype (of y, dx and dgate the last rounding), and stores it."""
    p_block = p_row + i_col + tl.arange(0, BLOCK_N)[None, :]
    b_block = b_block.to(p_row.dtype.element_ty)
    if N % BLOCK_N == 0:
        tl.store(p_block, b_block)
    else:
        tl.store(p_block, b_block, mask=(tl.arange(0, BLOCK_N) < N - i_col)[None, :])
