"""The targets' part of the weight's gradient: for each token t, dW[target[t]] += g[t] x[t]. g: see formula.py.

First a sort by rank: each token's target is compared with all others, and its place is the number of tokens before it. The
T^2 compares cost little beside the products with the weight. Then one program sums each run of equal targets, in fp32.

Rows are tokens in the names below, and columns are targets, counted from the first row of the weight.
"""

import triton
import triton.language as tl


@triton.jit
def columns_of_targets(p_target, o_row, n_rows, first, N: tl.constexpr):
    """Targets as fp32 columns; N where a target is none of the weight's rows, and past the last token."""
    b_column = (tl.load(p_target + o_row, mask=o_row < n_rows, other=-1) - first).to(tl.float32)
    return tl.where((b_column >= 0.0) & (b_column < N), b_column, N)


@triton.jit(do_not_specialize=["n_rows", "first"])
def cross_entropy_order_kernel(
    p_target,  # int32 [rows], negative: none
    p_order,  # int32 [rows]: tokens, stably sorted by target; those without one last
    p_runs,  # int32 [rows]: at the start of a run of equal targets its length, 0 elsewhere
    n_rows,  # at most 2^24: places are counted in fp32
    first,  # the column of the vocabulary that column 0 is
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sorts tokens by target."""
    # lint: allow scalar-loop: each token is stored at its rank
    # lint: allow short-transfer: a target is four bytes, and is compared with a tile of others
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        o_row = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        m_row = o_row < n_rows
        b_column = columns_of_targets(p_target, o_row, n_rows, first, N)
        b_lower = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_equal = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_earlier = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_other in tl.range(0, n_rows, BLOCK_N):
            o_other = i_other + tl.arange(0, BLOCK_N)
            b_other = columns_of_targets(p_target, o_other, n_rows, first, N)
            b_difference = b_other[None, :] - b_column[:, None]
            b_distance = o_other.to(tl.float32)[None, :] - o_row.to(tl.float32)[:, None]
            b_same = tl.where(b_difference == 0.0, 1.0, 0.0)
            b_lower += tl.where(b_difference < 0.0, 1.0, 0.0)
            b_equal += b_same
            b_earlier += tl.where(b_distance < 0.0, b_same, 0.0)
        b_before = tl.sum(b_earlier.to(tl.int32), axis=1)
        b_place = tl.sum(b_lower.to(tl.int32), axis=1) + b_before
        m_first = (b_column < N) & (b_before.to(tl.float32) == 0.0)
        b_run = tl.where(m_first, tl.sum(b_equal.to(tl.int32), axis=1), 0)
        tl.store(p_order + b_place, o_row, mask=m_row)
        tl.store(p_runs + b_place, b_run, mask=m_row)


@triton.jit(do_not_specialize=["n_rows", "first"])
def cross_entropy_target_rows_kernel(
    p_x,  # [rows, H]
    p_gradient,  # fp32 [rows]: g
    p_target,  # int32 [rows]
    p_order,  # these two by the kernel above
    p_runs,
    p_dweight,  # [N, H], added to
    n_rows,
    s_x,
    s_dweight,
    first,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    AT_ONCE: tl.constexpr,  # rows that are loaded together
):
    """Adds g x to the rows of targets. One program takes a run: its sum is fp32, in the order of tokens, rounded once."""
    # lint: allow scalar-loop: rows are wherever the order says
    # lint: allow unaligned-rows: rows are as wide as the caller's; those not of whole 32 bytes are padded on chip
    # lint: allow short-transfer: rows are as wide as the caller's
    for i_place in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        n_run = tl.load(p_runs + i_place)
        if n_run > 0:
            column = tl.load(p_target + tl.load(p_order + i_place)) - first
            p_row = p_dweight + column.to(tl.int64) * s_dweight
            for i_h in tl.range(0, H, BLOCK_H):
                o_h = i_h + tl.arange(0, BLOCK_H)
                m_h = o_h < H
                b_sum = tl.load(p_row + o_h, mask=m_h, other=0.0).to(tl.float32)
                for i_run in tl.range(0, n_run, AT_ONCE):
                    for i_next in tl.static_range(AT_ONCE):
                        i_place_of_row = i_place + tl.minimum(i_run + i_next, n_run - 1)
                        i_row = tl.load(p_order + i_place_of_row)
                        m_x = m_h
                        if AT_ONCE > 1:
                            m_x = m_h & (i_run + i_next < n_run)
                        b_x = tl.load(p_x + i_row.to(tl.int64) * s_x + o_h, mask=m_x, other=0.0).to(tl.float32)
                        b_sum += b_x * tl.load(p_gradient + i_row)
                tl.store(p_row + o_h, b_sum.to(p_dweight.dtype.element_ty), mask=m_h)
