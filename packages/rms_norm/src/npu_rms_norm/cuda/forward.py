"""The forward on CUDA of rows that a program holds in registers. Formulas: formula.py. Tiles and chunks: rows.py."""

import triton
import triton.language as tl
from npu_tiling.device.rounding import round_to

from ..formula import MIN_AMAX, activate, add_residual, inverse_rms, load_factor, normalise, quantise, weigh
from .rows import (
    load_chunk,
    load_factor_rows,
    parameters_of_head,
    result_rows_at,
    rows_at,
    store_chunk,
    tile_position,
    tiles_of_program,
)


@triton.jit
def load_factor_chunk(
    p_factor, i_outer, offset, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, ORDER: tl.constexpr, FACTORS: tl.constexpr
):  # fmt: skip
    """A chunk of offset + w, or of the bias with an offset of None; None for None."""
    if CHUNKS == 1:
        return load_factor_rows(p_factor, i_outer, offset, N, M, BLOCK_N, ORDER, FACTORS)
    else:
        o_col = CHUNK * BLOCK_N + tl.arange(0, BLOCK_N)
        return load_factor(p_factor, o_col, offset, N, CHUNK * BLOCK_N + BLOCK_N <= N, FACTORS)


@triton.jit
def larger(a, b):
    """The larger of two numbers; NaN where either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_kernel(
    # Read; None: the call has no such input.
    p_x, p_residual, p_gate, p_weight, p_bias,
    # Written; None: not asked for. p_scale: the steps of a quantised y, fp32 [rows], as rstd.
    p_y, p_sum, p_fp32, p_rstd, p_scale,
    n_outer, n_inner,
    s_x_outer, s_x_inner, s_residual_outer, s_residual_inner, s_gate_outer, s_gate_inner,
    eps, offset,
    N: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """y of rows held in registers, each read once; the sum, fp32, rstd and scales that are asked for."""
    i_first, i_stop, n_step, i_head = tiles_of_program(tl.program_id(0), tl.num_programs(0), n_outer, n_inner, M, ORDER)
    p_weight = parameters_of_head(p_weight, i_head, N, ORDER)
    p_bias = parameters_of_head(p_bias, i_head, N, ORDER)
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, o_row, m_row = tile_position(i_tile, i_head, n_outer, n_inner, M, ORDER)
        p_x_tile = rows_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, M, ORDER)
        p_residual_tile = rows_at(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, M, ORDER)
        p_gate_tile = rows_at(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, M, ORDER)
        p_sum_tile = result_rows_at(p_sum, i_outer, i_inner, o_row, n_outer, N, M, ORDER)

        row, acts, scales = (), (), ()
        b_square = tl.zeros([M, BLOCK_N], tl.float32)
        for c in tl.static_range(CHUNKS):
            b_x = load_chunk(p_x_tile, m_row, c, N, M, BLOCK_N)
            if p_residual is not None:
                b_sum, b_x = add_residual(b_x, load_chunk(p_residual_tile, m_row, c, N, M, BLOCK_N), p_sum)
                store_chunk(p_sum_tile, b_sum, m_row, c, N, M, BLOCK_N)
            if p_gate is not None:
                b_act, _ = activate(load_chunk(p_gate_tile, m_row, c, N, M, BLOCK_N), ACTIVATION)
                if GATE_FIRST:
                    b_x *= b_act
                else:
                    acts = acts + (b_act,)
            if p_weight is not None:  # loaded before the sum over the row, which all that follows waits for
                b_scale = load_factor_chunk(p_weight, i_outer, offset, c, CHUNKS, N, M, BLOCK_N, ORDER, FACTORS)
                scales = scales + (b_scale,)
            b_square += b_x * b_x
            row = row + (b_x,)

        b_rstd = inverse_rms(b_square, eps, N)  # [M]
        if p_rstd is not None:
            tl.store(p_rstd + o_row, b_rstd, mask=m_row)
        p_fp32_tile = result_rows_at(p_fp32, i_outer, i_inner, o_row, n_outer, N, M, ORDER)
        p_y_tile = result_rows_at(p_y, i_outer, i_inner, o_row, n_outer, N, M, ORDER)
        results = ()
        for c in tl.static_range(CHUNKS):
            b_bias = load_factor_chunk(p_bias, i_outer, None, c, CHUNKS, N, M, BLOCK_N, ORDER, FACTORS)
            b_n = normalise(row[c], b_rstd, NORMALISED, FACTORS)
            b_y = weigh(b_n, scales[c] if p_weight is not None else None, b_bias, WEIGHTED)
            if p_gate is not None:
                if not GATE_FIRST:
                    b_y = round_to(b_y, WEIGHTED) * acts[c]
            if p_fp32 is not None:
                store_chunk(p_fp32_tile, b_y, m_row, c, N, M, BLOCK_N)
            if p_scale is None:
                store_chunk(p_y_tile, b_y, m_row, c, N, M, BLOCK_N)
            else:
                results = results + (b_y,)

        if p_scale is not None:
            b_columns_amax = tl.abs(results[0])
            for c in tl.static_range(1, CHUNKS):
                b_columns_amax = larger(b_columns_amax, tl.abs(results[c]))
            b_amax = tl.reduce(b_columns_amax, 1, larger)  # [M]
            b_amax = larger(b_amax, MIN_AMAX) + b_amax * 0.0  # NaN of inf too, as `amax_of_rows` has it
            for c in tl.static_range(CHUNKS):
                b_y, b_steps = quantise(results[c], b_amax, p_y.dtype.element_ty == tl.int8)
                store_chunk(p_y_tile, b_y, m_row, c, N, M, BLOCK_N)
            tl.store(p_scale + o_row, b_steps, mask=m_row)
