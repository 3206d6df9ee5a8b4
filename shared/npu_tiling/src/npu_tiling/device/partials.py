"""Sums over all rows, such as the gradient of a weight: every program stores a partial sum, and another launch adds them.

The order of additions is fixed, so that equal inputs give equal bits; atomic additions would come in another order in every
run. `npu_tiling.launching.partials` launches the kernel of this file.
"""

from .language import tl, triton


@triton.jit
def store_partial(p_partials, b_terms, i_partial, o_col, N: tl.constexpr, EXACT: tl.constexpr):
    """Stores the sum over the rows of b_terms [rows, columns] as row i_partial of p_partials, fp32 [partials, N].

    EXACT: every column of o_col is below N.
    """
    p_partial = p_partials + tl.cast(i_partial, tl.int64) * N + o_col
    if EXACT:
        tl.store(p_partial, tl.sum(b_terms, axis=0))
    else:
        tl.store(p_partial, tl.sum(b_terms, axis=0), mask=o_col < N)


@triton.jit
def sum_of_partials(p_partials, n_partials, o_col, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 [BLOCK_N]: the sum over the rows of p_partials, fp32 [n_partials, N], at the columns o_col [BLOCK_N]."""
    o_row = tl.arange(0, BLOCK_M)
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_partial in tl.range(0, n_partials, BLOCK_M):
        p_tile = p_partials + tl.cast(i_partial, tl.int64) * N + (o_row[:, None] * N + o_col[None, :])
        m_tile = (o_row < n_partials - i_partial)[:, None]
        if N % BLOCK_N != 0:
            m_tile = m_tile & (o_col < N)[None, :]
        b_sum += tl.load(p_tile, mask=m_tile, other=0.0)
    return tl.sum(b_sum, axis=0)


@triton.jit(do_not_specialize=["n_partials"])
def sum_partials_kernel(
    p_partials,  # fp32 [n_partials, N]
    p_total,  # [N], of any float dtype
    n_partials,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """total = the sum of the partial sums, rounded once to total's dtype. A program takes blocks of columns."""
    # lint: allow short-transfer: the partial sums of all cores are a few KiB, of which every core adds some columns
    for i_block in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        o_col = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        b_total = sum_of_partials(p_partials, n_partials, o_col, N, BLOCK_M, BLOCK_N).to(p_total.dtype.element_ty)
        if N % BLOCK_N == 0:
            tl.store(p_total + o_col, b_total)
        else:
            tl.store(p_total + o_col, b_total, mask=o_col < N)
