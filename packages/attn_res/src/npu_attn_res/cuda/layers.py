"""The forward of several layers that read the same sources, for CUDA: every source is read once for all of them.

On Ascend two passes over blocks of columns (both/columns.py) take less: the vector unit is the busiest part there, and an
online softmax rescales the sums of all layers for every source.
"""

import triton
import triton.language as tl

from ..both.tile import block_at, count_rows, load_query, load_rows, store_lse, store_rows, store_statistic
from ..formula import add_source, score_rows


@triton.jit(do_not_specialize=["n_blocks", "n_tokens"])
def attn_res_layers_kernel(
    # read: sources, their table (None: source i lies at i * s_block), [S, D] queries, rms_weight of one or of S rows
    p_v, p_table, p_query, p_norm,
    # written: o [n_tokens, S, D]; fp32 s [n_blocks, n_tokens, S], None: no backward follows; r [n_blocks, n_tokens]; lse
    p_o, p_score, p_rstd, p_lse,
    n_blocks, n_tokens, s_block, s_token, s_norm, eps,
    D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """o and lse of several layers, and the statistics, from one read of every source."""
    ROWS: tl.constexpr = BLOCK_M * BLOCK_S
    b_g = load_query(p_query, p_norm, s_norm, D, S, BLOCK_S, BLOCK_D)  # [BLOCK_S, BLOCK_D]
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0)):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        n_rows = count_rows(n_left, S)
        b_max = tl.full([ROWS], float("-inf"), tl.float32)
        b_sum = tl.zeros([ROWS], tl.float32)
        b_o = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for i_block in tl.range(0, n_blocks):
            p_block = block_at(p_v, p_table, s_block, i_block, ALIGNED) + i_token * s_token
            b_v = load_rows(p_block, s_token, n_left, D, BLOCK_M, BLOCK_D, BLOCK_D == D)  # [BLOCK_M, BLOCK_D]
            b_score, b_rstd, _ = score_rows(b_v, b_g, eps, D)  # [ROWS], [BLOCK_M]
            b_o, b_sum, b_max = add_source(b_v, b_score, b_o, b_sum, b_max)
            if p_score is not None:
                i_row = tl.cast(i_block, tl.int64) * n_tokens + i_token
                store_statistic(p_score + i_row * S, b_score, n_rows, ROWS)
                store_statistic(p_rstd + i_row, b_rstd, n_left, BLOCK_M)
        b_factor = store_lse(p_lse, b_max, b_sum, i_token * S, n_rows, ROWS)
        b_stored = (b_o * b_factor[:, None]).to(p_o.dtype.element_ty)
        store_rows(p_o + i_token * S * D, D, b_stored, n_rows, D, ROWS, BLOCK_D, BLOCK_D == D)
