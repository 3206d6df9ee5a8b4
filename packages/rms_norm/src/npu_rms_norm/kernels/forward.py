"""The forward of RMSNorm on a device, of rows that fit on chip whole. Formulas, row layout and rounding modes: tile.py."""

import triton
import triton.language as tl

from .elements import largest_of_rows, load_gate, load_scale, load_scale_rows, normalise, quantise, round_weighted
from .rounding import ASCEND, widen
from .tile import (
    even_row_range,
    load_tile,
    result_strides,
    row_mask,
    row_numbers,
    row_stride,
    store_tile,
    tile_at,
    tile_range,
    tile_rows,
    tile_rows_of_range,
)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_kernel(
    p_x,
    p_residual,  # None: x is normalised; else x + residual, which is stored to p_sum
    p_weight,  # None: no weight
    p_bias,  # None: no bias
    p_gate,  # None: no gate
    p_y,
    p_fp32,  # y, not rounded; None: nobody asked
    p_sum,
    p_rstd,  # None: no backward will follow
    p_scale,  # fp32 [rows], of y that is int8 or fp8; None: y is as it is
    n_outer,
    n_inner,
    s_x_outer,
    s_x_inner,  # of this and the others, None (CUDA): rows lie side by side
    s_residual_outer,
    s_residual_inner,
    s_gate_outer,
    s_gate_inner,
    eps,
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
):
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    DTYPE: tl.constexpr = tl.bfloat16 if ROUND_BF16 else tl.float16
    EXACT_N: tl.constexpr = BLOCK_N == N
    ROWS: tl.constexpr = BLOCK_M if BLOCK_G < 0 else BLOCK_G * BLOCK_M
    IN_PAIRS: tl.constexpr = offset is not None  # else products of two bf16 are computed in pairs
    s_x_inner, s_residual_inner = row_stride(s_x_inner, N), row_stride(s_residual_inner, N)
    s_gate_inner = row_stride(s_gate_inner, N)
    o_col = tl.arange(0, BLOCK_N)
    if CONTIGUOUS_SPLIT:
        i_first, i_stop = even_row_range(n_inner)
        i_tile_first, i_tile_stop, n_step = 0, tl.cdiv(i_stop - i_first, BLOCK_M), 1
    else:
        i_tile_first, i_tile_stop, n_step, i_head = tile_range(
            tl.program_id(0), tl.num_programs(0), n_outer, n_inner, BLOCK_G, BLOCK_M, PER_HEAD
        )
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, PER_HEAD)
    HEADS: tl.constexpr = PER_HEAD and BLOCK_G < 0  # a tile's rows are of several
    if PER_HEAD and not HEADS:
        if p_weight is not None:
            p_weight += i_head * N
        if p_bias is not None:
            p_bias += i_head * N
    if ASCEND:  # elsewhere a program takes one tile
        if p_weight is not None:
            b_scale = load_scale(p_weight, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)[None, :]
        if p_bias is not None:
            b_bias = load_scale(p_bias, o_col, N, 0.0, DTYPE, EXACT_N, ROUND_FACTORS)[None, :]
    for i_tile in tl.range(i_tile_first, i_tile_stop, n_step):
        if CONTIGUOUS_SPLIT:
            i_outer, i_inner, n_groups, n_rows = tile_rows_of_range(i_tile, i_tile_stop, i_first, i_stop, BLOCK_M)
        else:
            i_outer, i_inner, n_groups, n_rows = tile_rows(i_tile, n_outer, n_inner, BLOCK_G, BLOCK_M, PER_HEAD)
        i_row, o_row = row_numbers(i_tile, i_outer, i_inner, n_inner, BLOCK_G, BLOCK_M, PER_HEAD)
        m_row = row_mask(n_groups, n_rows, BLOCK_G, BLOCK_M)
        p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
        b_x = load_tile(p_tile, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
        if not ASCEND:
            if p_weight is not None:
                b_scale = load_scale_rows(
                    p_weight, i_outer if HEADS else None, N, offset, ROWS, BLOCK_N, DTYPE, EXACT_N, ROUND_FACTORS
                )  # fmt: skip
            if p_bias is not None:
                b_bias = load_scale_rows(
                    p_bias, i_outer if HEADS else None, N, 0.0, ROWS, BLOCK_N, DTYPE, EXACT_N, ROUND_FACTORS
                )  # fmt: skip
        if p_residual is not None:
            p_tile = tile_at(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
            b_x += load_tile(p_tile, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N, "")
            b_sum = b_x.to(p_sum.dtype.element_ty)
            p_tile = tile_at(p_sum, s_y_outer, s_y_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
            store_tile(p_tile, b_sum, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
            b_x = widen(b_sum)
        if p_gate is not None:
            b_act, _ = load_gate(
                p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, 0, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N,
                EXACT_N, GATE_SILU
            )  # fmt: skip
            if GATE_FIRST:
                b_x *= b_act
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) * (1.0 / N) + eps)  # [BLOCK_M]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_row, b_rstd, mask=m_row)
        b_y = normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, IN_PAIRS)
        if p_weight is not None:
            b_y *= b_scale
        if p_bias is not None:
            b_y = round_weighted(b_y, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, IN_PAIRS) + b_bias
        if p_gate is not None:
            if not GATE_FIRST:
                b_y = round_weighted(b_y, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, IN_PAIRS) * b_act
        if p_fp32 is not None:
            p_tile = tile_at(p_fp32, s_y_outer, s_y_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
            store_tile(p_tile, b_y, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
        if p_scale is not None:
            b_largest = largest_of_rows(tl.abs(b_y), b_y * 0.0)  # [BLOCK_M]
            b_y, b_steps = quantise(b_y, b_largest, p_y.dtype.element_ty == tl.int8)
            tl.store(p_scale + i_row + o_row, b_steps, mask=m_row)
        p_tile = tile_at(p_y, s_y_outer, s_y_inner, i_outer, i_inner, 0, BLOCK_G, BLOCK_M, BLOCK_N)
        store_tile(p_tile, b_y, n_groups, n_rows, N, BLOCK_G, BLOCK_M, BLOCK_N, EXACT_N)
