"""The backward of wide rows: one kernel finds mean(g n) of each row, another one the gradients.

The second takes a block of columns through many rows: the sums for the parameters' gradients stay on chip. Formulas:
formula.py.
"""

import triton
import triton.language as tl
from npu_tiling.device.partials import store_partial
from npu_tiling.device.rounding import round_to

from ..formula import activate, gradient_of_rows, load_factor, normalise, weigh
from .columns import load_columns, result_strides, row_at, row_position, rows_of_program, store_columns


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_wide_mean_kernel(
    p_dy, p_x, p_gate, p_weight, p_rstd,  # read; None: the call has no such input
    p_mean,  # written, fp32 [rows]: mean(g n)
    n_outer, n_inner, s_dy_outer, s_dy_inner, s_x_outer, s_x_inner, s_gate_outer, s_gate_inner, offset,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr,
    WEIGHTED: tl.constexpr,  # not read: both kernels of a backward are compiled for one set of constants
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """mean(g n) of each row, for `backward_wide_kernel`, a block of columns at a time."""
    # lint: allow short-transfer: on an Ascend950 a row that does not fit beside another comes in equal pieces
    # lint: allow scalar-reduction: a row that does not fit is summed piece by piece, one number for each long piece
    o_one = tl.arange(0, 1)
    i_first, i_stop, n_step, i_head = rows_of_program(tl.program_id(0), tl.num_programs(0), n_outer, n_inner, ORDER)
    if p_weight is not None:
        p_weight += i_head * N
    for i in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, i_row = row_position(i, i_head, n_inner, ORDER)
        p_x_row = row_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner)
        p_dy_row = row_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner)
        p_gate_row = row_at(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner)
        b_rstd = tl.load(p_rstd + i_row + o_one)  # [1]
        b_product = tl.zeros([1, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N, BLOCK_N):
            b_x = load_columns(p_x_row, i_col, N, BLOCK_N, "")
            b_g = load_columns(p_dy_row, i_col, N, BLOCK_N, "")
            if p_weight is not None:
                o_col = i_col + tl.arange(0, BLOCK_N)
                b_g *= load_factor(p_weight, o_col, offset, N, N % BLOCK_N == 0, FACTORS)
            if p_gate is not None:
                b_act, _ = activate(load_columns(p_gate_row, i_col, N, BLOCK_N, ""), ACTIVATION)
                if GATE_FIRST:
                    b_x *= b_act
                else:
                    b_g *= b_act
            b_product += b_g * normalise(b_x, b_rstd, NORMALISED, FACTORS)
        tl.store(p_mean + i_row + o_one, tl.sum(b_product, axis=1) * (1.0 / N))


@triton.jit(do_not_specialize=["n_outer", "n_inner", "n_splits"])
def backward_wide_kernel(
    # Read; None: the call has no such input. p_mean is given with p_dx.
    p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd, p_mean,
    # Written; None: not needed. p_dw and p_db: partial sums, fp32 [n_splits, N].
    p_dx, p_dgate, p_dw, p_db,
    n_outer, n_inner, n_splits,
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_gate_outer, s_gate_inner,
    s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradients of blocks of columns of many rows, and partial sums of the parameters' gradients."""
    # lint: allow short-transfer: on an Ascend950 a row that does not fit beside another comes in equal pieces
    EXACT: tl.constexpr = N % BLOCK_N == 0
    o_one = tl.arange(0, 1)
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, ORDER == "heads")
    for i_task in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N) * n_splits, tl.num_programs(0)):
        i_split, i_col = i_task % n_splits, i_task // n_splits * BLOCK_N
        o_col = i_col + tl.arange(0, BLOCK_N)
        i_first, i_stop, n_step, i_head = rows_of_program(i_split, n_splits, n_outer, n_inner, ORDER)
        b_scale, b_bias = None, None
        if p_weight is not None:
            b_scale = load_factor(p_weight + i_head * N, o_col, offset, N, EXACT, FACTORS)
        if (p_bias is not None) and (p_dgate is not None):  # nothing else needs the bias
            b_bias = load_factor(p_bias + i_head * N, o_col, None, N, EXACT, FACTORS)
        if p_dw is not None:
            b_dw = tl.zeros([1, BLOCK_N], tl.float32)
        if p_db is not None:
            b_db = tl.zeros([1, BLOCK_N], tl.float32)
        for i in tl.range(i_first, i_stop, n_step):
            i_outer, i_inner, i_row = row_position(i, i_head, n_inner, ORDER)
            p_dgate_row = row_at(p_dgate, s_y_outer, s_y_inner, i_outer, i_inner)
            b_x = load_columns(row_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
            b_dy = load_columns(row_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
            b_rstd = tl.load(p_rstd + i_row + o_one)  # [1]
            b_u = b_x
            if p_gate is not None:
                p_gate_row = row_at(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner)
                b_act, b_slope = activate(load_columns(p_gate_row, i_col, N, BLOCK_N, ""), ACTIVATION)
                if GATE_FIRST:
                    b_u = b_x * b_act
            b_n = normalise(b_u, b_rstd, NORMALISED, FACTORS)
            if p_gate is not None:
                if not GATE_FIRST:
                    if p_dgate is not None:
                        b_z = round_to(weigh(b_n, b_scale, b_bias, WEIGHTED), WEIGHTED)
                        store_columns(p_dgate_row, b_dy * b_z * b_slope, i_col, N, BLOCK_N)
                    b_dy *= b_act

            if p_dw is not None:
                b_dw += b_dy * b_n
            if p_db is not None:
                b_db += b_dy
            if p_dx is not None:
                b_mean = tl.load(p_mean + i_row + o_one)  # [1]
                b_g = b_dy
                if p_weight is not None:
                    b_g = b_dy * b_scale
                b_dx = gradient_of_rows(b_g, b_n, b_rstd, b_mean)
                if GATE_FIRST:
                    if p_dgate is not None:
                        store_columns(p_dgate_row, b_dx * b_x * b_slope, i_col, N, BLOCK_N)
                    b_dx *= b_act
                if p_dsum is not None:
                    p_dsum_row = row_at(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner)
                    b_dx += load_columns(p_dsum_row, i_col, N, BLOCK_N, "")
                store_columns(row_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner), b_dx, i_col, N, BLOCK_N)
        if p_dw is not None:
            store_partial(p_dw, b_dw, i_split, o_col, N, EXACT)
        if p_db is not None:
            store_partial(p_db, b_db, i_split, o_col, N, EXACT)
