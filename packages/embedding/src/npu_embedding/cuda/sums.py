"""Device code of the gradient on CUDA: rows of dy, summed by row of the table, and zeros.

`sorted` are rows of the table in ascending order, of which the first `inside` have a gradient; `order` says where each of
them stood. The sorted positions are cut in `n_chunks` chunks of equal length, so that the work is even however long the runs
of equal rows are: a program sums one chunk in one block of columns. The sum of a run that lies in one chunk is stored at
once. A run that crosses one border between chunks is short: the chunk where it begins sums all of it. A run that crosses
several leaves partial sums: a head in each chunk that it enters from before, a tail in the chunk where it begins; a second
launch adds the heads of a run, then its tail, in one fixed order. Sums are fp32, rounded once. Every row of dweight is
stored once.
"""

import triton
import triton.language as tl

from ..formula import dy_offset
from .columns import block_columns, load_row, store_row


@triton.jit
def count_equal(p_sorted, i_first, i_end, step, i_row, BLOCK: tl.constexpr):
    """How many of the sorted positions i_first, i_first + step, ... have `i_row`, up to the first that does not."""
    o_i = i_first + tl.arange(0, BLOCK) * step
    n_equal = tl.sum((tl.load(p_sorted + o_i, mask=(o_i >= 0) & (o_i < i_end), other=-1) == i_row).to(tl.int32), axis=0)
    n_block = n_equal
    while n_block == BLOCK:
        o_i += BLOCK * step
        n_block = tl.sum((tl.load(p_sorted + o_i, mask=(o_i >= 0) & (o_i < i_end), other=-1) == i_row).to(tl.int32), axis=0)
        n_equal += n_block
    return n_equal


@triton.jit
def row_at(p_sorted, i, i_end):
    """The row at sorted position `i`, -1 where there is no such position."""
    return tl.load(p_sorted + i, mask=(i < i_end) & (i >= 0), other=-1)


@triton.jit
def summed_positions(p_sorted, i_first, i_stop, i_end, n_each):
    """First and stop of the positions that the chunk from `i_first` to before `i_stop` sums, and whether it begins in a run
    that leaves partial sums: with runs that cross one border, each summed where it begins.
    """
    i_row = row_at(p_sorted, i_first, i_end)
    i_before = row_at(p_sorted, i_first - 1, i_end)
    entered = i_before == i_row
    # The last position before the chunk before this one, and the first after this one.
    i_far, i_after = row_at(p_sorted, i_first - n_each - 1, i_end), row_at(p_sorted, i_first + n_each, i_end)
    if entered & (i_far != i_row) & (i_after != i_row):
        i_first += count_equal(p_sorted, i_first, i_end, 1, i_row, 32)
        entered = False
    i_last = row_at(p_sorted, i_stop - 1, i_end)
    goes_on = row_at(p_sorted, i_stop, i_end) == i_last
    if goes_on & (i_before != i_last) & (row_at(p_sorted, i_stop + n_each, i_end) != i_last):
        i_stop += count_equal(p_sorted, i_stop, i_end, 1, i_last, 32)
    return i_first, i_stop, entered


@triton.jit
def sum_chunk(
    p_dy,
    p_order,
    p_sorted,
    p_dweight,
    p_partials,
    i_end,
    i_chunk,
    n_chunks,
    n_part,
    s_part,
    s_dy,
    o_col,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
    IN_PARTS: tl.constexpr,
):
    """The runs of one chunk, through one block of columns."""
    n_each = tl.cdiv(i_end, n_chunks)
    i_first = i_chunk * n_each
    i_stop = tl.minimum(i_first + n_each, i_end)
    if i_first < i_stop:
        i_first, i_stop, entered = summed_positions(p_sorted, i_first, i_stop, i_end, n_each)
        i_row = row_at(p_sorted, i_first, i_stop).to(tl.int64)
        i_next = row_at(p_sorted, i_first + 1, i_end).to(tl.int64)
        # Loads of the next position wait beside those of this one, which a store of a sum would hold up.
        i_dy = dy_offset(tl.load(p_order + tl.minimum(i_first, i_stop - 1)), n_part, s_part, s_dy, IN_PARTS)
        i_order = tl.load(p_order + tl.minimum(i_first + 1, i_stop - 1))
        b_next = load_row(p_dy + i_dy, o_col, N, BLOCK_N)
        n_equal = 0
        b_sum = tl.zeros([BLOCK_N], tl.float32)
        for i in tl.range(i_first, i_stop):
            b_dy = b_next
            b_next = load_row(p_dy + dy_offset(i_order, n_part, s_part, s_dy, IN_PARTS), o_col, N, BLOCK_N)
            i_order = tl.load(p_order + tl.minimum(i + 2, i_stop - 1))
            i_after = row_at(p_sorted, i + 2, i_end).to(tl.int64)
            b_sum += b_dy.to(tl.float32)
            n_equal += 1
            if i_next != i_row:
                if entered:
                    store_row(p_partials + i_chunk * N, b_sum, o_col, N, BLOCK_N)
                else:
                    b_row = b_sum / n_equal if SCALE_BY_COUNT else b_sum
                    store_row(p_dweight + i_row * N, b_row, o_col, N, BLOCK_N)
                entered = False
                n_equal = 0
                b_sum = tl.zeros([BLOCK_N], tl.float32)
            i_row, i_next = i_next, i_after
        if n_equal > 0:  # the run goes on in the next chunk
            i_partial = tl.where(entered, i_chunk, n_chunks + i_chunk)
            store_row(p_partials + i_partial * N, b_sum, o_col, N, BLOCK_N)


@triton.jit
def store_zeros(p_dweight, i_row, m_zero, N: tl.constexpr, ZERO_M: tl.constexpr, ZERO_N: tl.constexpr):
    """Zeros in those of ZERO_M rows, from `i_row` on, that are in `m_zero`."""
    o_m = tl.arange(0, ZERO_M)
    b_zeros = tl.zeros([ZERO_M, ZERO_N], p_dweight.dtype.element_ty)
    for i_col in tl.static_range(0, N, ZERO_N):
        o_n = i_col + tl.arange(0, ZERO_N)
        m_tile = m_zero[:, None]
        if N % ZERO_N != 0:
            m_tile = m_tile & (o_n < N)[None, :]
        tl.store(p_dweight + i_row * N + (o_m[:, None] * N + o_n[None, :]), b_zeros, mask=m_tile)


@triton.jit(do_not_specialize=["n_chunks", "n_rows", "n_part"])
def sum_sorted_kernel(
    p_dy,
    p_order,
    p_sorted,
    p_inside,  # how many of them have a gradient
    p_marks,  # int8 [n_rows]: which rows have a run
    p_dweight,
    p_partials,  # fp32 [2, n_chunks, N]: heads, tails
    n_chunks,
    n_rows,
    n_part,  # rows of a part of dy
    s_part,
    s_dy,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
    IN_PARTS: tl.constexpr,
    ZERO_M: tl.constexpr,
    ZERO_N: tl.constexpr,
):
    """Sums of the rows of dy that one index names, and zeros in rows that have no run.

    A program takes one chunk through one block of columns, or stores zeros in those of ZERO_M rows that have no run.
    Sums come first: they take long, and zeros fill the time until the last of them ends.
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n_sums = n_chunks * n_blocks
    if tl.program_id(0) < n_sums:
        o_col = block_columns(tl.program_id(0) % n_blocks, BLOCK_N)
        i_chunk = (tl.program_id(0) // n_blocks).to(tl.int64)
        i_end = tl.load(p_inside).to(tl.int64)
        # fmt: off
        sum_chunk(
            p_dy, p_order, p_sorted, p_dweight, p_partials, i_end, i_chunk, n_chunks, n_part, s_part, s_dy, o_col,
            N, BLOCK_N, SCALE_BY_COUNT, IN_PARTS,
        )
        # fmt: on
    else:
        i_row = (tl.program_id(0) - n_sums).to(tl.int64) * ZERO_M
        o_m = tl.arange(0, ZERO_M)
        m_zero = tl.load(p_marks + i_row + o_m, mask=o_m < n_rows - i_row, other=1) == 0
        store_zeros(p_dweight, i_row, m_zero, N, ZERO_M, ZERO_N)


@triton.jit(do_not_specialize=["n_chunks"])
def add_partials_kernel(
    p_partials,
    p_sorted,
    p_inside,
    p_dweight,
    n_chunks,
    N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_BY_COUNT: tl.constexpr,
):
    """Adds the partial sums of runs that cross several borders between chunks.

    A program takes BLOCK_C borders and one block of columns, and adds BLOCK_P partial sums at a time.
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    o_col = block_columns(tl.program_id(0) % n_blocks, BLOCK_N)
    i_end = tl.load(p_inside).to(tl.int64)
    n_each = tl.maximum(tl.cdiv(i_end, n_chunks), 1)
    o_c = tl.arange(0, BLOCK_C)
    # Border b lies between the chunks b - 1 and b.
    o_border = (tl.program_id(0) // n_blocks).to(tl.int64) * BLOCK_C + 1 + o_c
    o_first = o_border * n_each
    b_row = row_at(p_sorted, o_first, i_end)
    m_crosses = (o_first < i_end) & (row_at(p_sorted, o_first - 1, i_end) == b_row)
    # The first border that a run crosses adds up the whole run, if the run crosses the next one too.
    m_first = row_at(p_sorted, o_first - n_each - 1, i_end) != b_row
    m_starts = m_crosses & m_first & (row_at(p_sorted, o_first + n_each, i_end) == b_row)
    o_p = tl.arange(0, BLOCK_P)
    for _ in tl.range(0, tl.sum(m_starts.to(tl.int32), axis=0)):
        i_c = tl.min(tl.where(m_starts, o_c, BLOCK_C), axis=0)
        m_starts = m_starts & (o_c != i_c)
        i_border = (tl.program_id(0) // n_blocks).to(tl.int64) * BLOCK_C + 1 + i_c
        i = i_border * n_each
        i_row = tl.load(p_sorted + i).to(tl.int64)
        n_heads = count_equal(p_sorted, i, i_end, n_each, i_row, 128)
        b_sum = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
        for i_head in tl.range(0, n_heads, BLOCK_P):
            m_heads = (o_p < n_heads - i_head)[:, None]
            if N % BLOCK_N != 0:
                m_heads = m_heads & (o_col < N)[None, :]
            p_heads = p_partials + (i_border + i_head) * N + (o_p[:, None] * N + o_col[None, :])
            b_sum += tl.load(p_heads, mask=m_heads, other=0.0)  # [BLOCK_P, BLOCK_N]
        b_total = tl.sum(b_sum, axis=0)
        b_total += load_row(p_partials + (n_chunks + i_border - 1) * N, o_col, N, BLOCK_N)
        if SCALE_BY_COUNT:
            i_last = i + (n_heads - 1) * n_each
            n_equal = count_equal(p_sorted, i - 1, i_end, -1, i_row, 128) + (n_heads - 1) * n_each
            n_equal += count_equal(p_sorted, i_last, i_end, 1, i_row, 128)
            b_total = b_total / n_equal
        store_row(p_dweight + i_row * N, b_total, o_col, N, BLOCK_N)
