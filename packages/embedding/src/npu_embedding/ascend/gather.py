"""Device code of the look-up on Ascend.

    out[i] = weight[index[i] - first_row]   -0.0 where the index lies in another shard   NaN where no shard has it

The table at hand holds rows from `first_row` to before `stop_row` of `n_total`. A tile is BLOCK_M indices by BLOCK_N
columns; programs stride over the tiles. A row of the table is fetched in one transfer, and a tile is stored in one.
Elements are bits here: integers of their size, whatever they mean.
"""

import triton
import triton.language as tl

from .columns import block_columns


@triton.jit
def copy_rows(
    p_index, p_weight, p_out, i_first, n_rows, first_row, stop_row, n_total, s_weight, o_col, b_zero, b_nan, N: tl.constexpr
):
    """Copies `n_rows` rows one by one, or fills them, as each index says."""
    for i in tl.range(i_first, i_first + n_rows):
        i_index = tl.load(p_index + i).to(tl.int64)
        p_row = p_out + i * N + o_col
        if (i_index >= first_row) & (i_index < stop_row):
            tl.store(p_row, tl.load(p_weight + (i_index - first_row) * s_weight + o_col))
        elif (i_index >= 0) & (i_index < n_total):
            tl.store(p_row, b_zero)
        else:
            tl.store(p_row, b_nan)


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
    GATHER: tl.constexpr,  # whether a tile whose indices are all in the table moves at once; else rows move one by one
    NAN: tl.constexpr,  # the bits of a NaN
):
    """Copies the row of the table that each index names; -0.0 where another shard has it, NaN where no shard does."""
    # races: allow p_out: blocks of columns overlap at the row's end, where every program writes the same bits
    # lint: allow scalar-loop: indices that lie in the table are counted on scalars, before a tile of rows moves
    o_row = tl.arange(0, BLOCK_M)
    MINUS_ZERO: tl.constexpr = -(2**15) if p_out.dtype.element_ty == tl.int16 else -(2**31)  # the bits of -0.0
    b_zero = tl.full([BLOCK_N], MINUS_ZERO, p_out.dtype.element_ty)
    b_nan = tl.full([BLOCK_N], NAN, p_out.dtype.element_ty)
    n_tiles = tl.cdiv(n, BLOCK_M)
    for i_task in tl.range(tl.program_id(0), n_tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        i_block = i_task // n_tiles
        i_row = (i_task - i_block * n_tiles).to(tl.int64) * BLOCK_M
        n_left = tl.minimum(n - i_row, BLOCK_M)
        o_col = block_columns(i_block, N, BLOCK_N)
        o_out = i_row * N + (o_row[:, None] * N + o_col[None, :])
        if GATHER:
            n_inside = 0
            for i in tl.range(i_row, i_row + n_left):
                i_index = tl.load(p_index + i)
                n_inside += ((i_index >= first_row) & (i_index < stop_row)).to(tl.int32)
            if n_inside == n_left:
                b_index = tl.load(p_index + i_row + o_row, mask=o_row < n_left, other=first_row).to(tl.int64)  # [BLOCK_M]
                p_rows = p_weight - first_row.to(tl.int64) * s_weight + b_index[:, None] * s_weight
                b_rows = tl.load(p_rows + o_col[None, :])  # [BLOCK_M, BLOCK_N]: a transfer a row, and no select
                tl.store(p_out + o_out, b_rows, mask=(o_row < n_left)[:, None])
            else:
                copy_rows(p_index, p_weight, p_out, i_row, n_left, first_row, stop_row, n_total, s_weight,
                          o_col, b_zero, b_nan, N)  # fmt: skip
        else:
            copy_rows(p_index, p_weight, p_out, i_row, n_left, first_row, stop_row, n_total, s_weight,
                      o_col, b_zero, b_nan, N)  # fmt: skip
