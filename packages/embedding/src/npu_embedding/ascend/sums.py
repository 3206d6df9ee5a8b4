"""Device code of the gradient on Ascend: rows of dy, summed by index.

    dweight[r] = sum of dy[order[i]] for offsets[r] <= i < offsets[r + 1]

`sorted` are keys in ascending order: row r has the key `key_of_row_0` + r. `order` says where each of them stood. Run r, the
equal keys of row r, lies between two offsets. Keys before the first offset or after the last name no row of this table.

The sorted positions are cut in `n_chunks` chunks of equal length, one for each program, so that the work is even however
long the runs are. `sum_runs_kernel` stores the sum of a run that lies in one chunk. A run that crosses a border between
chunks leaves partial sums: a head in each chunk that it enters from before, a tail in the chunk where it starts.
`finish_rows_kernel` adds those, in their order, and stores the rows without a run. Every row of dweight is stored once.

Sums are fp32, rounded once.
"""

import triton
import triton.language as tl

from ..formula import chunk_ends, dy_offset
from .columns import block_columns


@triton.jit
def sum_rows(p_dy, p_order, i_first, i_stop, n_part, s_part, s_dy, o_col, BLOCK_N: tl.constexpr, IN_PARTS: tl.constexpr):
    """fp32 [BLOCK_N]: the sum of the rows of dy at the sorted positions from `i_first` to before `i_stop`."""
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.range(i_first, i_stop):
        i_dy = dy_offset(tl.load(p_order + i), n_part, s_part, s_dy, IN_PARTS)
        b_sum += tl.load(p_dy + i_dy + o_col).to(tl.float32)
    return b_sum


@triton.jit
def store_gradient(p_row, b_sum, p_offsets, i_row, o_col, SCALE_BY_COUNT: tl.constexpr):
    """Stores the sum of run `i_row`, divided by its length where that is asked for."""
    if SCALE_BY_COUNT:
        n_equal = tl.load(p_offsets + i_row + 1) - tl.load(p_offsets + i_row)
        b_sum = b_sum / n_equal.to(tl.float32)
    tl.store(p_row + o_col, b_sum.to(p_row.dtype.element_ty))


@triton.jit(do_not_specialize=["n_rows", "n_chunks", "key_of_row_0", "i_padding", "n_part"])
def sum_runs_kernel(
    p_dy,
    p_order,
    p_sorted,
    p_offsets,  # [n_rows + 1]
    p_dweight,
    p_partials,  # fp32 [2, n_chunks, N]: heads, tails
    n_rows,
    n_chunks,
    key_of_row_0,
    i_padding,  # the row that gets no gradient, -1 for none
    n_part,  # rows of a part of dy
    s_part,
    s_dy,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """A program takes one chunk through one block of columns."""
    # races: allow p_partials: blocks of columns overlap at the row's end, where every program writes the same bits
    # races: allow p_dweight: blocks of columns overlap at the row's end, where every program writes the same bits
    i_block = tl.program_id(0) // n_chunks
    i_chunk = tl.program_id(0) - i_block * n_chunks
    o_col = block_columns(i_block, N, BLOCK_N)
    i_begin = tl.load(p_offsets).to(tl.int64)
    i_end = tl.load(p_offsets + n_rows).to(tl.int64)
    i_first, i_stop = chunk_ends(i_chunk, n_chunks, i_begin, i_end)
    if i_first < i_stop:
        i_head = tl.load(p_sorted + i_first).to(tl.int64) - key_of_row_0
        i_tail = tl.load(p_sorted + i_stop - 1).to(tl.int64) - key_of_row_0
        # From i_whole to before i_rest lie the runs that neither begin before this chunk nor go on after it.
        i_whole = i_first
        if tl.load(p_offsets + i_head) < i_first:
            i_whole = tl.minimum(tl.load(p_offsets + i_head + 1).to(tl.int64), i_stop)
        i_rest = i_stop
        if tl.load(p_offsets + i_tail + 1) > i_stop:
            i_rest = tl.maximum(tl.load(p_offsets + i_tail).to(tl.int64), i_whole)
        if (i_first < i_whole) & (i_head != i_padding):
            b_sum = sum_rows(p_dy, p_order, i_first, i_whole, n_part, s_part, s_dy, o_col, BLOCK_N, IN_PARTS)
            tl.store(p_partials + i_chunk.to(tl.int64) * N + o_col, b_sum)
        if (i_rest < i_stop) & (i_tail != i_padding):
            b_sum = sum_rows(p_dy, p_order, i_rest, i_stop, n_part, s_part, s_dy, o_col, BLOCK_N, IN_PARTS)
            tl.store(p_partials + (n_chunks + i_chunk).to(tl.int64) * N + o_col, b_sum)
        b_sum = tl.zeros([BLOCK_N], tl.float32)
        for i in tl.range(i_whole, i_rest):
            i_dy = dy_offset(tl.load(p_order + i), n_part, s_part, s_dy, IN_PARTS)
            i_row = tl.load(p_sorted + i).to(tl.int64) - key_of_row_0
            i_next = tl.load(p_sorted + tl.minimum(i + 1, i_stop - 1)).to(tl.int64) - key_of_row_0
            b_sum += tl.load(p_dy + i_dy + o_col).to(tl.float32)
            if (i_row != i_next) | (i + 1 == i_stop):
                if i_row != i_padding:
                    store_gradient(p_dweight + i_row * N, b_sum, p_offsets, i_row, o_col, SCALE_BY_COUNT)
                b_sum = tl.zeros([BLOCK_N], tl.float32)


@triton.jit
def add_partials(
    p_partials,
    p_sorted,
    p_offsets,
    p_dweight,
    n_rows,
    n_chunks,
    key_of_row_0,
    i_padding,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
):
    """Every border between two chunks, BLOCK_N columns at a time."""
    i_begin = tl.load(p_offsets).to(tl.int64)
    i_end = tl.load(p_offsets + n_rows).to(tl.int64)
    n_each = tl.maximum(tl.cdiv(i_end - i_begin, n_chunks), 1)
    n_blocks = tl.cdiv(N, BLOCK_N)
    for i_task in tl.range(tl.program_id(0), (n_chunks - 1) * n_blocks, tl.num_programs(0)):
        i_border = i_task // n_blocks + 1  # between the chunks i_border - 1 and i_border
        o_col = block_columns(i_task % n_blocks, N, BLOCK_N)
        i = i_begin + i_border * n_each
        if i < i_end:
            i_row = tl.load(p_sorted + i).to(tl.int64) - key_of_row_0
            i_start = tl.load(p_offsets + i_row).to(tl.int64)
            i_stop = tl.load(p_offsets + i_row + 1).to(tl.int64)
            # The first border that a run crosses adds up the whole run.
            if (i_start < i) & (i_start >= i - n_each) & (i_row != i_padding):
                i_last_chunk = (i_stop - 1 - i_begin) // n_each
                b_row = tl.zeros([BLOCK_N], tl.float32)
                for i_head in tl.range(i_border.to(tl.int64), i_last_chunk + 1):
                    # Always 1: without a product the sums have no barrier between them, compiler fault 5.
                    factor = tl.minimum(i_last_chunk + 1 - i_head, 1).to(tl.float32)
                    b_row += tl.load(p_partials + i_head * N + o_col) * factor
                b_row += tl.load(p_partials + (n_chunks + i_border - 1).to(tl.int64) * N + o_col)
                store_gradient(p_dweight + i_row * N, b_row, p_offsets, i_row, o_col, SCALE_BY_COUNT)


@triton.jit
def store_zeros(
    p_dweight,
    p_offsets,
    n_rows,
    i_padding,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every tile of dweight: zeros in the rows that have no run, and in the padding row."""
    o_m = tl.arange(0, BLOCK_M)
    b_zeros = tl.zeros([BLOCK_M, BLOCK_N], p_dweight.dtype.element_ty)
    b_zero = tl.zeros([BLOCK_N], p_dweight.dtype.element_ty)
    n_tiles = tl.cdiv(n_rows, BLOCK_M)
    for i_task in tl.range(tl.program_id(0), n_tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        i_block = i_task // n_tiles
        o_col = block_columns(i_block, N, BLOCK_N)
        i_row = (i_task - i_block * n_tiles).to(tl.int64) * BLOCK_M
        n_left = tl.minimum(n_rows - i_row, BLOCK_M)
        if tl.load(p_offsets + i_row) == tl.load(p_offsets + i_row + n_left):
            p_tile = p_dweight + i_row * N + (o_m[:, None] * N + o_col[None, :])
            tl.store(p_tile, b_zeros, mask=(o_m < n_left)[:, None])
        else:
            for i in tl.range(i_row, i_row + n_left):
                if (tl.load(p_offsets + i) == tl.load(p_offsets + i + 1)) | (i == i_padding):
                    tl.store(p_dweight + i * N + o_col, b_zero)


@triton.jit(do_not_specialize=["n_rows", "n_chunks", "key_of_row_0", "i_padding"])
def finish_rows_kernel(
    p_partials,
    p_sorted,
    p_offsets,
    p_dweight,
    n_rows,
    n_chunks,
    key_of_row_0,
    i_padding,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
):
    """Zeros, then partial sums: a launch for each would cost the host more than it spares the device."""
    # races: allow p_dweight: blocks of columns overlap at the row's end, where every program writes the same bits
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    store_zeros(p_dweight, p_offsets, n_rows, i_padding, N, BLOCK_M, BLOCK_N)
    # fmt: off
    add_partials(
        p_partials, p_sorted, p_offsets, p_dweight, n_rows, n_chunks, key_of_row_0, i_padding,
        N, BLOCK_N, SCALE_BY_COUNT,
    )
    # fmt: on
