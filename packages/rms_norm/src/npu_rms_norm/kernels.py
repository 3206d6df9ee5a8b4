"""Device code of RMSNorm.

    rstd = 1 / sqrt(mean(x^2) + eps)        n = x rstd        y = n (offset + w)
    g = dy (offset + w)                     dx = rstd (g - n mean(g n))        dw = sum over rows of dy n

Rows lie on two levels, `n_outer` groups of `n_inner` rows, and every tensor has a stride for each (in elements), so that a
slice of a wider tensor is read in place. A tile is BLOCK_M rows of one group, or all rows of BLOCK_G groups, by BLOCK_N
columns. Programs stride over the tiles or, where EVEN says so, of rows of one group each takes an equal share, in tiles of
its own. ROUND_NORMALISED rounds n to y's dtype before it meets the weight, ROUND_FACTORS
rounds rstd and offset + w as well.

`forward_wide_kernel` serves rows that do not fit on chip: columns in blocks, x read twice.
"""

import triton
import triton.backends
import triton.language as tl

# CANN 8.5's compiler leaves out a cast to 16 bits that is cast back at once. A change of shape in between costs nothing and
# keeps it. Elsewhere such a change may cost something, and nothing is left out.
_ASCEND = tl.constexpr("ascend" in triton.backends.backends)


@triton.jit
def widen(b_value):
    """fp32, of what was computed, and rounded, in this kernel."""
    if _ASCEND and b_value.dtype != tl.float32:
        return tl.reshape(tl.expand_dims(b_value, 0).to(tl.float32), b_value.shape)
    else:
        return b_value.to(tl.float32)


@triton.jit
def share_of_rows(n_rows):
    """The rows of one group that a program takes where all take equally many: the first, and the end."""
    n_share = tl.cdiv(n_rows, tl.num_programs(0))
    i_first = tl.minimum(tl.program_id(0) * n_share, n_rows)
    return i_first, tl.minimum(i_first + n_share, n_rows)


@triton.jit
def tile_at(p_base, s_outer, s_inner, i_outer, i_inner, i_col, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Pointers [M, N], or [G, M, N] of several groups, to a tile; 64-bit offsets on scalars alone."""
    p_tile = p_base + tl.cast(i_outer, tl.int64) * s_outer + tl.cast(i_inner, tl.int64) * s_inner + i_col
    o_row, o_col = tl.arange(0, M), tl.arange(0, N)
    if G > 1:
        return p_tile + (tl.arange(0, G)[:, None, None] * s_outer + o_row[None, :, None] * s_inner + o_col[None, None, :])
    elif M > 1:
        return p_tile + (o_row[:, None] * s_inner + o_col[None, :])
    else:
        return p_tile + o_col[None, :]


@triton.jit
def tile_mask(n_outer, n_inner, n_cols, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT_N: tl.constexpr):
    """What of a tile lies inside, given how many groups, rows and columns are left; EXACT_N: every column does."""
    if G > 1:
        m_tile = (tl.arange(0, G) < n_outer)[:, None, None]
        if not EXACT_N:
            m_tile = m_tile & (tl.arange(0, N) < n_cols)[None, None, :]
    elif M > 1:
        m_tile = (tl.arange(0, M) < n_inner)[:, None]
        if not EXACT_N:
            m_tile = m_tile & (tl.arange(0, N) < n_cols)[None, :]
    else:
        m_tile = (tl.arange(0, N) < n_cols)[None, :]
    return m_tile


@triton.jit
def row_mask(n_outer, n_inner, G: tl.constexpr, M: tl.constexpr):
    """Which of the G * M rows of a tile lie inside, given how many groups, and rows of the first one, are left."""
    if G > 1:
        return tl.arange(0, G * M) < tl.minimum(n_outer, G) * n_inner
    else:
        return tl.arange(0, M) < n_inner


@triton.jit
def load_tile(
    p_tile,
    n_outer,
    n_inner,
    n_cols,
    G: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EXACT_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """fp32 [G * M, N], zero outside."""
    if G * M == 1 and EXACT_N:
        b_tile = tl.load(p_tile, eviction_policy=EVICTION)
    else:
        m_tile = tile_mask(n_outer, n_inner, n_cols, G, M, N, EXACT_N)
        b_tile = tl.load(p_tile, mask=m_tile, other=0.0, eviction_policy=EVICTION)
    b_tile = b_tile.to(tl.float32)
    if G > 1:
        b_tile = tl.reshape(b_tile, (G * M, N))
    return b_tile


@triton.jit
def store_tile(
    p_tile,
    b_tile,
    n_outer,
    n_inner,
    n_cols,
    G: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EXACT_N: tl.constexpr,
):
    """Stores what lies inside of [G * M, N], in the dtype of the memory."""
    b_tile = b_tile.to(p_tile.dtype.element_ty)
    if G > 1:
        b_tile = tl.reshape(b_tile, (G, M, N))
    if G * M == 1 and EXACT_N:
        tl.store(p_tile, b_tile)
    else:
        tl.store(p_tile, b_tile, mask=tile_mask(n_outer, n_inner, n_cols, G, M, N, EXACT_N))


@triton.jit
def load_scale(p_weight, o_col, n_cols, offset, DTYPE: tl.constexpr, EXACT_N: tl.constexpr, ROUND_FACTORS: tl.constexpr):
    """offset + w, fp32 [BLOCK_N]."""
    if EXACT_N:
        b_scale = tl.load(p_weight + o_col).to(tl.float32) + offset
    else:
        b_scale = tl.load(p_weight + o_col, mask=o_col < n_cols, other=0.0).to(tl.float32) + offset
    if ROUND_FACTORS:
        b_scale = widen(b_scale.to(DTYPE))
    return b_scale


@triton.jit
def normalise(b_x, b_rstd, DTYPE: tl.constexpr, ROUND_NORMALISED: tl.constexpr, ROUND_FACTORS: tl.constexpr):
    """n = x rstd, fp32 [BLOCK_M, BLOCK_N], rounded as the mode says."""
    if ROUND_FACTORS:
        b_rstd = widen(b_rstd.to(DTYPE))
    b_n = b_x * b_rstd[:, None]
    if ROUND_NORMALISED:
        b_n = widen(b_n.to(DTYPE))
    return b_n


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_kernel(
    p_x,
    p_residual,  # None: x is normalised; else x + residual, which is stored to p_sum
    p_weight,  # None: no weight
    p_y,
    p_sum,
    p_rstd,  # None: no backward will follow
    n_outer,
    n_inner,
    s_x_outer,
    s_x_inner,
    s_residual_outer,
    s_residual_inner,
    eps,
    offset,
    N: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # >= N
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
):
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    DTYPE: tl.constexpr = p_y.dtype.element_ty
    EXACT_N: tl.constexpr = BLOCK_N == N
    o_row = tl.arange(0, BLOCK_G * BLOCK_M)
    o_col = tl.arange(0, BLOCK_N)
    if p_weight is not None:
        b_scale = load_scale(p_weight, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)  # [BLOCK_N]
    n_tiles = tl.cdiv(n_inner, BLOCK_M)  # of one group
    if EVEN:
        i_first, i_end = share_of_rows(n_inner)
        i_tile_first, i_tile_end, n_step = 0, tl.cdiv(i_end - i_first, BLOCK_M), 1
    else:
        i_tile_first, i_tile_end, n_step = tl.program_id(0), tl.cdiv(n_outer, BLOCK_G) * n_tiles, tl.num_programs(0)
    for i_tile in tl.range(i_tile_first, i_tile_end, n_step):
        if EVEN:  # the first tile is the one that may be short: nothing is under way yet that it could hold up
            i_tile_rows_end = i_end - (i_tile_end - 1 - i_tile) * BLOCK_M
            i_outer, i_inner = 0, tl.maximum(i_tile_rows_end - BLOCK_M, i_first)
            n_groups, n_rows = 1, i_tile_rows_end - i_inner
        else:
            i_group = i_tile // n_tiles
            i_outer, i_inner = i_group * BLOCK_G, (i_tile - i_group * n_tiles) * BLOCK_M
            n_groups, n_rows = n_outer - i_outer, n_inner - i_inner
        i_row = tl.cast(i_outer, tl.int64) * n_inner + i_inner
        m_row = row_mask(n_groups, n_rows, BLOCK_G, BLOCK_M)
        p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
        b_x = load_tile(p_tile, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
        if p_residual is not None:
            p_tile = tile_at(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
            b_x += load_tile(p_tile, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
            b_sum = b_x.to(p_sum.dtype.element_ty)
            p_tile = tile_at(p_sum, n_inner * N, N, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
            store_tile(p_tile, b_sum, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
            b_x = widen(b_sum)
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) * (1.0 / N) + eps)  # [BLOCK_M]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_row, b_rstd, mask=m_row)
        b_y = normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS)
        if p_weight is not None:
            b_y *= b_scale[None, :]
        p_tile = tile_at(p_y, n_inner * N, N, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
        store_tile(p_tile, b_y, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_wide_kernel(
    p_x,
    p_residual,
    p_weight,
    p_y,
    p_sum,
    p_rstd,
    n_outer,
    n_inner,
    s_x_outer,
    s_x_inner,
    s_residual_outer,
    s_residual_inner,
    eps,
    offset,
    N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # < N
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
):
    # lint: allow scalar-reduction: a row that does not fit is summed piece by piece, one number for each long piece
    DTYPE: tl.constexpr = p_y.dtype.element_ty
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    o_row = tl.arange(0, BLOCK_G * BLOCK_M)
    n_tiles = tl.cdiv(n_inner, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_outer, BLOCK_G) * n_tiles, tl.num_programs(0)):
        i_group = i_tile // n_tiles
        i_outer, i_inner = i_group * BLOCK_G, (i_tile - i_group * n_tiles) * BLOCK_M
        n_groups, n_rows = n_outer - i_outer, n_inner - i_inner
        i_row = i_outer.to(tl.int64) * n_inner + i_inner
        m_row = row_mask(n_groups, n_rows, BLOCK_G, BLOCK_M)
        b_square = tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N, BLOCK_N):
            o_col = i_col + tl.arange(0, BLOCK_N)
            p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
            b_x = load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "evict_last")
            if p_residual is not None:
                p_tile = tile_at(
                    p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N
                )
                b_x += load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "evict_last")
                b_x = widen(b_x.to(p_sum.dtype.element_ty))
            b_square += b_x * b_x
        b_rstd = tl.rsqrt(tl.sum(b_square, axis=1) * (1.0 / N) + eps)  # [BLOCK_M]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_row, b_rstd, mask=m_row)
        for i_col in tl.range(0, N, BLOCK_N):
            o_col = i_col + tl.arange(0, BLOCK_N)
            p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
            b_x = load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "evict_first")
            if p_residual is not None:
                p_tile = tile_at(
                    p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N
                )
                b_x += load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "evict_first")
                b_sum = b_x.to(p_sum.dtype.element_ty)
                p_tile = tile_at(p_sum, n_inner * N, N, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
                store_tile(p_tile, b_sum, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
                b_x = widen(b_sum)
            b_y = normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS)
            if p_weight is not None:
                b_y *= load_scale(p_weight, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)[None, :]
            p_tile = tile_at(p_y, n_inner * N, N, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
            store_tile(p_tile, b_y, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
