"""The gradients of query and rms_weight from partial sums of dg."""

import triton
import triton.language as tl
from npu_tiling.device.partials import sum_of_partials

from .tile import load_rows, store_rows


@triton.jit(do_not_specialize=["n_partials"])
def attn_res_add_partials_kernel(
    p_partials,  # fp32 [n_partials, N]
    p_query,
    p_norm,
    p_dquery,  # None: not needed
    p_dnorm,  # None: not needed
    n_partials,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dg = the sum of the partial sums, in one fixed order; dquery = dg rms_weight, drms_weight = dg query."""
    # lint: allow short-transfer: the partial sums of all cores are a few KiB, of which every core adds some columns
    EXACT: tl.constexpr = N % BLOCK_N == 0
    for i_block in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        i_col = i_block * BLOCK_N
        b_dg = sum_of_partials(p_partials, n_partials, i_col + tl.arange(0, BLOCK_N), N, BLOCK_M, BLOCK_N)[None, :]
        if p_dquery is not None:
            b_norm = load_rows(p_norm + i_col, N, 1, N - i_col, 1, BLOCK_N, EXACT)  # [1, BLOCK_N]
            store_rows(p_dquery + i_col, N, b_dg * b_norm, 1, N - i_col, 1, BLOCK_N, EXACT)
        if p_dnorm is not None:
            b_query = load_rows(p_query + i_col, N, 1, N - i_col, 1, BLOCK_N, EXACT)
            store_rows(p_dnorm + i_col, N, b_dg * b_query, 1, N - i_col, 1, BLOCK_N, EXACT)
