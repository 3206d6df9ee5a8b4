"""The look-up and the gradient's sums on CUDA: kernels, tables of their blocks, and their steps of a plan.

Look-up, as ascend.py has it: a tile is BLOCK_M indices by BLOCK_N columns, whose elements are bits.

Gradient of sorted indices. `sorted` are rows of the table in ascending order, of which the first `inside` have a gradient;
`order` says where each of them stood. The sorted positions are cut in `n_chunks` chunks of equal length, so that the work is
even however long the runs of equal rows are: a program sums one chunk in one block of columns. The sum of a run that lies in
one chunk is stored at once. A run that crosses one border between chunks is short: the chunk where it begins sums all of it.
A run that crosses several leaves partial sums: a head in each chunk that it enters from before, a tail in the chunk where it
begins; a second launch adds the heads of a run, then its tail, in one fixed order. Sums are fp32, rounded once. Every row of
dweight is stored once.

Gradient of indices that repeat: the sorted positions of a row are a bag of rows of dy, which the kernels of bags sum.

Gradient of few indices, in one launch without a sort: there is a program for each place in the indices and each block of
columns. It sums the row that its index names if that index is the row's first one; otherwise it ends. Further programs store
zeros in rows that get no gradient. Rows of dy are loaded a tile at a time, in the order of the indices.
"""

import dataclasses
from math import ceil

from npu_tiling.budget import FP32, here, power_of_two
from npu_tiling.calls import Empty
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling
from npu_tiling.plans import Plan, Slot

from ..call import NO_ID
from ..cuda import PART, ROWS_OF_DY, add_sums, bags_tiling
from ..formula import column_block, dy_offset, load_row, store_row
from ..rows import COPIES, FLOAT, MIN_CHUNK, BlockRule, Gradient, RowShape, Rule, Way
from .cuda_sort import RULE_OF, SEARCHED, Sorted, bags_of_rows, load_keys, sorted_rows, sorted_slots


@triton.jit(do_not_specialize=["n", "first_row", "stop_row", "n_total"])
def gather_rows_kernel(
    p_index, p_weight, p_out, n, first_row, stop_row, n_total, s_weight,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NAN: tl.constexpr,  # the bits of a NaN
):  # fmt: skip
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
        o_col = column_block(i_task - i_tile * n_blocks, BLOCK_N)
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
    """First and stop of the positions that the chunk from `i_first` to before `i_stop` sums, and whether it is entered.

    A run that crosses exactly one border is summed by the chunk where it begins. A chunk is entered by a run that begins
    before it and crosses several borders.
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
    p_dy, p_order, p_sorted, p_dweight, p_partials, i_end, i_chunk, n_chunks, n_part, s_part, s_dy, o_col,
    N: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_BY_COUNT: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
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
    p_dy, p_order, p_sorted,
    p_inside,  # how many of them have a gradient
    p_marks,  # int8 [n_rows]: which rows have a run
    p_dweight,
    p_partials,  # fp32 [2, n_chunks, N]: heads, tails
    n_chunks, n_rows,
    n_part,  # rows of a part of dy
    s_part, s_dy,
    N: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_BY_COUNT: tl.constexpr, IN_PARTS: tl.constexpr, ZERO_M: tl.constexpr,
    ZERO_N: tl.constexpr,
):  # fmt: skip
    """Sums of the rows of dy that one index names, and zeros in rows that have no run.

    A program takes one chunk through one block of columns, or stores zeros in those of ZERO_M rows that have no run.
    Sums come first: they take long, and zeros fill the time until the last of them ends.
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n_sums = n_chunks * n_blocks
    if tl.program_id(0) < n_sums:
        o_col = column_block(tl.program_id(0) % n_blocks, BLOCK_N)
        i_chunk = (tl.program_id(0) // n_blocks).to(tl.int64)
        i_end = tl.load(p_inside).to(tl.int64)
        sum_chunk(
            p_dy, p_order, p_sorted, p_dweight, p_partials, i_end, i_chunk, n_chunks, n_part, s_part, s_dy, o_col,
            N, BLOCK_N, SCALE_BY_COUNT, IN_PARTS,
        )  # fmt: skip
    else:
        i_row = (tl.program_id(0) - n_sums).to(tl.int64) * ZERO_M
        o_m = tl.arange(0, ZERO_M)
        m_zero = tl.load(p_marks + i_row + o_m, mask=o_m < n_rows - i_row, other=1) == 0
        store_zeros(p_dweight, i_row, m_zero, N, ZERO_M, ZERO_N)


@triton.jit(do_not_specialize=["n_chunks"])
def add_partials_kernel(
    p_partials, p_sorted, p_inside, p_dweight,
    n_chunks,
    N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_BY_COUNT: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of runs that cross several borders between chunks.

    A program takes BLOCK_C borders and one block of columns, and adds BLOCK_P partial sums at a time.
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    o_col = column_block(tl.program_id(0) % n_blocks, BLOCK_N)
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


@triton.jit
def either(a, b):
    """Bitwise or."""
    return a | b


@triton.jit
def sum_named(
    p_dy, p_index, p_dweight, n, n_rows, first_row, i_padding, n_part, s_part, s_dy, i, i_row, n_equal, o_col,
    N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_BY_COUNT: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """Stores one block of columns of `i_row`: the sum of dy at the places from `i` on whose index names that row."""
    b_sum = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    n_left = n_equal
    i_tile = i // BLOCK_K * BLOCK_K
    while (n_left > 0) & (i_tile < n):
        o_i = i_tile + tl.arange(0, BLOCK_K)
        m_equal = load_keys(p_index, o_i, n, n_rows, first_row, i_padding) == i_row  # [BLOCK_K]
        n_tile = tl.sum(m_equal.to(tl.int32), axis=0)
        if n_tile > 0:
            p_rows = p_dy + dy_offset(o_i, n_part, s_part, s_dy, IN_PARTS)
            m_tile = m_equal[:, None]
            if N % BLOCK_N != 0:
                m_tile = m_tile & (o_col < N)[None, :]
            b_sum += tl.load(p_rows[:, None] + o_col[None, :], mask=m_tile, other=0.0).to(tl.float32)
        n_left -= n_tile
        i_tile += BLOCK_K
    b_row = tl.sum(b_sum, axis=0)
    if SCALE_BY_COUNT:
        b_row = b_row / n_equal
    store_row(p_dweight + i_row * N, b_row, o_col, N, BLOCK_N)


@triton.jit(do_not_specialize=["n", "n_rows", "first_row", "i_padding", "n_part"])
def sum_searched_kernel(
    p_dy, p_index, p_dweight,
    n,  # at most BLOCK_M
    n_rows, first_row,
    i_padding,  # the row that gets no gradient, -1 for none
    n_part,  # rows of a part of dy
    s_part, s_dy,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_BY_COUNT: tl.constexpr,
    IN_PARTS: tl.constexpr,
    ZERO_M: tl.constexpr,  # at most 32
    ZERO_N: tl.constexpr,
):  # fmt: skip
    """One row of the table in one block of columns, or zeros in those of ZERO_M rows that get no gradient."""
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n_sums = n * n_blocks
    o_m = tl.arange(0, BLOCK_M)
    b_row = load_keys(p_index, o_m, n, n_rows, first_row, i_padding)  # [BLOCK_M]
    if tl.program_id(0) < n_sums:
        i = tl.program_id(0) // n_blocks
        i_row = load_keys(p_index, i, n, n_rows, first_row, i_padding)
        m_equal = b_row == i_row
        n_before = tl.sum((m_equal & (o_m < i)).to(tl.int32), axis=0)
        if (n_before == 0) & (i_row < n_rows):
            o_col = column_block(tl.program_id(0) % n_blocks, BLOCK_N)
            n_equal = tl.sum(m_equal.to(tl.int32), axis=0)
            sum_named(
                p_dy, p_index, p_dweight, n, n_rows, first_row, i_padding, n_part, s_part, s_dy, i, i_row, n_equal, o_col,
                N, BLOCK_K, BLOCK_N, SCALE_BY_COUNT, IN_PARTS,
            )  # fmt: skip
    else:
        i_row = (tl.program_id(0) - n_sums).to(tl.int64) * ZERO_M
        b_place = b_row - i_row
        b_bit = tl.where((b_place >= 0) & (b_place < ZERO_M), 1 << (b_place & 31).to(tl.int32), 0)
        i_bits = tl.reduce(b_bit, 0, either)  # bit r: row i_row + r gets a gradient
        o_z = tl.arange(0, ZERO_M)
        m_zero = (((i_bits >> o_z) & 1) == 0) & (o_z < n_rows - i_row)
        store_zeros(p_dweight, i_row, m_zero, N, ZERO_M, ZERO_N)


# The fastest on an H200. Each thread moves vectors of 16 bytes.
_SUMS = BlockRule(2048, 1024, 8, "a row is one load of all threads, and many rows are under way", here())
_SEARCH = BlockRule(128, 4096, 4, "few columns: several programs add a row that all indices name", here())
_PARTIALS = BlockRule(256, 4096, 4, "few columns: several programs add a run of thousands of partial sums", here())

_WARPS_PER_CORE = 32  # resident on a multiprocessor
_WAVES = 4  # of programs that sum, so that the last ones end together
_ROW_COLUMNS = 512  # a tile with more columns is one row
_ZEROS_COLUMNS = 512  # stored at once by a warp
_ZEROS_BYTES, _MAX_ZERO_ROWS = 16384, 64  # of a program
_BITS = 32  # of a number that says which rows of zeros are none
_BORDERS = 16  # between chunks, that a program of the launch of partial sums looks at


def gather_tiling(shape: RowShape) -> CountTiling:
    """Blocks of the look-up."""
    columns = COPIES.columns(shape)
    rows = COPIES.rows(columns * shape.itemsize) if columns <= _ROW_COLUMNS else 1
    return COPIES.tiling(shape, {"BLOCK_M": rows}, per_program=rows)


def sums_tiling(shape: RowShape) -> CountTiling:
    """Blocks of the gradient's sums and zeros; a program fills `per_program` rows with zeros."""
    rows = power_of_two(max(1, min(_MAX_ZERO_ROWS, _ZEROS_BYTES // (shape.width * shape.itemsize))))
    warps = max(1, min(_SUMS.max_warps, _SUMS.columns(shape) * shape.itemsize // _SUMS.warp_bytes))
    return _SUMS.tiling(shape, {"ZERO_M": rows, "ZERO_N": _zero_columns(shape, warps)}, per_program=rows, warps=warps)


def chunks(sums: CountTiling, n: int) -> int:
    """Pieces that n sorted positions are cut in, each through one block of columns."""
    resident = sums.device.vector_cores * _WARPS_PER_CORE // sums.warps // sums.column_blocks
    return max(1, min(_WAVES * resident, ceil(n / MIN_CHUNK)))


def partials_tiling(shape: RowShape) -> CountTiling:
    """Blocks of the gradient's partial sums; a program looks at `per_program` borders between chunks."""
    blocks = {"BLOCK_C": _BORDERS, "BLOCK_P": _PARTIALS.rows(_PARTIALS.columns(shape) * FP32)}
    return _PARTIALS.tiling(shape, blocks, per_program=_BORDERS)


def search_tiling(shape: RowShape) -> CountTiling:
    """Blocks of the gradient of few indices; a program fills `per_program` rows with zeros."""
    blocks = {"BLOCK_M": SEARCHED, "BLOCK_K": _SEARCH.rows(_SEARCH.columns(shape) * FP32)}
    blocks |= {"ZERO_M": _BITS, "ZERO_N": _zero_columns(shape, _SEARCH.max_warps)}
    rule, tiling = RULE_OF[Way.SEARCHED], _SEARCH.tiling(shape, blocks, per_program=_BITS)
    return dataclasses.replace(tiling, way=rule.way, why=rule.why, decided_at=rule.decided_at)


def _zero_columns(shape: RowShape, warps: int) -> int:
    """Columns of zeros that a program stores at once."""
    return min(power_of_two(shape.width), _ZEROS_COLUMNS * warps)


def backward(p: Plan, gradient: Gradient, dweight: Slot, rule: Rule) -> None:
    """Adds the steps that write dweight [n_rows, D] by a rule."""
    if rule.way is Way.SEARCHED:
        _sum_searched(p, gradient, dweight)
    elif rule.way is Way.REPEATED:
        _sum_repeated(p, gradient, dweight, rule)
    else:
        _sum_sorted(p, gradient, dweight, sorted_rows(p, gradient, rule))


def sum_slots(p: Plan, gradient: Gradient, values: Slot, slot: Slot, order: Slot) -> None:
    """Adds the steps that write values [n, D]: row r is the sum of the rows of dy whose slot is r, or zeros."""
    _sum_sorted(p, gradient, values, sorted_slots(p, gradient, slot, order))


def _sum_searched(p: Plan, gradient: Gradient, dweight: Slot) -> None:
    name = "embedding backward, searched"
    tiling = p.decide(name, search_tiling(gradient.shape(p.chip)))
    sums = gradient.indices.numel() * tiling.column_blocks
    p.launch(
        sum_searched_kernel,
        name,
        sums + ceil(gradient.n_rows / tiling.per_program),  # programs that store zeros
        reads={"p_dy": gradient.dy, "p_index": gradient.indices},
        writes={"p_dweight": dweight},
        sizes=gradient.sizes | gradient.dy_sizes,
        flags=gradient.flags,
    )


def _sum_repeated(p: Plan, gradient: Gradient, dweight: Slot, rule: Rule) -> None:
    """Adds the steps that sort, and sum a bag of rows of dy for each row of the table."""
    name, n, dy = "embedding backward, bags", gradient.indices.numel(), gradient.dy
    order, starts = bags_of_rows(p, gradient, rule)
    shape = RowShape(width=dy.shape[-1], itemsize=dweight.dtype.itemsize, device=p.chip)
    flags = {"FORMAT": "", "MEAN": gradient.scale_by_count, "PART": PART if n > PART else 0}
    tiling = p.decide(name, bags_tiling(shape, ROWS_OF_DY))
    reads = {"p_index": order, "p_offsets": starts, "p_weight": dy, "p_base": None, "p_sample": None, "p_steps": None}
    bags = {"n": n, "n_bags": gradient.n_rows, "n_offsets": gradient.n_rows + 1, "n_base": 1}
    table = {"first_row": 0, "stop_row": n, "n_total": n, "i_padding": NO_ID, "s_weight": dy.strides[0]}
    add_sums(p, name, tiling, shape, flags, dweight, reads, bags | table | {"factor": 1.0, "eps": None})


def _sum_sorted(p: Plan, gradient: Gradient, dweight: Slot, indices: Sorted) -> None:
    """Adds the steps that write the sums of rows that have a gradient, and zeros in those that have no mark."""
    (n_rows, width), name = dweight.shape, "embedding backward, sums"
    tiling = p.decide(name, sums_tiling(gradient.shape(p.chip)))
    n_chunks = chunks(tiling, gradient.indices.numel())
    partials = p.new(Empty((2, n_chunks, width), FLOAT))
    sorted_ = {"p_sorted": indices.rows, "p_inside": indices.inside}
    p.launch(
        sum_sorted_kernel,
        name,
        n_chunks * tiling.column_blocks + ceil(n_rows / tiling.per_program),  # programs that store zeros
        reads={"p_dy": gradient.dy, "p_order": indices.order, "p_marks": indices.marks, **sorted_},
        writes={"p_dweight": dweight, "p_partials": partials},
        sizes={"n_chunks": n_chunks, "n_rows": n_rows, **gradient.dy_sizes},
        flags=gradient.flags,
    )
    if n_chunks == 1:
        return
    p.launch_over(
        add_partials_kernel,
        partials_tiling(gradient.shape(p.chip)),
        n_chunks - 1,
        flags={"SCALE_BY_COUNT": gradient.scale_by_count},
        decision="embedding backward, partial sums",
        reads={"p_partials": partials, **sorted_},
        writes={"p_dweight": dweight},
        sizes={"n_chunks": n_chunks},
    )
