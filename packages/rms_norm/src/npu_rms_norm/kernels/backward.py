"""Device code of RMSNorm's backward. Formulas, row layout and rounding modes: tile.py."""

import triton
import triton.language as tl

from .elements import load_gate, load_scale, normalise, round_weighted
from .tile import (
    even_row_range,
    load_raw,
    load_tile,
    result_strides,
    row_mask,
    row_numbers,
    row_stride,
    store_partial,
    store_tile,
    tile_at,
    tile_range,
    tile_rows,
    tile_rows_of_range,
)


@triton.jit
def load_ahead(
    p_dy, p_x, p_rstd, i_tile, i_stop, n_outer, n_inner, s_dy_outer, s_dy_inner, s_x_outer, s_x_inner, N: tl.constexpr,
    G: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """dy and x of a tile as they lie in memory, and rstd, before they are needed (CUDA); zeros after the last tile."""
    i_outer, i_inner, n_groups, n_rows = tile_rows(i_tile, n_outer, n_inner, G, M)
    n_rows = tl.where(i_tile < i_stop, n_rows, 0)
    i_row, o_row = row_numbers(i_tile, i_outer, i_inner, n_inner, G, M, False)
    p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, 0, G, M, BLOCK_N)
    b_x = load_raw(p_tile, n_groups, n_rows, N, G, M, BLOCK_N, BLOCK_N == N, "")
    p_tile = tile_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, 0, G, M, BLOCK_N)
    b_g = load_raw(p_tile, n_groups, n_rows, N, G, M, BLOCK_N, BLOCK_N == N, "")
    return b_x, b_g, tl.load(p_rstd + i_row + o_row, mask=tl.arange(0, M) < n_rows, other=0.0)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_kernel(
    p_dy,
    p_dsum,  # gradient that reaches x from elsewhere and is added to dx; None: there is none
    p_x,
    p_weight,
    p_bias,  # None: no bias
    p_gate,  # None: no gate
    p_rstd,
    p_dx,  # None: x needs no gradient
    p_dgate,  # None: the gate needs no gradient; else, GATE_FIRST, p_dx is given
    p_dw,  # fp32 [programs, N], one partial sum per program; None: the weight needs no gradient
    p_db,  # the same for the bias
    n_outer,
    n_inner,
    s_dy_outer,
    s_dy_inner,  # of this and the others, None (CUDA): rows lie side by side
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
    CONTIGUOUS_SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # >= N
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    GATE_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
    AHEAD: tl.constexpr = False,  # CUDA, BLOCK_M > 1: the next tile is loaded before this one is computed
):
    """A tile holds whole rows; the partial sum of dw stays on chip over the whole loop."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    DTYPE: tl.constexpr = tl.bfloat16 if ROUND_BF16 else tl.float16
    EXACT_N: tl.constexpr = BLOCK_N == N
    ROWS: tl.constexpr = BLOCK_M if BLOCK_G < 0 else BLOCK_G * BLOCK_M
    s_dy_inner, s_dsum_inner = row_stride(s_dy_inner, N), row_stride(s_dsum_inner, N)
    s_x_inner, s_gate_inner = row_stride(s_x_inner, N), row_stride(s_gate_inner, N)
    s_dx_inner = row_stride(s_dx_inner, N)
    o_col = tl.arange(0, BLOCK_N)
    if p_dw is not None:
        b_dw = tl.zeros([ROWS, BLOCK_N], tl.float32)
    if p_db is not None:
        b_db = tl.zeros([ROWS, BLOCK_N], tl.float32)
    if CONTIGUOUS_SPLIT:
        i_first, i_stop = even_row_range(n_inner)
        i_tile_first, i_tile_stop, n_step = 0, tl.cdiv(i_stop - i_first, BLOCK_M), 1
    else:
        i_tile_first, i_tile_stop, n_step, i_head = tile_range(
            tl.program_id(0), tl.num_programs(0), n_outer, n_inner, BLOCK_G, BLOCK_M, PER_HEAD
        )
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, PER_HEAD)
    if PER_HEAD:
        if p_weight is not None:
            p_weight += i_head * N
        if p_bias is not None:
            p_bias += i_head * N
    if p_weight is not None:
        b_scale = load_scale(p_weight, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)  # [BLOCK_N]
    if p_dgate is not None:
        if p_bias is not None:
            b_bias = load_scale(p_bias, o_col, N, 0.0, DTYPE, EXACT_N, ROUND_FACTORS)
    if AHEAD:
        b_next_x, b_next_g, b_next_rstd = load_ahead(
            p_dy, p_x, p_rstd, i_tile_first, i_tile_stop, n_outer, n_inner, s_dy_outer, s_dy_inner, s_x_outer, s_x_inner, N,
            BLOCK_G, BLOCK_M, BLOCK_N
        )  # fmt: skip
    for i_tile in tl.range(i_tile_first, i_tile_stop, n_step):
        if CONTIGUOUS_SPLIT:
            i_outer, i_inner, n_groups, n_rows = tile_rows_of_range(i_tile, i_tile_stop, i_first, i_stop, BLOCK_M)
        else:
            i_outer, i_inner, n_groups, n_rows = tile_rows(i_tile, n_outer, n_inner, BLOCK_G, BLOCK_M)
        i_row, o_row = row_numbers(i_tile, i_outer, i_inner, n_inner, BLOCK_G, BLOCK_M, PER_HEAD)
        m_row = row_mask(n_groups, n_rows, BLOCK_G, BLOCK_M)
        if AHEAD:
            b_x, b_g, b_rstd = b_next_x.to(tl.float32), b_next_g.to(tl.float32), b_next_rstd
            b_next_x, b_next_g, b_next_rstd = load_ahead(
                p_dy, p_x, p_rstd, i_tile + n_step, i_tile_stop, n_outer, n_inner, s_dy_outer, s_dy_inner, s_x_outer,
                s_x_inner, N, BLOCK_G, BLOCK_M, BLOCK_N
            )  # fmt: skip
        else:
            p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
            b_x = load_tile(p_tile, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
            p_tile = tile_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
            b_g = load_tile(p_tile, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
            b_rstd = tl.load(p_rstd + i_row + o_row, mask=m_row, other=0.0)
        if p_gate is not None:
            b_act, b_slope = load_gate(
                p_gate,
                s_gate_outer,
                s_gate_inner,
                i_outer,
                i_inner,
                0,
                n_groups,
                n_rows,
                N,
                BLOCK_G,
                BLOCK_M,
                BLOCK_N,
                EXACT_N,
                GATE_SILU,
            )
        if GATE_FIRST:
            b_n = normalise(b_x * b_act, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, True)
        else:
            b_n = normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, True)
        if p_gate is not None:
            if not GATE_FIRST:
                if p_dgate is not None:
                    b_z = b_n
                    if p_weight is not None:
                        b_z *= b_scale[None, :]
                    if p_bias is not None:
                        b_z = round_weighted(b_z, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, True) + b_bias[None, :]
                    b_z = round_weighted(b_z, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, True)
                    p_tile = tile_at(p_dgate, s_y_outer, s_y_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
                    store_tile(p_tile, b_g * b_z * b_slope, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
                b_g *= b_act
        if p_dw is not None:
            b_dw += b_g * b_n
        if p_db is not None:
            b_db += b_g
        if p_dx is not None:
            if p_weight is not None:
                b_g *= b_scale[None, :]
            b_mean = tl.sum(b_g * b_n, axis=1) * (1.0 / N)  # [BLOCK_M]
            b_dx = (b_g - b_n * b_mean[:, None]) * b_rstd[:, None]
            if GATE_FIRST:
                if p_dgate is not None:
                    p_tile = tile_at(p_dgate, s_y_outer, s_y_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
                    store_tile(p_tile, b_dx * b_x * b_slope, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
                b_dx *= b_act
            if p_dsum is not None:
                p_tile = tile_at(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
                b_dx += load_tile(p_tile, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
            p_tile = tile_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
            store_tile(p_tile, b_dx, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
    if p_dw is not None:
        store_partial(p_dw, b_dw, tl.program_id(0), o_col, N, EXACT_N)
    if p_db is not None:
        store_partial(p_db, b_db, tl.program_id(0), o_col, N, EXACT_N)


@triton.jit(do_not_specialize=["n_partials"])
def sum_partials_kernel(
    p_partials,  # fp32 [n_partials, N]
    p_dw,
    n_partials,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dw = the sum of the partial sums, in one fixed order, rounded once to the weight's dtype."""
    # lint: allow short-transfer: the partial sums of all cores are a few KiB, of which every core adds some columns
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    o_row = tl.arange(0, BLOCK_M)
    for i_block in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        o_col = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_partial in tl.range(0, n_partials, BLOCK_M):
            p_tile = p_partials + i_partial.to(tl.int64) * N + (o_row[:, None] * N + o_col[None, :])
            m_tile = (o_row < n_partials - i_partial)[:, None]
            if not EXACT_N:
                m_tile = m_tile & (o_col < N)[None, :]
            b_sum += tl.load(p_tile, mask=m_tile, other=0.0)
        b_dw = tl.sum(b_sum, axis=0).to(p_dw.dtype.element_ty)
        if EXACT_N:
            tl.store(p_dw + o_col, b_dw)
        else:
            tl.store(p_dw + o_col, b_dw, mask=o_col < N)
