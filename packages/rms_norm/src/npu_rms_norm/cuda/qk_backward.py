"""The backward on CUDA of the norms of q and k of a fused projection: one launch writes the whole gradient.

Programs are divided among q, k and v in proportion to their bytes: the first n_q take rows of q, the next n_k those of k,
and the others copy those of v. Rows and tiles: rows.py.
"""

import triton
import triton.language as tl

from .backward import backward_of_tiles
from .rows import load_chunk, rows_at, store_chunk, tile_position, tiles_of_program


@triton.jit(do_not_specialize=["n_outer", "n_q_inner", "n_k_inner", "n_q", "n_k"])
def qk_backward_kernel(
    # Read; None: no weights. Slices of q and k, and their gradients, have equal strides.
    p_dq, p_dk, p_dv, p_q, p_k, p_q_weight, p_k_weight, p_q_rstd, p_k_rstd,
    # Written: slices of the projection's gradient; fp32 [n_q + n_k, N], partial sums of the weights' (None: not needed).
    p_dx_q, p_dx_k, p_dx_v, p_dw,
    n_outer, n_q_inner, n_k_inner, n_q, n_k,
    s_dq_outer, s_dq_inner, s_dk_outer, s_dk_inner, s_dv_outer, s_dv_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k and v, and partial sums of the weights' gradients."""
    i_program = tl.program_id(0)
    n_norms = n_q + n_k
    if i_program < n_norms:
        is_q = i_program < n_q
        p_weight = p_q_weight
        if p_q_weight is not None:
            p_weight = tl.where(is_q, p_q_weight, p_k_weight)
        backward_of_tiles(
            tl.where(is_q, i_program, i_program - n_q), tl.where(is_q, n_q, n_k),
            tl.where(is_q, p_dq, p_dk), None, tl.where(is_q, p_q, p_k), None, p_weight, None,
            tl.where(is_q, p_q_rstd, p_k_rstd), tl.where(is_q, p_dx_q, p_dx_k), None, p_dw, None,
            n_outer, tl.where(is_q, n_q_inner, n_k_inner),
            tl.where(is_q, s_dq_outer, s_dk_outer), tl.where(is_q, s_dq_inner, s_dk_inner), 0, 0, s_x_outer, s_x_inner, 0, 0,
            s_dx_outer, s_dx_inner, offset, N, CHUNKS, M, BLOCK_N, ORDER, NORMALISED, FACTORS, "", "", False  # no gate
        )  # fmt: skip
    else:
        i_first, i_stop, n_step, i_head = tiles_of_program(
            i_program - n_norms, tl.num_programs(0) - n_norms, n_outer, n_k_inner, M, ORDER
        )
        for i_tile in tl.range(i_first, i_stop, n_step):
            i_outer, i_inner, o_row, m_row = tile_position(i_tile, i_head, n_outer, n_k_inner, M, ORDER)
            p_from = rows_at(p_dv, s_dv_outer, s_dv_inner, i_outer, i_inner, M, ORDER)
            p_to = rows_at(p_dx_v, s_dx_outer, s_dx_inner, i_outer, i_inner, M, ORDER)
            store_chunk(p_to, load_chunk(p_from, m_row, 0, N, M, BLOCK_N), m_row, 0, N, M, BLOCK_N)
