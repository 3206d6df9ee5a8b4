"""RMSNorm's backward for rows that do not fit on chip: columns in blocks, read twice. Formulas, row layout: tile.py."""

import triton
import triton.language as tl

from .elements import load_gate, load_scale, normalise, round_weighted
from .tile import load_tile, result_strides, row_mask, store_partial, store_tile, tile_at, tile_range, tile_rows


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_wide_mean_kernel(
    p_dy,
    p_x,
    p_weight,
    p_gate,
    p_rstd,
    p_mean,  # fp32 [rows]: mean(g n)
    n_outer,
    n_inner,
    s_dy_outer,
    s_dy_inner,
    s_x_outer,
    s_x_inner,
    s_gate_outer,
    s_gate_inner,
    offset,
    N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # < N
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    GATE_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """First pass over rows that do not fit on chip: mean(g n) of each."""
    # lint: allow short-transfer: on an Ascend950 a row that does not fit beside another comes in equal pieces
    # lint: allow scalar-reduction: a row that does not fit is summed piece by piece, one number for each long piece
    DTYPE: tl.constexpr = tl.bfloat16 if ROUND_BF16 else tl.float16
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    o_row = tl.arange(0, BLOCK_G * BLOCK_M)
    i_first, i_stop, n_step, i_head = tile_range(
        tl.program_id(0), tl.num_programs(0), n_outer, n_inner, BLOCK_G, BLOCK_M, PER_HEAD
    )
    if PER_HEAD:
        if p_weight is not None:
            p_weight += i_head * N
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, n_groups, n_rows = tile_rows(i_tile, n_outer, n_inner, BLOCK_G, BLOCK_M)
        i_row = tl.cast(i_outer, tl.int64) * n_inner + i_inner
        m_row = row_mask(n_groups, n_rows, BLOCK_G, BLOCK_M)
        b_rstd = tl.load(p_rstd + i_row + o_row, mask=m_row, other=0.0)  # [BLOCK_M]
        b_product = tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N, BLOCK_N):
            o_col = i_col + tl.arange(0, BLOCK_N)
            p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
            b_x = load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
            p_tile = tile_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
            b_g = load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
            if p_weight is not None:
                b_g *= load_scale(p_weight, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)[None, :]
            if p_gate is not None:
                b_act, _ = load_gate(
                    p_gate,
                    s_gate_outer,
                    s_gate_inner,
                    i_outer,
                    i_inner,
                    i_col,
                    n_groups,
                    n_rows,
                    N - i_col,
                    BLOCK_G,
                    BLOCK_M,
                    BLOCK_N,
                    EXACT_N,
                    GATE_SILU,
                )
                if GATE_FIRST:
                    b_x *= b_act
                else:
                    b_g *= b_act
            b_product += b_g * normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS)
        b_mean = tl.sum(b_product, axis=1) * (1.0 / N)
        tl.store(p_mean + i_row + o_row, b_mean, mask=m_row)


@triton.jit(do_not_specialize=["n_outer", "n_inner", "n_splits"])
def backward_wide_kernel(
    p_dy,
    p_dsum,
    p_x,
    p_weight,
    p_bias,
    p_gate,
    p_rstd,
    p_mean,
    p_dx,  # None: x needs no gradient, and p_mean is None too
    p_dgate,
    p_dw,  # fp32 [n_splits, N]
    p_db,
    n_outer,
    n_inner,
    n_splits,
    s_dy_outer,
    s_dy_inner,
    s_dsum_outer,
    s_dsum_inner,
    s_x_outer,
    s_x_inner,
    s_gate_outer,
    s_gate_inner,
    s_dx_outer,
    s_dx_inner,
    offset,
    N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # < N
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    GATE_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """Second pass: a program takes one block of columns through every n_splits-th tile of rows, so that dw stays on chip."""
    # lint: allow short-transfer: on an Ascend950 a row that does not fit beside another comes in equal pieces
    DTYPE: tl.constexpr = tl.bfloat16 if ROUND_BF16 else tl.float16
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    o_row = tl.arange(0, BLOCK_G * BLOCK_M)
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, PER_HEAD)
    for i_task in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N) * n_splits, tl.num_programs(0)):
        i_split = i_task % n_splits
        i_first, i_stop, n_step, i_head = tile_range(i_split, n_splits, n_outer, n_inner, BLOCK_G, BLOCK_M, PER_HEAD)
        i_col = i_task // n_splits * BLOCK_N
        o_col = i_col + tl.arange(0, BLOCK_N)
        if p_weight is not None:
            p_own = p_weight
            if PER_HEAD:
                p_own += i_head * N
            b_scale = load_scale(p_own, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)  # [BLOCK_N]
        if p_dgate is not None:
            if p_bias is not None:
                p_own_bias = p_bias
                if PER_HEAD:
                    p_own_bias += i_head * N
                b_bias = load_scale(p_own_bias, o_col, N, 0.0, DTYPE, EXACT_N, ROUND_FACTORS)
        if p_dw is not None:
            b_dw = tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32)
        if p_db is not None:
            b_db = tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32)
        for i_tile in tl.range(i_first, i_stop, n_step):
            i_outer, i_inner, n_groups, n_rows = tile_rows(i_tile, n_outer, n_inner, BLOCK_G, BLOCK_M)
            i_row = tl.cast(i_outer, tl.int64) * n_inner + i_inner
            m_row = row_mask(n_groups, n_rows, BLOCK_G, BLOCK_M)
            p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
            b_x = load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
            p_tile = tile_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
            b_g = load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
            b_rstd = tl.load(p_rstd + i_row + o_row, mask=m_row, other=0.0)
            if p_gate is not None:
                b_act, b_slope = load_gate(
                    p_gate,
                    s_gate_outer,
                    s_gate_inner,
                    i_outer,
                    i_inner,
                    i_col,
                    n_groups,
                    n_rows,
                    N - i_col,
                    BLOCK_G,
                    BLOCK_M,
                    BLOCK_N,
                    EXACT_N,
                    GATE_SILU,
                )
            if GATE_FIRST:
                b_n = normalise(b_x * b_act, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS)
            else:
                b_n = normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS)
            if p_gate is not None:
                if not GATE_FIRST:
                    if p_dgate is not None:
                        b_z = b_n
                        if p_weight is not None:
                            b_z *= b_scale[None, :]
                        if p_bias is not None:
                            b_z = round_weighted(b_z, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS) + b_bias[None, :]
                        b_z = round_weighted(b_z, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS)
                        p_tile = tile_at(p_dgate, s_y_outer, s_y_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
                        store_tile(
                            p_tile, b_g * b_z * b_slope, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N
                        )
                    b_g *= b_act
            if p_dw is not None:
                b_dw += b_g * b_n
            if p_db is not None:
                b_db += b_g
            if p_dx is not None:
                b_mean = tl.load(p_mean + i_row + o_row, mask=m_row, other=0.0)
                if p_weight is not None:
                    b_g *= b_scale[None, :]
                b_dx = (b_g - b_n * b_mean[:, None]) * b_rstd[:, None]
                if GATE_FIRST:
                    if p_dgate is not None:
                        p_tile = tile_at(p_dgate, s_y_outer, s_y_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
                        store_tile(
                            p_tile, b_dx * b_x * b_slope, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N
                        )
                    b_dx *= b_act
                if p_dsum is not None:
                    p_tile = tile_at(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
                    b_dx += load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
                p_tile = tile_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
                store_tile(p_tile, b_dx, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
        if p_dw is not None:
            store_partial(p_dw, b_dw, i_split, o_col, N, EXACT_N)
        if p_db is not None:
            store_partial(p_db, b_db, i_split, o_col, N, EXACT_N)
