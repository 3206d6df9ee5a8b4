"""The forward of wide rows: a program reads a row once for its statistics, and again for y.

Where y is quantised, a pass between the two finds the largest element. Formulas: formula.py. Blocks of columns: columns.py.
"""

import triton
import triton.language as tl
from npu_tiling.device.rounding import round_to

from ..formula import activate, add_residual, amax_of_rows, inverse_rms, load_factor, normalise, quantise, weigh
from .columns import load_columns, result_strides, row_at, row_position, rows_of_program, store_columns


@triton.jit
def load_input(
    p_x, p_residual, p_gate, p_sum, i_col, N: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr, EVICTION: tl.constexpr
):  # fmt: skip
    """The normalised input, x + residual as it is stored, and act(gate), at a block of columns; x for a missing input."""
    b_x = load_columns(p_x, i_col, N, BLOCK_N, EVICTION)
    b_sum, b_act = b_x, b_x
    if p_residual is not None:
        b_sum, b_x = add_residual(b_x, load_columns(p_residual, i_col, N, BLOCK_N, EVICTION), p_sum)
    if p_gate is not None:
        b_act, _ = activate(load_columns(p_gate, i_col, N, BLOCK_N, EVICTION), ACTIVATION)
        if GATE_FIRST:
            b_x *= b_act
    return b_x, b_sum, b_act


@triton.jit
def result_of(
    b_x, b_act, b_rstd, p_weight, p_bias, i_col, offset, N: tl.constexpr, BLOCK_N: tl.constexpr, NORMALISED: tl.constexpr,
    FACTORS: tl.constexpr, WEIGHTED: tl.constexpr, GATE_RESULT: tl.constexpr
):  # fmt: skip
    """y at a block of columns, in fp32."""
    o_col = i_col + tl.arange(0, BLOCK_N)
    b_n = normalise(b_x, b_rstd, NORMALISED, FACTORS)
    b_scale = load_factor(p_weight, o_col, offset, N, N % BLOCK_N == 0, FACTORS)
    b_bias = load_factor(p_bias, o_col, None, N, N % BLOCK_N == 0, FACTORS)
    b_y = weigh(b_n, b_scale, b_bias, WEIGHTED)
    if GATE_RESULT:
        b_y = round_to(b_y, WEIGHTED) * b_act
    return b_y


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_wide_kernel(
    # Read; None: the call has no such input.
    p_x, p_residual, p_gate, p_weight, p_bias,
    # Written; None: not asked for. p_scale: the steps of a quantised y, fp32 [rows], as rstd.
    p_y, p_sum, p_fp32, p_rstd, p_scale,
    n_outer, n_inner,
    s_x_outer, s_x_inner, s_residual_outer, s_residual_inner, s_gate_outer, s_gate_inner,
    eps, offset,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """y of wide rows, each read for rstd, for the largest element where y is quantised, and for y."""
    # lint: allow scalar-reduction: a row that does not fit is summed piece by piece, one number for each long piece
    GATE_RESULT: tl.constexpr = p_gate is not None and not GATE_FIRST
    o_one = tl.arange(0, 1)
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, ORDER == "heads")
    i_first, i_stop, n_step, i_head = rows_of_program(tl.program_id(0), tl.num_programs(0), n_outer, n_inner, ORDER)
    if p_weight is not None:
        p_weight += i_head * N
    if p_bias is not None:
        p_bias += i_head * N
    for i in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, i_row = row_position(i, i_head, n_inner, ORDER)
        p_x_row = row_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner)
        p_residual_row = row_at(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner)
        p_gate_row = row_at(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner)
        p_y_row = row_at(p_y, s_y_outer, s_y_inner, i_outer, i_inner)
        p_sum_row = row_at(p_sum, s_y_outer, s_y_inner, i_outer, i_inner)
        p_fp32_row = row_at(p_fp32, s_y_outer, s_y_inner, i_outer, i_inner)

        b_square = tl.zeros([1, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N, BLOCK_N):
            b_x, _, _ = load_input(
                p_x_row, p_residual_row, p_gate_row if GATE_FIRST else None, p_sum, i_col, N, BLOCK_N, ACTIVATION,
                GATE_FIRST, "evict_last"
            )  # fmt: skip
            b_square += b_x * b_x
        b_rstd = inverse_rms(b_square, eps, N)  # [1]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_one, b_rstd)

        if p_scale is not None:
            b_columns_amax, b_zero = tl.zeros([1, BLOCK_N], tl.float32), tl.zeros([1, BLOCK_N], tl.float32)
            for i_col in tl.range(0, N, BLOCK_N):
                b_x, _, b_act = load_input(
                    p_x_row, p_residual_row, p_gate_row, p_sum, i_col, N, BLOCK_N, ACTIVATION, GATE_FIRST, "evict_last"
                )
                b_y = result_of(
                    b_x, b_act, b_rstd, p_weight, p_bias, i_col, offset, N, BLOCK_N, NORMALISED, FACTORS, WEIGHTED,
                    GATE_RESULT
                )  # fmt: skip
                b_columns_amax = tl.maximum(b_columns_amax, tl.abs(b_y))
                b_zero += b_y * 0.0
            b_amax = amax_of_rows(b_columns_amax, b_zero)  # [1]

        for i_col in tl.range(0, N, BLOCK_N):
            b_x, b_sum, b_act = load_input(
                p_x_row, p_residual_row, p_gate_row, p_sum, i_col, N, BLOCK_N, ACTIVATION, GATE_FIRST, "evict_first"
            )
            if p_sum is not None:
                store_columns(p_sum_row, b_sum, i_col, N, BLOCK_N)
            b_y = result_of(
                b_x, b_act, b_rstd, p_weight, p_bias, i_col, offset, N, BLOCK_N, NORMALISED, FACTORS, WEIGHTED, GATE_RESULT
            )
            if p_fp32 is not None:
                store_columns(p_fp32_row, b_y, i_col, N, BLOCK_N)
            if p_scale is not None:
                b_y, b_steps = quantise(b_y, b_amax, p_y.dtype.element_ty == tl.int8)
                if i_col == 0:
                    tl.store(p_scale + i_row + o_one, b_steps)
            store_columns(p_y_row, b_y, i_col, N, BLOCK_N)
