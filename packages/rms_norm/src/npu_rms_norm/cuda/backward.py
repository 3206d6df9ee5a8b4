"""The backward on CUDA of rows that a program holds in registers. Formulas: formula.py. Tiles and chunks: rows.py."""

import triton
import triton.language as tl
from npu_tiling.device.partials import store_partial
from npu_tiling.device.rounding import round_to

from ..formula import activate, gradient_of_rows, load_factor, normalise, weigh
from .rows import load_chunk, parameters_of_head, result_rows_at, rows_at, store_chunk, tile_position, tiles_of_program


@triton.jit
def backward_of_tiles(
    i_program, n_programs, p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd, p_dx, p_dgate, p_dw, p_db, n_outer, n_inner,
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_gate_outer, s_gate_inner,
    s_dx_outer, s_dx_inner, offset,
    N: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr
):  # fmt: skip
    """`backward_kernel` of program i_program of n_programs. Its partial sums have row tl.program_id(0), not i_program."""
    i_first, i_stop, n_step, i_head = tiles_of_program(i_program, n_programs, n_outer, n_inner, M, ORDER)
    p_weight = parameters_of_head(p_weight, i_head, N, ORDER)
    p_bias = parameters_of_head(p_bias, i_head, N, ORDER)
    if CHUNKS == 1:  # several chunks of the weight would take the registers of rows
        o_col = tl.arange(0, BLOCK_N)
        b_scale = load_factor(p_weight, o_col, offset, N, BLOCK_N == N, FACTORS)
        if p_dgate is not None:  # nothing else needs the bias
            b_bias = load_factor(p_bias, o_col, None, N, BLOCK_N == N, FACTORS)
    # The sums over this program's rows stay in registers until its last tile.
    dw, db = (), ()
    for _ in tl.static_range(CHUNKS):
        if p_dw is not None:
            dw = dw + (tl.zeros([M, BLOCK_N], tl.float32),)
        if p_db is not None:
            db = db + (tl.zeros([M, BLOCK_N], tl.float32),)
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, o_row, m_row = tile_position(i_tile, i_head, n_outer, n_inner, M, ORDER)
        p_dy_tile = rows_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, M, ORDER)
        p_dsum_tile = rows_at(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner, M, ORDER)
        p_x_tile = rows_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, M, ORDER)
        p_gate_tile = rows_at(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, M, ORDER)
        p_dx_tile = rows_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner, M, ORDER)
        p_dgate_tile = result_rows_at(p_dgate, i_outer, i_inner, o_row, n_outer, N, M, ORDER)

        b_rstd = tl.load(p_rstd + o_row, mask=m_row, other=0.0)  # [M]
        b_product = tl.zeros([M, BLOCK_N], tl.float32)
        new_dw, new_db, normalised, gradients, acts, slopes = (), (), (), (), (), ()
        for c in tl.static_range(CHUNKS):
            b_x = load_chunk(p_x_tile, m_row, c, N, M, BLOCK_N)
            b_dy = load_chunk(p_dy_tile, m_row, c, N, M, BLOCK_N)
            o_chunk = c * BLOCK_N + tl.arange(0, BLOCK_N)
            if CHUNKS > 1:
                b_scale = load_factor(p_weight, o_chunk, offset, N, c * BLOCK_N + BLOCK_N <= N, FACTORS)
            b_u = b_x
            if p_gate is not None:
                b_act, b_slope = activate(load_chunk(p_gate_tile, m_row, c, N, M, BLOCK_N), ACTIVATION)
                if GATE_FIRST:
                    b_u = b_x * b_act
                    acts, slopes = acts + (b_act,), slopes + (b_x * b_slope,)
            b_n = normalise(b_u, b_rstd, NORMALISED, FACTORS)
            if p_gate is not None:
                if not GATE_FIRST:
                    if p_dgate is not None:
                        if CHUNKS > 1:
                            b_bias = load_factor(p_bias, o_chunk, None, N, c * BLOCK_N + BLOCK_N <= N, FACTORS)
                        b_z = round_to(weigh(b_n, b_scale, b_bias, WEIGHTED), WEIGHTED)
                        store_chunk(p_dgate_tile, b_dy * b_z * b_slope, m_row, c, N, M, BLOCK_N)
                    b_dy *= b_act
            if p_dw is not None:
                new_dw = new_dw + (dw[c] + b_dy * b_n,)
            if p_db is not None:
                new_db = new_db + (db[c] + b_dy,)
            if p_dx is not None:
                b_g = b_dy
                if p_weight is not None:
                    b_g = b_dy * b_scale
                b_product += b_g * b_n
                normalised, gradients = normalised + (b_n,), gradients + (b_g,)
        dw, db = new_dw, new_db

        if p_dx is not None:
            b_mean = tl.sum(b_product, axis=1) * (1.0 / N)  # [M]
            for c in tl.static_range(CHUNKS):
                b_dx = gradient_of_rows(gradients[c], normalised[c], b_rstd, b_mean)
                if GATE_FIRST:
                    if p_dgate is not None:
                        store_chunk(p_dgate_tile, b_dx * slopes[c], m_row, c, N, M, BLOCK_N)
                    b_dx *= acts[c]
                if p_dsum is not None:
                    b_dx += load_chunk(p_dsum_tile, m_row, c, N, M, BLOCK_N)
                store_chunk(p_dx_tile, b_dx, m_row, c, N, M, BLOCK_N)
    for c in tl.static_range(CHUNKS):
        o_chunk = c * BLOCK_N + tl.arange(0, BLOCK_N)
        if p_dw is not None:
            store_partial(p_dw, dw[c], tl.program_id(0), o_chunk, N, CHUNKS * BLOCK_N == N)
        if p_db is not None:
            store_partial(p_db, db[c], tl.program_id(0), o_chunk, N, CHUNKS * BLOCK_N == N)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_kernel(
    # Read; None: the call has no such input. p_dsum: a gradient that reaches x from elsewhere.
    p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd,
    # Written; None: not needed. p_dw, p_db: fp32 [programs, N], partial sums; where one program runs, the gradients.
    p_dx, p_dgate, p_dw, p_db,
    n_outer, n_inner,
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_gate_outer, s_gate_inner,
    s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradients of rows held in registers, and a partial sum of each parameter's gradient."""
    backward_of_tiles(
        tl.program_id(0), tl.num_programs(0), p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd, p_dx, p_dgate, p_dw, p_db,
        n_outer, n_inner, s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_gate_outer,
        s_gate_inner, s_dx_outer, s_dx_inner, offset, N, CHUNKS, M, BLOCK_N, ORDER, NORMALISED, FACTORS, WEIGHTED,
        ACTIVATION, GATE_FIRST
    )  # fmt: skip
