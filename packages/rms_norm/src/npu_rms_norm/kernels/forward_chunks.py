"""The forward for stock Triton on CUDA: rows in equal chunks of a power of two columns, all in registers.

A row of 2560 columns is five chunks of 512, and not one block of 4096 of which a third is padding. Formulas, row layout and
rounding modes: tile.py. triton-ascend has no tuples of blocks, and no need of them: there a block may have any width.
"""

import triton
import triton.language as tl

from .chunk import load_chunk, load_gate_chunk, load_scale_chunk, store_chunk
from .elements import largest_of_rows, normalise, quantise, round_weighted
from .rounding import widen
from .tile import result_strides, row_mask, row_stride, tile_range, tile_rows


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_chunks_kernel(
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
    s_x_inner,  # of this and the others, None: rows lie side by side
    s_residual_outer,
    s_residual_inner,
    s_gate_outer,
    s_gate_inner,
    eps,
    offset,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of a chunk
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    GATE_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    DTYPE: tl.constexpr = tl.bfloat16 if ROUND_BF16 else tl.float16
    IN_PAIRS: tl.constexpr = offset is not None  # else products of two bf16 are computed in pairs
    s_x_inner, s_residual_inner = row_stride(s_x_inner, N), row_stride(s_residual_inner, N)
    s_gate_inner = row_stride(s_gate_inner, N)
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
        row, gates, scales = (), (), ()
        for i_chunk in tl.static_range(CHUNKS):
            b_x = load_chunk(
                p_x, s_x_outer, s_x_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M, BLOCK_N
            )
            if p_residual is not None:
                b_x += load_chunk(
                    p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G,
                    BLOCK_M, BLOCK_N
                )  # fmt: skip
                b_sum = b_x.to(p_sum.dtype.element_ty)
                store_chunk(
                    p_sum, b_sum, s_y_outer, s_y_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M,
                    BLOCK_N
                )  # fmt: skip
                b_x = widen(b_sum)
            if p_gate is not None:
                b_act, _ = load_gate_chunk(
                    p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M,
                    BLOCK_N, GATE_SILU
                )  # fmt: skip
                if GATE_FIRST:
                    b_x *= b_act
                else:
                    gates = gates + (b_act,)
            if p_weight is not None:  # before the sum over the row, which everything after it waits for
                scales = scales + (load_scale_chunk(p_weight, offset, i_chunk, N, BLOCK_N, DTYPE, ROUND_FACTORS),)
            b_square += b_x * b_x
            row = row + (b_x,)
        b_rstd = tl.rsqrt(tl.sum(b_square, axis=1) * (1.0 / N) + eps)  # [BLOCK_M]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_row, b_rstd, mask=m_row)
        results = ()
        if p_scale is not None:
            b_most = tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32)
            b_zero = b_most
        for i_chunk in tl.static_range(CHUNKS):
            b_y = normalise(row[i_chunk], b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, IN_PAIRS)
            if p_weight is not None:
                b_y *= scales[i_chunk][None, :]
            if p_bias is not None:
                b_bias = load_scale_chunk(p_bias, 0.0, i_chunk, N, BLOCK_N, DTYPE, ROUND_FACTORS)
                b_y = round_weighted(b_y, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, IN_PAIRS) + b_bias[None, :]
            if p_gate is not None:
                if not GATE_FIRST:
                    b_y = round_weighted(b_y, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, IN_PAIRS)
                    b_y *= gates[i_chunk]
            if p_fp32 is not None:
                store_chunk(
                    p_fp32, b_y, s_y_outer, s_y_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M,
                    BLOCK_N
                )  # fmt: skip
            if p_scale is not None:
                b_most, b_zero = tl.maximum(b_most, tl.abs(b_y)), b_zero + b_y * 0.0
                results = results + (b_y,)
            else:
                store_chunk(
                    p_y, b_y, s_y_outer, s_y_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M, BLOCK_N
                )
        if p_scale is not None:
            b_largest = largest_of_rows(b_most, b_zero)  # [BLOCK_M]
            for i_chunk in tl.static_range(CHUNKS):
                b_y, b_steps = quantise(results[i_chunk], b_largest, p_y.dtype.element_ty == tl.int8)
                store_chunk(
                    p_y, b_y, s_y_outer, s_y_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M, BLOCK_N
                )
            tl.store(p_scale + i_row + o_row, b_steps, mask=m_row)
