"""Device code of the look-up on CUDA.

    out[i] = weight[index[i] - first_row]   -0.0 where the index lies in another shard   NaN where no shard has it

The table at hand holds rows from `first_row` to before `stop_row` of `n_total`. A tile is BLOCK_M indices by BLOCK_N
columns. Elements are bits here: integers of their size, whatever they mean.
"""

import triton
import triton.language as tl

from .columns import block_columns


@triton.jit(do_not_specialize=["n", "first_row", "stop_row", "n_total"])
def gather_rows_kernel(
    p_index,
    p_weight,
    p_out,
    n,
    first_row,
    stop_row,
    n_total,
    s_weight,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NAN: tl.constexpr,  # the bits of a NaN
):
    """Copies the row of the table that each index names; -0.0 where another shard has it, NaN where no shard does.

    Programs that run together read blocks of columns of the same rows, which lie side by side in memory.
    """
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    MINUS_ZERO: tl.constexpr = -(2**15) if p_out.dtype.element_ty == tl.int16 else -(2**31)  # the bits of -0.0
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    o_row = tl.arange(0, BLOCK_M)
    for i_task in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_M) * n_blocks, tl.num_programs(0)):
        i_tile = i_task // n_blocks
        i_row = i_tile.to(tl.int64) * BLOCK_M
        n_left = tl.minimum(n - i_row, BLOCK_M)
        o_col = block_columns(i_task - i_tile * n_blocks, BLOCK_N)
        b_index = tl.load(p_index + i_row + o_row, mask=o_row < n_left, other=first_row).to(tl.int64)  # [BLOCK_M]
        m_inside = (b_index >= first_row) & (b_index < stop_row)
        m_known = (b_index >= 0) & (b_index < n_total)
        b_fill = tl.where(m_known, tl.full([BLOCK_M], MINUS_ZERO, DTYPE), tl.full([BLOCK_M], NAN, DTYPE))
        m_tile = (o_row < n_left)[:, None]
        if N % BLOCK_N != 0:
            m_tile = m_tile & (o_col < N)[None, :]
        p_rows = p_weight + tl.where(m_inside, b_index - first_row, 0)[:, None] * s_weight
        b_rows = tl.load(p_rows + o_col[None, :], mask=m_tile & m_inside[:, None], other=0)  # [BLOCK_M, BLOCK_N]
        b_rows = tl.where(m_inside[:, None], b_rows, b_fill[:, None])
        tl.store(p_out + i_row * N + (o_row[:, None] * N + o_col[None, :]), b_rows, mask=m_tile)
