"""Tiles of logits: where they begin, how kernels load them, and store their gradient. Formulas: formula.py."""

import triton
import triton.language as tl

from ..formula import VANISHES, logits_of_raw


@triton.jit
def tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M: tl.constexpr):
    """A tile's first row, the number of rows from it on, their mask, and the pointer to the first."""
    i_row = i_tile * BLOCK_M
    n_left = n_rows - i_row
    m_row = tl.arange(0, BLOCK_M) < n_left
    return i_row, n_left, m_row, p_logits + i_row.to(tl.int64) * s_logits


@triton.jit
def logits_mask(n_rows, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of a tile are in its first `n_rows` rows, or in any for None, and in its COLUMNS columns."""
    if COLUMNS == BLOCK_N:
        m_tile = (tl.arange(0, BLOCK_M) < n_rows)[:, None]
    elif (BLOCK_M > 1) and (n_rows is not None):
        m_tile = (tl.arange(0, BLOCK_M) < n_rows)[:, None] & (tl.arange(0, BLOCK_N) < COLUMNS)[None, :]
    else:
        m_tile = (tl.arange(0, BLOCK_N) < COLUMNS)[None, :]
    return m_tile


@triton.jit
def load_columns(p_vector, i_col, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 [1, BLOCK_N] of a vector over the vocabulary, from i_col on."""
    o_col = i_col + tl.arange(0, BLOCK_N)
    if COLUMNS == BLOCK_N:
        b_vector = tl.load(p_vector + o_col)
    else:
        b_vector = tl.load(p_vector + o_col, mask=o_col < i_col + COLUMNS, other=0.0)
    return b_vector.to(tl.float32)[None, :]


@triton.jit
def load_logits(
    p_row, i_col, s_row, n_rows, p_bias, logit_scale, softcap, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """z, fp32 [BLOCK_M, BLOCK_N], of COLUMNS columns from i_col on; elements outside are finite.

    n_rows: how many rows there are; None where the memory has whole tiles. A masked load fills its
    tile with zeros first; compiled by CANN 8.5 it then waits for all arithmetic before it. Without a mask there is no fill.
    """
    p_tile = p_row + (tl.arange(0, BLOCK_M)[:, None] * s_row + (i_col + tl.arange(0, BLOCK_N))[None, :])
    if (COLUMNS == BLOCK_N) and ((n_rows is None) or (BLOCK_M == 1)):
        b_raw = tl.load(p_tile)
    else:
        b_raw = tl.load(p_tile, mask=logits_mask(n_rows, COLUMNS, BLOCK_M, BLOCK_N), other=0.0)
    b_bias = None
    if p_bias is not None:
        b_bias = load_columns(p_bias, i_col, COLUMNS, BLOCK_N)
    return logits_of_raw(b_raw.to(tl.float32), b_bias, logit_scale, softcap)


@triton.jit
def load_tail(
    p_row, s_row, n_rows, p_bias, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr
):  # fmt: skip
    """z of the columns behind the last whole block, [BLOCK_M, TAIL_N]; a number where there are none."""
    b_tail = 0.0
    if TAIL_N > 0:
        b_tail = load_logits(
            p_row, N // BLOCK_N * BLOCK_N, s_row, n_rows, p_bias, logit_scale, softcap, N % BLOCK_N, BLOCK_M, TAIL_N
        )
    return b_tail


@triton.jit
def target_column(b_column, N: tl.constexpr):
    """Whether int32 columns [BLOCK_M] are in the chunk, and the columns clamped to it."""
    b_number = b_column.to(tl.float32)  # compares of integers are loops over elements on Ascend; exact below 2^24
    return (b_number >= 0.0) & (b_number < N), tl.minimum(tl.maximum(b_column, 0), N - 1)


@triton.jit
def target_logit(p_row, m_here, b_safe, s_row, n_rows, p_bias, logit_scale, softcap):
    """z of the rows' targets, [BLOCK_M], 0 outside the chunk; m_here, b_safe: as `target_column` returns."""
    # One load for each row; a row whose target is outside loads another column and drops it.
    b_raw = tl.load(p_row + tl.minimum(tl.arange(0, m_here.shape[0]), n_rows - 1) * s_row + b_safe).to(tl.float32)
    b_bias = None
    if p_bias is not None:
        b_bias = tl.load(p_bias + b_safe).to(tl.float32)
    return tl.where(m_here, logits_of_raw(b_raw, b_bias, logit_scale, softcap), 0.0)


@triton.jit
def store_tile(p_row, b_tile, i_col, s_row, n_rows, COLUMNS: tl.constexpr, BARRIER: tl.constexpr):
    """Stores a tile [BLOCK_M, BLOCK_N] at COLUMNS columns from i_col on, in the pointer's dtype."""
    BLOCK_M: tl.constexpr = b_tile.shape[0]
    BLOCK_N: tl.constexpr = b_tile.shape[1]
    p_tile = p_row + (tl.arange(0, BLOCK_M)[:, None] * s_row + (i_col + tl.arange(0, BLOCK_N))[None, :])
    b_tile = b_tile.to(p_row.dtype.element_ty)
    if BARRIER:
        tl.debug_barrier()  # other threads may still have to load the elements that this thread overwrites
    if (BLOCK_M == 1) and (COLUMNS == BLOCK_N):
        tl.store(p_tile, b_tile)
    else:
        tl.store(p_tile, b_tile, mask=logits_mask(n_rows, COLUMNS, BLOCK_M, BLOCK_N))


@triton.jit
def is_column(b_place, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N], whether a column is at its row's place, [BLOCK_M], counted from the first column."""
    # Compares of integers are loops over elements on Ascend. fp32 is exact below 2^24, and never rounds a larger distance to
    # a column's number.
    return b_place[:, None].to(tl.float32) == tl.arange(0, BLOCK_N)[None, :].to(tl.float32)


@triton.jit
def gradient_of_logits(
    b_z, b_reference, b_a, b_b, b_c, b_q, b_column, i_col, p_class_weight, COLUMNS: tl.constexpr
):  # fmt: skip
    """exp(z - k) (a + q (z - k)) - c w - b [column = target] of a tile; None for no c, no q, no class weights w."""
    b_d = b_z - b_reference[:, None]
    b_g = tl.exp(b_d)
    if b_q is not None:
        b_g *= b_a[:, None] + b_q[:, None] * tl.maximum(b_d, VANISHES)  # 0 times minus infinity is no number
    else:
        b_g *= b_a[:, None]
    if b_c is not None:
        if p_class_weight is not None:
            b_g -= b_c[:, None] * load_columns(p_class_weight, i_col, COLUMNS, b_z.shape[1])
        else:
            b_g -= b_c[:, None]
    return tl.where(is_column(b_column - i_col, b_z.shape[1]), b_g - b_b[:, None], b_g)
