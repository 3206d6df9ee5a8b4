"""The backward on Ascend of rows that the Unified Buffer holds whole. Formulas: formula.py. Tiles: rows.py."""

import triton
import triton.language as tl
from npu_tiling.device.partials import store_partial
from npu_tiling.device.rounding import round_to

from ..both.columns import result_strides
from ..formula import activate, gradient_of_rows, load_factor, normalise, weigh
from .rows import load_rows, parameters_of_program, row_mask, store_rows, tile_mask, tile_position, tiles_of_program


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_kernel(
    # Read; None: the call has no such input. p_dsum: a gradient that reaches x from elsewhere.
    p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd,
    # Written; None: not needed. p_dw and p_db: fp32 [programs, N], a partial sum of each program.
    p_dx, p_dgate, p_dw, p_db,
    n_outer, n_inner,
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_gate_outer, s_gate_inner,
    s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradients of tiles of whole rows, and a partial sum of each parameter's gradient."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    o_col = tl.arange(0, BLOCK_N)
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, SPLIT == "heads")
    b_scale = load_factor(parameters_of_program(p_weight, n_outer, N, SPLIT), o_col, offset, N, BLOCK_N == N, FACTORS)
    if p_dgate is not None:  # nothing else needs the bias
        b_bias = load_factor(parameters_of_program(p_bias, n_outer, N, SPLIT), o_col, None, N, BLOCK_N == N, FACTORS)
    # The sums over this program's rows stay on chip until its last tile.
    if p_dw is not None:
        b_dw = tl.zeros([G * M, BLOCK_N], tl.float32)
    if p_db is not None:
        b_db = tl.zeros([G * M, BLOCK_N], tl.float32)
    i_first, i_stop, n_step = tiles_of_program(n_outer, n_inner, G, M, SPLIT)
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, n_groups, n_rows = tile_position(i_tile, n_outer, n_inner, G, M, SPLIT)
        i_row = tl.cast(i_outer, tl.int64) * n_inner + i_inner
        m_tile = tile_mask(n_groups, n_rows, N, G, M, BLOCK_N)

        b_x = load_rows(p_x, s_x_outer, s_x_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        b_dy = load_rows(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        b_rstd = tl.load(p_rstd + i_row + tl.arange(0, G * M), mask=row_mask(n_groups, n_rows, G, M), other=0.0)
        b_u = b_x
        if p_gate is not None:
            b_gate = load_rows(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            b_act, b_slope = activate(b_gate, ACTIVATION)
            if GATE_FIRST:
                b_u = b_x * b_act
        b_n = normalise(b_u, b_rstd, NORMALISED, FACTORS)
        if p_gate is not None:
            if not GATE_FIRST:
                if p_dgate is not None:
                    b_z = weigh(b_n, b_scale, b_bias, WEIGHTED)
                    b_dgate = b_dy * round_to(b_z, WEIGHTED) * b_slope
                    store_rows(p_dgate, b_dgate, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
                b_dy *= b_act

        if p_dw is not None:
            b_dw += b_dy * b_n
        if p_db is not None:
            b_db += b_dy
        if p_dx is not None:
            b_g = b_dy
            if p_weight is not None:
                b_g = b_dy * b_scale
            b_mean = tl.sum(b_g * b_n, axis=1) * (1.0 / N)  # [G * M]
            b_dx = gradient_of_rows(b_g, b_n, b_rstd, b_mean)
            if GATE_FIRST:
                if p_dgate is not None:
                    b_dgate = b_dx * b_x * b_slope
                    store_rows(p_dgate, b_dgate, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
                b_dx *= b_act
            if p_dsum is not None:
                b_dx += load_rows(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            store_rows(p_dx, b_dx, s_dx_outer, s_dx_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
    if p_dw is not None:
        store_partial(p_dw, b_dw, tl.program_id(0), o_col, N, BLOCK_N == N)
    if p_db is not None:
        store_partial(p_db, b_db, tl.program_id(0), o_col, N, BLOCK_N == N)
