"""Device code of RMSNorm.

    rstd = 1 / sqrt(mean(x^2) + eps)        n = x rstd        y = n (offset + w)
    g = dy (offset + w)                     dx = rstd (g - n mean(g n))        dw = sum over rows of dy n

Rows lie on two levels, `n_outer` groups of `n_inner` rows, and every tensor has a stride for each (in elements), so that a
slice of a wider tensor is read in place. A tile is BLOCK_M rows of one group by BLOCK_N columns; programs stride over the
tiles. ROUND_NORMALISED rounds n to y's dtype before it meets the weight, ROUND_FACTORS rounds rstd and offset + w as well.

`forward_wide_kernel` serves rows that do not fit on chip: columns in blocks, x read twice.
"""

import triton
import triton.language as tl


@triton.jit
def tile_at(p_base, s_outer, s_inner, i_outer, i_inner, o_row, o_col, EXACT_M: tl.constexpr):
    """Pointers [BLOCK_M, BLOCK_N] to a tile; 64-bit offsets on scalars alone. EXACT_M: it has one row."""
    p_rows = p_base + i_outer.to(tl.int64) * s_outer + i_inner.to(tl.int64) * s_inner
    if EXACT_M:
        return p_rows + o_col[None, :]
    else:
        return p_rows + (o_row[:, None] * s_inner + o_col[None, :])


@triton.jit
def load_tile(p_tile, o_row, n_rows, o_col, n_cols, EXACT_M: tl.constexpr, EXACT_N: tl.constexpr, EVICTION: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_N], zero outside; EXACT_M, EXACT_N: every row, every column lies inside."""
    if EXACT_M and EXACT_N:
        b_tile = tl.load(p_tile, eviction_policy=EVICTION)
    elif EXACT_N:
        b_tile = tl.load(p_tile, mask=(o_row < n_rows)[:, None], other=0.0, eviction_policy=EVICTION)
    elif EXACT_M:
        b_tile = tl.load(p_tile, mask=(o_col < n_cols)[None, :], other=0.0, eviction_policy=EVICTION)
    else:
        m_tile = (o_row < n_rows)[:, None] & (o_col < n_cols)[None, :]
        b_tile = tl.load(p_tile, mask=m_tile, other=0.0, eviction_policy=EVICTION)
    return b_tile.to(tl.float32)


@triton.jit
def store_tile(p_tile, b_tile, o_row, n_rows, o_col, n_cols, EXACT_M: tl.constexpr, EXACT_N: tl.constexpr):
    """Stores what lies inside, in the dtype of the memory."""
    b_tile = b_tile.to(p_tile.dtype.element_ty)
    if EXACT_M and EXACT_N:
        tl.store(p_tile, b_tile)
    elif EXACT_N:
        tl.store(p_tile, b_tile, mask=(o_row < n_rows)[:, None])
    elif EXACT_M:
        tl.store(p_tile, b_tile, mask=(o_col < n_cols)[None, :])
    else:
        tl.store(p_tile, b_tile, mask=(o_row < n_rows)[:, None] & (o_col < n_cols)[None, :])


@triton.jit
def load_scale(p_weight, o_col, n_cols, offset, DTYPE: tl.constexpr, EXACT_N: tl.constexpr, ROUND_FACTORS: tl.constexpr):
    """offset + w, fp32 [BLOCK_N]."""
    if EXACT_N:
        b_scale = tl.load(p_weight + o_col).to(tl.float32) + offset
    else:
        b_scale = tl.load(p_weight + o_col, mask=o_col < n_cols, other=0.0).to(tl.float32) + offset
    if ROUND_FACTORS:
        b_scale = b_scale.to(DTYPE).to(tl.float32)
    return b_scale


@triton.jit
def normalise(b_x, b_rstd, DTYPE: tl.constexpr, ROUND_NORMALISED: tl.constexpr, ROUND_FACTORS: tl.constexpr):
    """n = x rstd, fp32 [BLOCK_M, BLOCK_N], rounded as the mode says."""
    if ROUND_FACTORS:
        b_rstd = b_rstd.to(DTYPE).to(tl.float32)
    b_n = b_x * b_rstd[:, None]
    if ROUND_NORMALISED:
        b_n = b_n.to(DTYPE).to(tl.float32)
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # >= N
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
):
    DTYPE: tl.constexpr = p_y.dtype.element_ty
    EXACT_M: tl.constexpr = BLOCK_M == 1
    EXACT_N: tl.constexpr = BLOCK_N == N
    o_row = tl.arange(0, BLOCK_M)
    o_col = tl.arange(0, BLOCK_N)
    if p_weight is not None:
        b_scale = load_scale(p_weight, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)  # [BLOCK_N]
    n_tiles = tl.cdiv(n_inner, BLOCK_M)  # of one group
    for i_tile in tl.range(tl.program_id(0), n_outer * n_tiles, tl.num_programs(0)):
        i_outer = i_tile // n_tiles
        i_inner = (i_tile - i_outer * n_tiles) * BLOCK_M
        i_row = i_outer.to(tl.int64) * n_inner + i_inner
        p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, o_row, o_col, EXACT_M)
        b_x = load_tile(p_tile, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N, "")
        if p_residual is not None:
            p_tile = tile_at(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, o_row, o_col, EXACT_M)
            b_x += load_tile(p_tile, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N, "")
            b_sum = b_x.to(p_sum.dtype.element_ty)
            p_tile = tile_at(p_sum, n_inner * N, N, i_outer, i_inner, o_row, o_col, EXACT_M)
            store_tile(p_tile, b_sum, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N)
            b_x = b_sum.to(tl.float32)
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) * (1.0 / N) + eps)  # [BLOCK_M]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_row, b_rstd, mask=o_row < n_inner - i_inner)
        b_y = normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS)
        if p_weight is not None:
            b_y *= b_scale[None, :]
        p_tile = tile_at(p_y, n_inner * N, N, i_outer, i_inner, o_row, o_col, EXACT_M)
        store_tile(p_tile, b_y, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N)


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # < N
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
):
    DTYPE: tl.constexpr = p_y.dtype.element_ty
    EXACT_M: tl.constexpr = BLOCK_M == 1
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    o_row = tl.arange(0, BLOCK_M)
    n_tiles = tl.cdiv(n_inner, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), n_outer * n_tiles, tl.num_programs(0)):
        i_outer = i_tile // n_tiles
        i_inner = (i_tile - i_outer * n_tiles) * BLOCK_M
        i_row = i_outer.to(tl.int64) * n_inner + i_inner
        b_square = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N, BLOCK_N):
            o_col = i_col + tl.arange(0, BLOCK_N)
            p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, o_row, o_col, EXACT_M)
            b_x = load_tile(p_tile, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N, "evict_last")
            if p_residual is not None:
                p_tile = tile_at(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, o_row, o_col, EXACT_M)
                b_x += load_tile(p_tile, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N, "evict_last")
                b_x = b_x.to(p_sum.dtype.element_ty).to(tl.float32)
            b_square += b_x * b_x
        b_rstd = tl.rsqrt(tl.sum(b_square, axis=1) * (1.0 / N) + eps)  # [BLOCK_M]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_row, b_rstd, mask=o_row < n_inner - i_inner)
        for i_col in tl.range(0, N, BLOCK_N):
            o_col = i_col + tl.arange(0, BLOCK_N)
            p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, o_row, o_col, EXACT_M)
            b_x = load_tile(p_tile, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N, "evict_first")
            if p_residual is not None:
                p_tile = tile_at(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, o_row, o_col, EXACT_M)
                b_x += load_tile(p_tile, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N, "evict_first")
                b_sum = b_x.to(p_sum.dtype.element_ty)
                p_tile = tile_at(p_sum, n_inner * N, N, i_outer, i_inner, o_row, o_col, EXACT_M)
                store_tile(p_tile, b_sum, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N)
                b_x = b_sum.to(tl.float32)
            b_y = normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS)
            if p_weight is not None:
                b_y *= load_scale(p_weight, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)[None, :]
            p_tile = tile_at(p_y, n_inner * N, N, i_outer, i_inner, o_row, o_col, EXACT_M)
            store_tile(p_tile, b_y, o_row, n_inner - i_inner, o_col, N, EXACT_M, EXACT_N)
