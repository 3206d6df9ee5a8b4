"""The gradients of query and rms_weight from partial sums of dg."""

import triton
import triton.language as tl
from npu_tiling.device.partials import sum_of_partials


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
    for i_block in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        o_col = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        m_col = o_col < N
        b_dg = sum_of_partials(p_partials, n_partials, o_col, N, BLOCK_M, BLOCK_N)  # [BLOCK_N]
        if p_dquery is not None:
            b_norm = tl.load(p_norm + o_col, mask=m_col, other=0.0).to(tl.float32)
            tl.store(p_dquery + o_col, (b_dg * b_norm).to(p_dquery.dtype.element_ty), mask=m_col)
        if p_dnorm is not None:
            b_query = tl.load(p_query + o_col, mask=m_col, other=0.0).to(tl.float32)
            tl.store(p_dnorm + o_col, (b_dg * b_query).to(p_dnorm.dtype.element_ty), mask=m_col)
