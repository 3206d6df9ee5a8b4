"""Device code of the embedding's forward: rows of a table, by index.

    out[i] = weight[index[i] - first]   0 where the index lies in another shard   NaN where no shard has it

The table at hand holds rows from `first` to before `stop` of `n_total`. A tile is BLOCK_M indices by BLOCK_N columns;
programs stride over the tiles. Rows of the table are fetched whole, one transfer each, and a tile is stored at once.
Elements are bits here: integers of their size, whatever they mean.
"""

import triton
import triton.language as tl

from .tile import block_columns


@triton.jit
def copy_rows(
    p_index, p_weight, p_out, i_first, n_rows, first, stop, n_total, s_weight, o_col, b_zero, b_nan, N: tl.constexpr
):
    """Copies `n_rows` rows one by one, or fills them, as each index says."""
    for i in tl.range(i_first, i_first + n_rows):
        i_index = tl.load(p_index + i).to(tl.int64)
        p_row = p_out + i * N + o_col
        if (i_index >= first) & (i_index < stop):
            tl.store(p_row, tl.load(p_weight + (i_index - first) * s_weight + o_col))
        elif (i_index >= 0) & (i_index < n_total):
            tl.store(p_row, b_zero)
        else:
            tl.store(p_row, b_nan)


@triton.jit(do_not_specialize=["n", "first", "stop", "n_total"])
def gather_rows_kernel(
    p_index,
    p_weight,
    p_out,
    n,
    first,
    stop,
    n_total,
    s_weight,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK_COLUMNS: tl.constexpr,
    MASK_ROWS: tl.constexpr,  # CUDA, where masks cost nothing: rows of other shards are masked out of a tile
    GATHER: tl.constexpr,  # Ascend: a tile is fetched and stored at once; else its rows are, one by one
    NAN: tl.constexpr,  # the bits of a NaN
):
    # races: allow p_out: blocks of columns overlap at the row's end, where every program writes the same bits
    # lint: allow scalar-loop: indices that lie in the table are counted on scalars, before a tile of rows moves
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    o_row = tl.arange(0, BLOCK_M)
    if not MASK_ROWS:
        b_zero = tl.zeros([BLOCK_N], DTYPE)
        b_nan = tl.full([BLOCK_N], NAN, DTYPE)
    n_tiles = tl.cdiv(n, BLOCK_M)
    for i_task in tl.range(tl.program_id(0), n_tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        if MASK_ROWS:  # what lies side by side in memory is read side by side
            i_tile = i_task // tl.cdiv(N, BLOCK_N)
            i_block = i_task - i_tile * tl.cdiv(N, BLOCK_N)
            i_row = i_tile.to(tl.int64) * BLOCK_M
        else:
            i_block = i_task // n_tiles
            i_row = (i_task - i_block * n_tiles).to(tl.int64) * BLOCK_M
        n_left = tl.minimum(n - i_row, BLOCK_M)
        o_col = block_columns(i_block, N, BLOCK_N, MASK_COLUMNS)
        o_out = i_row * N + (o_row[:, None] * N + o_col[None, :])
        if MASK_ROWS:
            b_index = tl.load(p_index + i_row + o_row, mask=o_row < n_left, other=first).to(tl.int64)  # [BLOCK_M]
            m_inside = (b_index >= first) & (b_index < stop)
            m_known = (b_index >= 0) & (b_index < n_total)
            b_fill = tl.where(m_known, tl.zeros([BLOCK_M], DTYPE), tl.full([BLOCK_M], NAN, DTYPE))
            m_tile = (o_row < n_left)[:, None]
            if MASK_COLUMNS:
                m_tile = m_tile & (o_col < N)[None, :]
            p_rows = p_weight + tl.where(m_inside, b_index - first, 0)[:, None] * s_weight
            b_rows = tl.load(p_rows + o_col[None, :], mask=m_tile & m_inside[:, None], other=0)  # [BLOCK_M, BLOCK_N]
            b_rows = tl.where(m_inside[:, None], b_rows, b_fill[:, None])
            tl.store(p_out + o_out, b_rows, mask=m_tile)
        elif GATHER:
            n_inside = 0
            for i in tl.range(i_row, i_row + n_left):
                i_index = tl.load(p_index + i)
                n_inside += ((i_index >= first) & (i_index < stop)).to(tl.int32)
            if n_inside == n_left:
                b_index = tl.load(p_index + i_row + o_row, mask=o_row < n_left, other=first).to(tl.int64)  # [BLOCK_M]
                p_rows = p_weight - first.to(tl.int64) * s_weight + b_index[:, None] * s_weight
                b_rows = tl.load(p_rows + o_col[None, :])  # [BLOCK_M, BLOCK_N]: a transfer a row, and no select
                tl.store(p_out + o_out, b_rows, mask=(o_row < n_left)[:, None])
            else:
                copy_rows(p_index, p_weight, p_out, i_row, n_left, first, stop, n_total, s_weight, o_col, b_zero, b_nan, N)
        else:
            copy_rows(p_index, p_weight, p_out, i_row, n_left, first, stop, n_total, s_weight, o_col, b_zero, b_nan, N)
