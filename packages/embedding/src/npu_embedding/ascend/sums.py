"""Device code of the gradient on Ascend: rows of dy, summed by index, and zeros.

    dweight[r] = sum of dy[order[i]] over the positions i with sorted[i] = key_of_row_0 + r

`sorted` are keys in ascending order: row r has the key `key_of_row_0` + r. `order` says where each of them stood. Run r is
the equal keys of row r. Indices with keys from `key_of_row_0` + n_rows on get no gradient.

Work is a list: for each row, the positions of its run, then the row itself, which is to be stored. Position i stands at
place i + its row, the end of row r at place r + the positions before row r + 1. The list is cut in `n_chunks` chunks of
equal length, one for each program, so that as much is read and written by each, however long the runs and the gaps between
them are. `sum_rows_kernel` stores zeros and the sum of a run that lies in one chunk. A row that crosses a border between
chunks leaves partial sums: a head in each chunk that it enters from before, a tail in the chunk where it starts.
`add_partials_kernel` adds the heads of such a row in the order of the chunks, then its tail. Every row of dweight is stored
once.

Sums are fp32, rounded once.
"""

import triton
import triton.language as tl

from ..formula import dy_offset
from .columns import block_columns


@triton.jit
def positions_before(p_sorted, i_place, key_of_row_0, n, n_steps):
    """How many positions stand before a place of the list."""
    i_first, i_stop = i_place * 0, i_place * 0 + n
    for _ in tl.range(0, n_steps):
        i_half = (i_first + i_stop) // 2
        i_row = tl.load(p_sorted + tl.minimum(i_half, n - 1)).to(tl.int64) - key_of_row_0
        before = (i_half + i_row < i_place) & (i_first < i_stop)
        i_stop = tl.where(before | (i_first >= i_stop), i_stop, i_half)
        i_first = tl.where(before, i_half + 1, i_first)
    return i_first


@triton.jit
def keys_below(p_sorted, key, i_first, i_stop, n_steps):
    """The first position from `i_first` to before `i_stop` whose key is not below `key`; `i_stop` if there is none."""
    i_first, i_stop = i_first.to(tl.int64), i_stop.to(tl.int64)
    for _ in tl.range(0, n_steps):
        i_half = (i_first + i_stop) // 2
        below = (tl.load(p_sorted + tl.minimum(i_half, tl.maximum(i_stop - 1, 0))) < key) & (i_first < i_stop)
        i_stop = tl.where(below | (i_first >= i_stop), i_stop, i_half)
        i_first = tl.where(below, i_half + 1, i_first)
    return i_first


@triton.jit
def count_places(p_sorted, n, n_rows, key_of_row_0, n_steps):
    """int64: a place for each row of the table, and for each index that names one."""
    return keys_below(p_sorted, key_of_row_0 + n_rows, n * 0, n, n_steps) + n_rows


@triton.jit
def sum_rows(p_dy, p_order, i_first, i_stop, n_part, s_part, s_dy, o_col, BLOCK_N: tl.constexpr, IN_PARTS: tl.constexpr):
    """fp32 [BLOCK_N]: the sum of the rows of dy at the sorted positions from `i_first` to before `i_stop`."""
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.range(i_first, i_stop):
        i_dy = dy_offset(tl.load(p_order + i), n_part, s_part, s_dy, IN_PARTS)
        b_sum += tl.load(p_dy + i_dy + o_col).to(tl.float32)
    return b_sum


@triton.jit
def store_zeros(p_dweight, i_row, i_stop, o_m, o_col, b_zeros, N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Zeros in the rows from `i_row` to before `i_stop`."""
    for i in tl.range(i_row, i_stop, BLOCK_M):
        tl.store(p_dweight + i * N + (o_m[:, None] * N + o_col[None, :]), b_zeros, mask=(o_m < i_stop - i)[:, None])


@triton.jit(do_not_specialize=["n", "n_rows", "n_chunks", "key_of_row_0", "n_steps", "n_part"])
def sum_rows_kernel(
    p_dy,
    p_order,
    p_sorted,
    p_dweight,
    p_partials,  # fp32 [2, n_chunks, N]: heads, tails
    n,
    n_rows,
    n_chunks,
    key_of_row_0,
    n_steps,  # of a search among n
    n_part,  # rows of a part of dy
    s_part,
    s_dy,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of zeros
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """Sums of the rows of dy that one index names, and zeros: a program takes one chunk through one block of columns."""
    # races: allow p_partials: blocks of columns overlap at the row's end, where every program writes the same bits
    # races: allow p_dweight: blocks of columns overlap at the row's end, where every program writes the same bits
    # lint: allow scalar-loop: a search among the keys reads single keys, and a row of dy has one place
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    i_block = tl.program_id(0) // n_chunks
    i_chunk = tl.program_id(0) - i_block * n_chunks
    o_m = tl.arange(0, BLOCK_M)
    o_col = block_columns(i_block, N, BLOCK_N)
    b_zeros = tl.zeros([BLOCK_M, BLOCK_N], p_dweight.dtype.element_ty)
    n_places = count_places(p_sorted, n, n_rows, key_of_row_0, n_steps)
    n_each = tl.cdiv(n_places, n_chunks)
    i_place = tl.minimum(i_chunk * n_each, n_places)
    i_end = tl.minimum(i_place + n_each, n_places)
    i_first = positions_before(p_sorted, i_place, key_of_row_0, n, n_steps)
    i_stop = positions_before(p_sorted, i_end, key_of_row_0, n, n_steps)
    i_row, i_last_row = i_place - i_first, i_end - i_stop  # rows that end before this chunk, and before its end
    # From i_whole to before i_rest lie the runs that neither begin before this chunk nor end after it.
    i_whole, i_rest = i_first, i_stop
    if i_first > 0:
        if (tl.load(p_sorted + i_first - 1).to(tl.int64) - key_of_row_0 == i_row) & (i_place < i_end):
            i_whole = keys_below(p_sorted, key_of_row_0 + i_row + 1, i_first, i_stop, n_steps)
            b_sum = sum_rows(p_dy, p_order, i_first, i_whole, n_part, s_part, s_dy, o_col, BLOCK_N, IN_PARTS)
            tl.store(p_partials + i_chunk.to(tl.int64) * N + o_col, b_sum)
            i_row = tl.minimum(i_row + 1, i_last_row)
    if i_whole < i_stop:
        i_rest = keys_below(p_sorted, key_of_row_0 + i_last_row, i_whole, i_stop, n_steps)
        if i_rest < i_stop:
            b_sum = sum_rows(p_dy, p_order, i_rest, i_stop, n_part, s_part, s_dy, o_col, BLOCK_N, IN_PARTS)
            tl.store(p_partials + (n_chunks + i_chunk).to(tl.int64) * N + o_col, b_sum)
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    i_run = i_whole
    i_this = i_row
    if i_whole < i_rest:
        i_this = tl.load(p_sorted + i_whole).to(tl.int64) - key_of_row_0
    for i in tl.range(i_whole, i_rest):
        i_dy = dy_offset(tl.load(p_order + i), n_part, s_part, s_dy, IN_PARTS)
        i_next = tl.load(p_sorted + tl.minimum(i + 1, i_rest - 1)).to(tl.int64) - key_of_row_0
        store_zeros(p_dweight, i_row, i_this, o_m, o_col, b_zeros, N, BLOCK_M)
        i_row = i_this
        b_sum += tl.load(p_dy + i_dy + o_col).to(tl.float32)
        if (i_this != i_next) | (i + 1 == i_rest):
            b_row = b_sum
            if SCALE_BY_COUNT:
                b_row = b_row / (i + 1 - i_run).to(tl.float32)
            tl.store(p_dweight + i_this * N + o_col, b_row.to(p_dweight.dtype.element_ty))
            b_sum = tl.zeros([BLOCK_N], tl.float32)
            i_run = i + 1
            i_row = i_this + 1
        i_this = i_next
    store_zeros(p_dweight, i_row, i_last_row, o_m, o_col, b_zeros, N, BLOCK_M)


@triton.jit(do_not_specialize=["n", "n_rows", "n_chunks", "key_of_row_0", "n_steps"])
def add_partials_kernel(
    p_partials,
    p_sorted,
    p_dweight,
    n,
    n_rows,
    n_chunks,
    key_of_row_0,
    n_steps,  # of a search among n
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
):
    """Adds the partial sums of rows that cross a border between two chunks."""
    # lint: allow scalar-loop: a search among the keys reads single keys
    # races: allow p_dweight: blocks of columns overlap at the row's end, where every program writes the same bits
    n_each = tl.cdiv(count_places(p_sorted, n, n_rows, key_of_row_0, n_steps), n_chunks)
    n_blocks = tl.cdiv(N, BLOCK_N)
    for i_task in tl.range(tl.program_id(0), (n_chunks - 1) * n_blocks, tl.num_programs(0)):
        i_border = i_task // n_blocks + 1  # between the chunks i_border - 1 and i_border
        o_col = block_columns(i_task % n_blocks, N, BLOCK_N)
        i_place = i_border.to(tl.int64) * n_each
        i = positions_before(p_sorted, i_place, key_of_row_0, n, n_steps)
        i_row = i_place - i
        if i > 0:
            key = tl.load(p_sorted + i - 1).to(tl.int64)
            if (key - key_of_row_0 == i_row) & (i_row < n_rows):
                i_start = keys_below(p_sorted, key, n * 0, i, n_steps)
                # The first border that a row crosses adds up the whole row.
                if i_start + i_row >= i_place - n_each:
                    i_stop = keys_below(p_sorted, key + 1, i, n, n_steps)
                    i_last_chunk = (i_stop + i_row) // n_each
                    b_row = tl.zeros([BLOCK_N], tl.float32)
                    for i_head in tl.range(i_border.to(tl.int64), i_last_chunk + 1):
                        # Always 1: without a product the sums have no barrier between them, compiler fault 5.
                        factor = tl.minimum(i_last_chunk + 1 - i_head, 1).to(tl.float32)
                        b_row += tl.load(p_partials + i_head * N + o_col) * factor
                    b_row += tl.load(p_partials + (n_chunks + i_border - 1).to(tl.int64) * N + o_col)
                    if SCALE_BY_COUNT:
                        b_row = b_row / (i_stop - i_start).to(tl.float32)
                    tl.store(p_dweight + i_row * N + o_col, b_row.to(p_dweight.dtype.element_ty))
