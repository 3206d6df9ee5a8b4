# mypy: ignore-errors
"""Parts of the cross entropy's kernels: tiles of logits, their statistics, their gradient. Formulas: kernels.py."""

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # finite, so that differences of two of them are
VANISHES: tl.constexpr = tl.constexpr(-200.0)  # exp of it is 0 in fp32
NO_COLUMN: tl.constexpr = tl.constexpr(1.0e9)  # above every column number


@triton.jit
def tile_mask(n_rows, n_cols, M: tl.constexpr, N: tl.constexpr, EXACT_N: tl.constexpr):
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
def transform(b_raw, b_bias, logit_scale, softcap, BIASED: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr):
    """z of raw logits."""
    b_z = b_raw
    if BIASED:
        b_z += b_bias
    if SCALED:
        b_z *= logit_scale
    if SOFTCAP:
        b_e = tl.exp(tl.abs(b_z) * (-2.0 / softcap))
        b_tanh = (1.0 - b_e) / (1.0 + b_e)
        b_z = softcap * tl.where(b_z < 0.0, -b_tanh, b_tanh)
    return b_z


@triton.jit
def load_logits(
    p_row,
    i_col,
    s_row,
    n_rows,
    p_bias,
    logit_scale,
    softcap,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT_N: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """z, fp32 [BLOCK_M, BLOCK_N], of the columns from i_col on; what lies outside is some finite number."""
    o_col = i_col + tl.arange(0, BLOCK_N)
    p_tile = p_row + (tl.arange(0, BLOCK_M)[:, None] * s_row + o_col[None, :])
    if BLOCK_M == 1 and EXACT_N:
        b_raw = tl.load(p_tile).to(tl.float32)
    else:
        m_tile = tile_mask(n_rows, N - i_col, BLOCK_M, BLOCK_N, EXACT_N)
        b_raw = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    b_bias = 0.0
    if p_bias is not None:
        b_bias = load_columns(p_bias, o_col, N, EXACT_N)
    return transform(b_raw, b_bias, logit_scale, softcap, p_bias is not None, SCALED, SOFTCAP)


@triton.jit
def store_gradient(
    p_row,
    b_z,
    b_lse,
    b_a,
    b_b,
    b_c,
    b_q,
    b_target,
    i_col,
    s_row,
    n_rows,
    p_class_weight,
    logit_scale,
    softcap,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXACT_N: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BARRIER: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Stores the gradient of the raw logits of a tile, given z and the rows' factors; KEEP: z less b_lse."""
    o_lane = tl.arange(0, BLOCK_N)
    if KEEP:
        b_g = b_z - b_lse[:, None]
    else:
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
        # fp32 compares: those of integers are loops over elements on Ascend. Exact below 2^24, and rounded never below that.
        m_target = (b_target - i_col)[:, None].to(tl.float32) == o_lane[None, :].to(tl.float32)
        b_g = tl.where(m_target, b_g - b_b[:, None], b_g)
        if SOFTCAP:
            b_t = b_z * (1.0 / softcap)
            b_g *= 1.0 - b_t * b_t
        if SCALED:
            b_g *= logit_scale
    p_tile = p_row + (tl.arange(0, BLOCK_M)[:, None] * s_row + (i_col + o_lane)[None, :])
    b_g = b_g.to(p_row.dtype.element_ty)
    if BARRIER:
        tl.debug_barrier()  # other threads may still have to load what this one overwrites
    if BLOCK_M == 1 and EXACT_N:
        tl.store(p_tile, b_g)
    else:
        tl.store(p_tile, b_g, mask=tile_mask(n_rows, N - i_col, BLOCK_M, BLOCK_N, EXACT_N))


@triton.jit
def tile_statistics(
    b_z, i_col, p_class_weight, N: tl.constexpr, BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr, SMOOTHED: tl.constexpr,
    ENTROPY: tl.constexpr, ARGMAX: tl.constexpr
):  # fmt: skip
    """Statistics [BLOCK_M] of one tile: maximum, sum of exp, sum of (weighted) z, sum of exp times z, first maximum."""
    o_lane = tl.arange(0, BLOCK_N)
    b_dot, b_total, b_index = 0.0, 0.0, 0.0
    if not EXACT_N:
        m_col = (o_lane < N - i_col)[None, :]
        b_seen = tl.where(m_col, b_z, LOWEST)
    else:
        b_seen = b_z
    b_max = tl.maximum(tl.max(b_seen, axis=1), LOWEST)
    b_d = b_seen - b_max[:, None]
    b_e = tl.exp(b_d)
    b_sum = tl.sum(b_e, axis=1)
    if ENTROPY:
        b_dot = tl.sum(b_e * tl.maximum(b_d, VANISHES), axis=1)
    if SMOOTHED:
        b_w = b_z
        if p_class_weight is not None:
            b_w = b_z * load_columns(p_class_weight, i_col + o_lane, N, EXACT_N)
        if not EXACT_N:
            b_w = tl.where(m_col, b_w, 0.0)
        b_total = tl.sum(b_w, axis=1)
    if ARGMAX:
        b_col = i_col + o_lane[None, :].to(tl.float32) + tl.zeros(b_z.shape, tl.float32)
        b_index = tl.min(tl.where(b_seen == b_max[:, None], b_col, NO_COLUMN), axis=1)
    return b_max, b_sum, b_total, b_dot, b_index


@triton.jit
def merge(
    b_max, b_sum, b_dot, b_index, b_max2, b_sum2, b_dot2, b_index2, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr
):  # fmt: skip
    """Statistics of earlier columns and of later ones together."""
    b_top = tl.maximum(b_max, b_max2)
    b_d, b_d2 = b_max - b_top, b_max2 - b_top
    b_e, b_e2 = tl.exp(b_d), tl.exp(b_d2)
    if ENTROPY:
        b_dot = b_e * (b_dot + b_d * b_sum) + b_e2 * (b_dot2 + b_d2 * b_sum2)
    if ARGMAX:
        b_index = tl.where(b_max2 > b_max, b_index2, b_index)
    return b_top, b_e * b_sum + b_e2 * b_sum2, b_dot, b_index


@triton.jit
def sweep_statistics(
    p_row, i_end, s_row, n_rows, p_bias, p_class_weight, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr
):  # fmt: skip
    """Statistics [BLOCK_M] of the columns before i_end, a multiple of BLOCK_N; one exp for each logit."""
    o_lane = tl.arange(0, BLOCK_N)
    b_maxima = tl.full([BLOCK_M, BLOCK_N], LOWEST, tl.float32)
    b_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_dot, b_total, b_index = 0.0, 0.0, 0.0
    if ENTROPY:
        b_dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SMOOTHED:
        b_totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if ARGMAX:
        b_places = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # in blocks
    for i_col in tl.range(0, i_end, BLOCK_N):
        b_z = load_logits(
            p_row, i_col, s_row, n_rows, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, True, SCALED, SOFTCAP
        )  # fmt: skip
        if SMOOTHED:
            if p_class_weight is not None:
                b_totals += b_z * load_columns(p_class_weight, i_col + o_lane, N, True)
            else:
                b_totals += b_z
        b_d = b_z - b_maxima
        b_e = tl.exp(-tl.abs(b_d))
        m_above = b_d > 0.0
        if ENTROPY:
            b_dots = tl.where(m_above, b_e * (b_dots - b_d * b_sums), b_dots + b_e * tl.maximum(b_d, VANISHES))
        b_sums = tl.where(m_above, b_sums * b_e + 1.0, b_sums + b_e)
        if ARGMAX:
            # Not m_above: CUDA may fuse the product that z is into the difference, which then is none of equal numbers.
            b_places = tl.where(b_z > b_maxima, i_col.to(tl.float32), b_places)
        b_maxima = tl.where(m_above, b_z, b_maxima)  # tl.maximum minds NaN: two compares more on Ascend
    b_max = tl.max(b_maxima, axis=1)
    b_d = b_maxima - b_max[:, None]
    b_e = tl.exp(b_d)
    b_sum = tl.sum(b_e * b_sums, axis=1)
    if ENTROPY:
        b_dot = tl.sum(b_e * (b_dots + b_d * b_sums), axis=1)
    if SMOOTHED:
        b_total = tl.sum(b_totals, axis=1)
    if ARGMAX:
        b_col = b_places + o_lane[None, :].to(tl.float32)
        b_index = tl.min(tl.where(b_maxima == b_max[:, None], b_col, NO_COLUMN), axis=1)
    return b_max, b_sum, b_total, b_dot, b_index
