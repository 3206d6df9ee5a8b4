"""Device code that multiplies by a number, or by a number of each row."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def cross_entropy_scale_kernel(
    p_values,  # [n]
    p_factor,  # one number
    p_out,  # [n], or None: in place
    n,
    BLOCK_N: tl.constexpr,
):
    """out = factor * values. In place, where the factor is 1, no value is read or written."""
    factor = tl.load(p_factor).to(tl.float32)
    n_changed, p_to = n, p_out
    if p_out is None:
        n_changed, p_to = tl.where(factor == 1.0, 0, n), p_values
    o_lane = tl.arange(0, BLOCK_N)
    for i_block in tl.range(tl.program_id(0), tl.cdiv(n_changed, BLOCK_N), tl.num_programs(0)):
        i_first = i_block.to(tl.int64) * BLOCK_N
        m_block = o_lane < n - i_first
        b_block = tl.load(p_values + i_first + o_lane, mask=m_block, other=0.0).to(tl.float32) * factor
        tl.store(p_to + i_first + o_lane, b_block.to(p_values.dtype.element_ty), mask=m_block)


@triton.jit
def load_row(p_block, m_block):
    """A block of a row, 0 where the mask says no; None: there is no mask."""
    if m_block is None:
        b_block = tl.load(p_block)
    else:
        b_block = tl.load(p_block, mask=m_block, other=0.0)
    return b_block


@triton.jit(do_not_specialize=["n_rows", "first"])
def cross_entropy_scale_rows_kernel(
    p_values,  # [rows, N]
    p_factors,  # fp32 [rows]
    p_out,  # [rows, N], the values' memory or another
    p_gradient,  # fp32 [rows]: g; None: nothing is added
    p_target,  # int32 [rows]
    p_weight,  # [V, N]
    n_rows,
    s_values,
    s_out,
    first,  # the column of the vocabulary that the weight's first row is
    s_weight,
    s_weight_column,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out = factor values + g W[target], in fp32 and rounded once."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; those not of whole 32 bytes are padded on chip
    # lint: allow fill-in-loop: the end of a row that is no whole block
    # lint: allow short-transfer: rows are as wide as the caller's
    o_lane = tl.arange(0, BLOCK_N)
    for i_row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0)):
        factor = tl.load(p_factors + i_row)
        p_from, p_to = p_values + i_row.to(tl.int64) * s_values, p_out + i_row.to(tl.int64) * s_out
        g, p_row = 0.0, p_weight
        if p_gradient is not None:
            g = tl.load(p_gradient + i_row)
            row = tl.where(g == 0.0, 0, tl.load(p_target + i_row) - first)  # g is 0 where the target is not one of these
            p_row = p_weight + row.to(tl.int64) * s_weight
        for i_col in tl.range(0, N, BLOCK_N):
            o_col = i_col + o_lane
            m_col = None if N % BLOCK_N == 0 else o_col < N
            b_value = load_row(p_from + o_col, m_col).to(tl.float32) * factor
            if p_gradient is not None:
                p_block = p_row + i_col.to(tl.int64) * s_weight_column  # of a transposed weight: V apart
                b_value += load_row(p_block + o_lane * s_weight_column, m_col).to(tl.float32) * g
            tl.store(p_to + o_col, b_value.to(p_out.dtype.element_ty), mask=m_col)
