"""The forward of rows that do not fit on chip whole: blocks of columns are read once for the statistics, and again for y."""

import triton
import triton.language as tl

from .elements import largest_of_rows, load_gate, load_scale, normalise, quantise, round_weighted
from .rounding import widen
from .tile import load_tile, result_strides, row_mask, store_tile, tile_at, tile_range, tile_rows


@triton.jit
def load_rows(
    p_x, s_x_outer, s_x_inner, p_residual, s_residual_outer, s_residual_inner, p_sum, p_gate, s_gate_outer, s_gate_inner,
    i_outer, i_inner, i_col, n_groups, n_rows, N: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, GATE_SILU: tl.constexpr, GATE_FIRST: tl.constexpr, EVICTION: tl.constexpr
):  # fmt: skip
    """Of one block of columns: what is normalised, x + residual as it is stored, and act(gate); x for what there is not."""
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    n_cols = N - i_col
    p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
    b_x = load_tile(p_tile, n_groups, n_rows, n_cols, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, EVICTION)
    b_sum, b_act = b_x, b_x
    if p_residual is not None:
        p_tile = tile_at(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
        b_x += load_tile(p_tile, n_groups, n_rows, n_cols, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, EVICTION)
        b_sum = b_x.to(p_sum.dtype.element_ty)
        b_x = widen(b_sum)
    if p_gate is not None:
        b_act, _ = load_gate(
            p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, i_col, n_groups, n_rows, n_cols, BLOCK_G, BLOCK_M, BLOCK_N,
            EXACT_N, GATE_SILU
        )  # fmt: skip
        if GATE_FIRST:
            b_x *= b_act
    return b_x, b_sum, b_act


@triton.jit
def weigh(
    b_x,
    b_rstd,
    b_act,
    p_weight,
    p_bias,
    p_gate,  # None: the result is not gated
    i_col,
    N: tl.constexpr,
    offset,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
):
    """y of one block of columns, fp32 [BLOCK_G * BLOCK_M, BLOCK_N]."""
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    o_col = i_col + tl.arange(0, BLOCK_N)
    IN_PAIRS: tl.constexpr = N > 16384 or p_bias is not None
    b_y = normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, IN_PAIRS)
    if p_weight is not None:
        b_y *= load_scale(p_weight, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)[None, :]
    if p_bias is not None:
        b_bias = load_scale(p_bias, o_col, N, 0.0, DTYPE, EXACT_N, ROUND_FACTORS)
        b_y = round_weighted(b_y, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS) + b_bias[None, :]
    if p_gate is not None:
        b_y = round_weighted(b_y, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS) * b_act
    return b_y


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_wide_kernel(
    p_x,
    p_residual,
    p_weight,
    p_bias,
    p_gate,
    p_y,
    p_fp32,
    p_sum,
    p_rstd,
    p_scale,
    n_outer,
    n_inner,
    s_x_outer,
    s_x_inner,
    s_residual_outer,
    s_residual_inner,
    s_gate_outer,
    s_gate_inner,
    eps,
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
    """Arguments: those of `forward_kernel`."""
    # lint: allow scalar-reduction: a row that does not fit is summed piece by piece, one number for each long piece
    DTYPE: tl.constexpr = tl.bfloat16 if ROUND_BF16 else tl.float16
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    o_row = tl.arange(0, BLOCK_G * BLOCK_M)
    i_first, i_stop, n_step, i_head = tile_range(
        tl.program_id(0), tl.num_programs(0), n_outer, n_inner, BLOCK_G, BLOCK_M, PER_HEAD
    )
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, PER_HEAD)
    if PER_HEAD:
        if p_weight is not None:
            p_weight += i_head * N
        if p_bias is not None:
            p_bias += i_head * N
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, n_groups, n_rows = tile_rows(i_tile, n_outer, n_inner, BLOCK_G, BLOCK_M)
        i_row = tl.cast(i_outer, tl.int64) * n_inner + i_inner
        m_row = row_mask(n_groups, n_rows, BLOCK_G, BLOCK_M)
        b_square = tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N, BLOCK_N):
            b_x, _, _ = load_rows(
                p_x, s_x_outer, s_x_inner, p_residual, s_residual_outer, s_residual_inner, p_sum,
                p_gate if GATE_FIRST else None, s_gate_outer, s_gate_inner, i_outer, i_inner, i_col, n_groups, n_rows, N,
                BLOCK_G, BLOCK_M, BLOCK_N, GATE_SILU, GATE_FIRST, "evict_last"
            )  # fmt: skip
            b_square += b_x * b_x
        b_rstd = tl.rsqrt(tl.sum(b_square, axis=1) * (1.0 / N) + eps)  # [BLOCK_M]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_row, b_rstd, mask=m_row)
        if p_scale is not None:
            b_most = tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32)
            b_zero = tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32)
            for i_col in tl.range(0, N, BLOCK_N):
                b_x, _, b_act = load_rows(
                    p_x, s_x_outer, s_x_inner, p_residual, s_residual_outer, s_residual_inner, p_sum, p_gate, s_gate_outer,
                    s_gate_inner, i_outer, i_inner, i_col, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, GATE_SILU,
                    GATE_FIRST, "evict_last"
                )  # fmt: skip
                b_y = weigh(
                    b_x, b_rstd, b_act, p_weight, p_bias, None if GATE_FIRST else p_gate, i_col, N, offset, BLOCK_N, DTYPE,
                    ROUND_NORMALISED, ROUND_FACTORS
                )  # fmt: skip
                b_most = tl.maximum(b_most, tl.abs(b_y))
                b_zero += b_y * 0.0
            b_largest = largest_of_rows(b_most, b_zero)  # [BLOCK_M]
        for i_col in tl.range(0, N, BLOCK_N):
            b_x, b_sum, b_act = load_rows(
                p_x, s_x_outer, s_x_inner, p_residual, s_residual_outer, s_residual_inner, p_sum, p_gate, s_gate_outer,
                s_gate_inner, i_outer, i_inner, i_col, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, GATE_SILU, GATE_FIRST,
                "evict_first"
            )  # fmt: skip
            if p_residual is not None:
                p_tile = tile_at(p_sum, s_y_outer, s_y_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
                store_tile(p_tile, b_sum, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
            b_y = weigh(
                b_x, b_rstd, b_act, p_weight, p_bias, None if GATE_FIRST else p_gate, i_col, N, offset, BLOCK_N, DTYPE,
                ROUND_NORMALISED, ROUND_FACTORS
            )  # fmt: skip
            if p_fp32 is not None:
                p_tile = tile_at(p_fp32, s_y_outer, s_y_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
                store_tile(p_tile, b_y, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
            if p_scale is not None:
                b_y, b_steps = quantise(b_y, b_largest, p_y.dtype.element_ty == tl.int8)
                if i_col == 0:
                    tl.store(p_scale + i_row + o_row, b_steps, mask=m_row)
            p_tile = tile_at(p_y, s_y_outer, s_y_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
            store_tile(p_tile, b_y, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
