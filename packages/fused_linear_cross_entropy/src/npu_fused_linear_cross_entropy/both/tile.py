"""Tiles of logits: where they begin, how kernels load them, and store their gradient. Formulas: formula.py."""

import triton
import triton.language as tl

from ..formula import gradient_of_raw, logits_of_raw


@triton.jit
def tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M: tl.constexpr):
    """A tile's first row, how many rows are left, the mask of those, and where the first one is."""
    i_row = i_tile * BLOCK_M
    n_left = n_rows - i_row
    m_row = tl.arange(0, BLOCK_M) < n_left
    return i_row, n_left, m_row, p_logits + i_row.to(tl.int64) * s_logits


@triton.jit
def logits_mask(n_rows, n_cols, M: tl.constexpr, N: tl.constexpr, EXACT_N: tl.constexpr):
    """What of a tile lies inside, given how many rows and columns are left."""
    if EXACT_N:
        m_tile = (tl.arange(0, M) < n_rows)[:, None]
    elif M > 1:
        m_tile = (tl.arange(0, M) < n_rows)[:, None] & (tl.arange(0, N) < n_cols)[None, :]
    else:
        m_tile = (tl.arange(0, N) < n_cols)[None, :]
    return m_tile


@triton.jit
def load_columns(p_vector, o_col, n_cols, EXACT_N: tl.constexpr):
    """fp32 [1, BLOCK_N] of a vector over the vocabulary."""
    if EXACT_N:
        b_vector = tl.load(p_vector + o_col)
    else:
        b_vector = tl.load(p_vector + o_col, mask=o_col < n_cols, other=0.0)
    return b_vector.to(tl.float32)[None, :]


@triton.jit
def load_raw(
    p_row, i_col, s_row, n_rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr,
    PADDED: tl.constexpr
):  # fmt: skip
    """Logits as in memory, [BLOCK_M, BLOCK_N], of the columns from i_col on; what lies outside is some finite number.

    PADDED: rows after the last one are memory too. Without a mask nothing is filled in before a load, for which CANN 8.5
    makes every load wait, and so for all arithmetic.
    """
    p_tile = p_row + (tl.arange(0, BLOCK_M)[:, None] * s_row + (i_col + tl.arange(0, BLOCK_N))[None, :])
    if EXACT_N and (PADDED or BLOCK_M == 1):
        b_raw = tl.load(p_tile)
    else:
        m_tile = logits_mask(n_rows, N - i_col, BLOCK_M, BLOCK_N, EXACT_N)
        b_raw = tl.load(p_tile, mask=m_tile, other=0.0)
    return b_raw


@triton.jit
def logits_of_tile(
    b_raw, i_col, p_bias, logit_scale, softcap, N: tl.constexpr, BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr,
    SCALED: tl.constexpr, SOFTCAP: tl.constexpr
):  # fmt: skip
    """z, fp32, of a tile of `load_raw`."""
    b_raw = b_raw.to(tl.float32)
    b_bias = 0.0
    if p_bias is not None:
        b_bias = load_columns(p_bias, i_col + tl.arange(0, BLOCK_N), N, EXACT_N)
    return logits_of_raw(b_raw, b_bias, logit_scale, softcap, p_bias is not None, SCALED, SOFTCAP)


@triton.jit
def load_logits(
    p_row, i_col, s_row, n_rows, p_bias, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, PADDED: tl.constexpr = False
):  # fmt: skip
    """z, fp32 [BLOCK_M, BLOCK_N], of the columns from i_col on; what lies outside is some finite number."""
    b_raw = load_raw(p_row, i_col, s_row, n_rows, N, BLOCK_M, BLOCK_N, EXACT_N, PADDED)
    return logits_of_tile(b_raw, i_col, p_bias, logit_scale, softcap, N, BLOCK_N, EXACT_N, SCALED, SOFTCAP)


@triton.jit
def load_tail(
    p_row, s_logits, n_left, p_bias, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """z of the columns behind the last whole block, [BLOCK_M, TAIL_N]; a number where there are none."""
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    b_tail = 0.0
    if TAIL_N > 0:
        b_tail = load_logits(
            p_row, N_FULL, s_logits, n_left, p_bias, logit_scale, softcap, N, BLOCK_M, TAIL_N, N_FULL + TAIL_N == N, SCALED,
            SOFTCAP, PADDED
        )  # fmt: skip
    return b_tail


@triton.jit
def target_column(b_column, N: tl.constexpr):
    """Whether int32 columns [BLOCK_M] are columns here, and those, or others that are."""
    b_number = b_column.to(tl.float32)  # compares of integers are loops over elements on Ascend; exact below 2^24
    return (b_number >= 0.0) & (b_number < N), tl.minimum(tl.maximum(b_column, 0), N - 1)


@triton.jit
def target_logit(
    p_row, m_here, b_safe, s_logits, n_left, p_bias, logit_scale, softcap, BLOCK_M: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr
):  # fmt: skip
    """z of the rows' targets, [BLOCK_M], 0 where those are no columns here; the rest as `target_column` returns it."""
    # One load for each row; a row that has no target here loads another column and drops it.
    b_z = tl.load(p_row + tl.minimum(tl.arange(0, BLOCK_M), n_left - 1) * s_logits + b_safe).to(tl.float32)
    b_bias = 0.0
    if p_bias is not None:
        b_bias = tl.load(p_bias + b_safe).to(tl.float32)
    b_z = logits_of_raw(b_z, b_bias, logit_scale, softcap, p_bias is not None, SCALED, SOFTCAP)
    return tl.where(m_here, b_z, 0.0)


@triton.jit
def store_tile(
    p_row, b_tile, i_col, s_row, n_rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EXACT_N: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores a tile [BLOCK_M, BLOCK_N] at the columns from i_col on, in the dtype of what it points to."""
    p_tile = p_row + (tl.arange(0, BLOCK_M)[:, None] * s_row + (i_col + tl.arange(0, BLOCK_N))[None, :])
    b_tile = b_tile.to(p_row.dtype.element_ty)
    if BARRIER:
        tl.debug_barrier()  # other threads may still have to load what this one overwrites
    if BLOCK_M == 1 and EXACT_N:
        tl.store(p_tile, b_tile)
    else:
        tl.store(p_tile, b_tile, mask=logits_mask(n_rows, N - i_col, BLOCK_M, BLOCK_N, EXACT_N))


@triton.jit
def store_gradient(
    p_row, b_z, b_lse, b_a, b_b, b_c, b_q, b_target, i_col, s_row, n_rows, p_class_weight, logit_scale, softcap,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr, SMOOTHED: tl.constexpr,
    ENTROPY: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the gradient of the raw logits of a tile, given z and the rows' factors."""
    o_lane = tl.arange(0, BLOCK_N)
    b_g = tl.exp(b_z - b_lse[:, None])
    if ENTROPY:
        b_g *= b_a[:, None] + b_q[:, None] * b_z
    else:
        b_g *= b_a[:, None]
    if SMOOTHED:
        if p_class_weight is not None:
            b_g -= b_c[:, None] * load_columns(p_class_weight, i_col + o_lane, N, EXACT_N)
        else:
            b_g -= b_c[:, None]
    # fp32 compares: those of integers are loops over elements on Ascend. Exact below 2^24; a
    # larger distance is never rounded to less, so that it equals no column.
    m_target = (b_target - i_col)[:, None].to(tl.float32) == o_lane[None, :].to(tl.float32)
    b_g = gradient_of_raw(b_g, b_z, b_b, m_target, logit_scale, softcap, SCALED, SOFTCAP)
    store_tile(p_row, b_g, i_col, s_row, n_rows, N, BLOCK_M, BLOCK_N, EXACT_N, BARRIER)
