"""The gradients of query and rms_weight from partial sums of dg."""

import triton
import triton.language as tl

from .tile import load_rows, store_rows


@triton.jit(do_not_specialize=["n_partials"])
def attn_res_weights_kernel(
    p_partials,  # fp32 [n_partials, D]
    p_query,
    p_norm,
    p_dquery,  # None: not needed
    p_dnorm,  # None: not needed
    n_partials,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dg = the sum of the partial sums, in one fixed order; dquery = dg rms_weight, drms_weight = dg query."""
    # lint: allow short-transfer: the partial sums of all cores are a few KiB, of which every core adds some columns
    EXACT: tl.constexpr = D % BLOCK_D == 0
    for i_block in tl.range(tl.program_id(0), tl.cdiv(D, BLOCK_D), tl.num_programs(0)):
        i_col = i_block * BLOCK_D
        b_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i_partial in tl.range(0, n_partials, BLOCK_M):
            p_row = p_partials + i_partial.to(tl.int64) * D + i_col
            b_sum += load_rows(p_row, D, n_partials - i_partial, D - i_col, BLOCK_M, BLOCK_D, EXACT)
        b_dg = tl.sum(b_sum, axis=0)[None, :]  # [1, BLOCK_D]
        if p_dquery is not None:
            b_norm = load_rows(p_norm + i_col, D, 1, D - i_col, 1, BLOCK_D, EXACT)
            store_rows(p_dquery + i_col, D, b_dg * b_norm, 1, D - i_col, 1, BLOCK_D, EXACT)
        if p_dnorm is not None:
            b_query = load_rows(p_query + i_col, D, 1, D - i_col, 1, BLOCK_D, EXACT)
            store_rows(p_dnorm + i_col, D, b_dg * b_query, 1, D - i_col, 1, BLOCK_D, EXACT)
