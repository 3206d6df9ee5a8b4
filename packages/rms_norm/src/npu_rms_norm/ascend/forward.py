"""The forward on Ascend of rows that the Unified Buffer holds whole. Formulas: formula.py. Tiles: rows.py."""

import triton
import triton.language as tl
from npu_tiling.device.rounding import round_to

from ..both.columns import result_strides
from ..formula import activate, add_residual, amax_of_rows, inverse_rms, load_factor, normalise, quantise, weigh
from .rows import load_rows, parameters_of_program, row_mask, store_rows, tile_mask, tile_position, tiles_of_program


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_kernel(
    # Read; None: the call has no such input.
    p_x, p_residual, p_gate, p_weight, p_bias,
    # Written; None: not asked for. p_scale: the steps of a quantised y, fp32 [rows], as rstd.
    p_y, p_sum, p_fp32, p_rstd, p_scale,
    n_outer, n_inner,
    s_x_outer, s_x_inner, s_residual_outer, s_residual_inner, s_gate_outer, s_gate_inner,
    eps, offset,
    N: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """y of tiles of whole rows, each read once; the sum, fp32, rstd and scales that are asked for."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    o_col = tl.arange(0, BLOCK_N)
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, SPLIT == "heads")
    b_scale = load_factor(parameters_of_program(p_weight, n_outer, N, SPLIT), o_col, offset, N, BLOCK_N == N, FACTORS)
    b_bias = load_factor(parameters_of_program(p_bias, n_outer, N, SPLIT), o_col, None, N, BLOCK_N == N, FACTORS)
    i_first, i_stop, n_step = tiles_of_program(n_outer, n_inner, G, M, SPLIT)
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, n_groups, n_rows = tile_position(i_tile, n_outer, n_inner, G, M, SPLIT)
        i_row = tl.cast(i_outer, tl.int64) * n_inner + i_inner
        o_row, m_row = tl.arange(0, G * M), row_mask(n_groups, n_rows, G, M)
        m_tile = tile_mask(n_groups, n_rows, N, G, M, BLOCK_N)

        b_x = load_rows(p_x, s_x_outer, s_x_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        if p_residual is not None:
            b_residual = load_rows(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            b_sum, b_x = add_residual(b_x, b_residual, p_sum)
            store_rows(p_sum, b_sum, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        if p_gate is not None:
            b_gate = load_rows(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            b_act, _ = activate(b_gate, ACTIVATION)
            if GATE_FIRST:
                b_x *= b_act

        b_rstd = inverse_rms(b_x * b_x, eps, N)  # [G * M]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_row, b_rstd, mask=m_row)
        b_y = weigh(normalise(b_x, b_rstd, NORMALISED, FACTORS), b_scale, b_bias, WEIGHTED)
        if p_gate is not None:
            if not GATE_FIRST:
                b_y = round_to(b_y, WEIGHTED) * b_act

        if p_fp32 is not None:
            store_rows(p_fp32, b_y, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        if p_scale is not None:
            b_amax = amax_of_rows(tl.abs(b_y), b_y * 0.0)
            b_y, b_steps = quantise(b_y, b_amax, p_y.dtype.element_ty == tl.int8)
            tl.store(p_scale + i_row + o_row, b_steps, mask=m_row)
        store_rows(p_y, b_y, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
