"""Look-ups that sum, decode or normalise rows (bags), bag by bag, and their backward up to dx and dsample.

    x_i = step[index[i]] weight[index[i]]      out[b] = factor * sum over the positions i of bag b of w_i x_i
    dx_i = factor w_i dy[b]                    dsample_i = factor x_i . dy[b]

w_i is the sample weight of position i. With MEAN out, dx and dsample are divided by the number of ids in the bag. The table
at hand holds rows from `first_row` to before `stop_row` of `n_total`. An id of another shard counts as zeros, an id that no
shard has as NaN; the id `i_padding` is not in its bag.

With eps a bag has one id, and with x = factor step weight, r = 1 / sqrt(mean(x^2) + eps):

    out = r x      dx = factor r (dy - out mean(dy out))

Sums are fp32, rounded once. Bags are taken one by one, BLOCK_N columns at a time. On CUDA these are the kernels, which stand
here with their tables of blocks; those of Ascend (bags/ascend.py) fall back on the same functions.

CUDA's kernel sums a bag of more than PART ids in parts of PART ids, which count from the start of the bag, and a second
launch adds the sums of the parts in order. So a sum depends on no other bag. No program knows how many parts the bags before
have. So a part has its place by where it begins: in each window of PART positions, from c PART to before (c + 1) PART, parts
of at most two long bags begin. One is that of the bag with the window's first position, whose sum is row 2 c of the partial
sums. The other is the first part of the bag with the window's last position, and has row 2 c + 1.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from npu_tiling.budget import here, power_of_two
from npu_tiling.calls import Empty
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling
from npu_tiling.plans import Plan, Slot

from .rows import COPIES, FLOAT, INT32, BlockRule, RowShape

BAGS = BlockRule(256, 4096, 1, "several rows of a bag are under way at a time, and are added in order", here())
ROWS_OF_DY = BlockRule(512, 4096, 1, "a row of the table is a bag of rows of dy, most of them short", here())

_UNDER_WAY = 8  # rows of a bag at most, however narrow: bags of 1 to 39 ids of 64 fp32 take .0551 ms, with 16 .0740
# Ids of a part. On an H200 (2026-11-30) 20,000 ids in 4,096 bags, one of them of 3,620, of 100000 x 1024 bf16 take .0343 ms;
# with parts of 128 ids .0405, and 1.914 with one program to a bag. Bags of lengths by Zipf's law take .0641 ms, with
# parts of 128 ids .0666; bags of 5 ids .0255, and .0244: twice as many programs look for long bags.
PART = 64
_SPREAD = 4  # positions, by a program of the backward
_LOOKED_AT = 8  # bags, by a program that adds the parts of long ones
_NORM_COLUMNS = 65536  # of a block that is a row, at most
_NORM_WARPS, _NORM_WARP_COLUMNS = 16, 1024  # of its program at most, and columns for each of them


@triton.jit
def decode(b_bits, FORMAT: tl.constexpr):
    """fp32: numbers as they are, or 8-bit floats from their bits in int8.

    A float with 5 bits of exponent is the upper half of an fp16. One with 4 has its fields one place lower, and is 2^8 times
    as large as an fp16 with the same fields.
    """
    if FORMAT == "e5m2":
        return (b_bits.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == "e4m3":
        b_wide = b_bits.to(tl.int16)  # the sign fills the upper byte
        b_half = ((b_wide & -32768) | ((b_wide & 127) << 7)).to(tl.float16, bitcast=True)
        b_value = b_half.to(tl.float32) * 256.0
        return tl.where(tl.abs(b_value) == 480.0, float("nan"), b_value)
    else:
        return b_bits.to(tl.float32)


@triton.jit
def mean_of_rows(b_rows, N: tl.constexpr):
    """fp32 [BLOCK_M, 1]: means of rows [BLOCK_M, BLOCK_N] of N elements; those after are zeros."""
    return tl.sum(b_rows, axis=1)[:, None] * (1.0 / N)


@triton.jit
def normalise(b_x, eps, N: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_N]: rows over the roots of their mean squares."""
    return b_x * tl.rsqrt(mean_of_rows(b_x * b_x, N) + eps)


@triton.jit
def normalise_backward(b_x, b_dy, eps, N: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_N]: the gradients of the rows `b_x` of `normalise`."""
    b_rstd = tl.rsqrt(mean_of_rows(b_x * b_x, N) + eps)
    b_y = b_x * b_rstd
    return (b_dy - b_y * mean_of_rows(b_dy * b_y, N)) * b_rstd


@triton.jit
def ids_of_each(p_offsets, n, n_bags):
    """How many ids each bag has; None where offsets say it."""
    if p_offsets is None:
        return n // n_bags


@triton.jit
def bag_ends(p_offsets, i_bag, n, n_offsets, n_each):
    """int64: first and stop of a bag's positions: `n_each` of them, or from one offset to the next, or to the end."""
    if p_offsets is None:
        return i_bag * n_each, (i_bag + 1) * n_each
    else:
        i_first = tl.load(p_offsets + i_bag).to(tl.int64)
        i_stop = tl.load(p_offsets + tl.minimum(i_bag + 1, n_offsets - 1)).to(tl.int64)
        i_stop = tl.where(i_bag + 1 < n_offsets, i_stop, n)
        return tl.maximum(i_first, 0), tl.minimum(i_stop, n)


@triton.jit
def id_at(p_index, p_base, i, n_base):
    """int64: the id at position `i`, in the whole of the packed tables."""
    i_id = tl.load(p_index + i).to(tl.int64)
    if p_base is not None:
        i_id += tl.load(p_base + i % n_base)
    return i_id


@triton.jit
def load_values(
    p_weight, p_steps, i_id, counted, first_row, stop_row, s_weight, o_col, N: tl.constexpr, FORMAT: tl.constexpr
):
    """fp32 [BLOCK_N]: a block of the row of an id, zeros where the table at hand does not have it or it is not counted."""
    has = counted & (i_id >= first_row) & (i_id < stop_row)
    i_row = tl.where(has, i_id - first_row, 0)
    b_value = decode(tl.load(p_weight + i_row * s_weight + o_col, mask=o_col < tl.where(has, N, 0), other=0), FORMAT)
    if p_steps is not None:
        b_value *= tl.where(has, tl.load(p_steps + i_row).to(tl.float32), 0.0)
    return b_value


@triton.jit
def sum_positions(
    p_index, p_base, p_sample, p_weight, p_steps, i_first, i_stop, n_base, first_row, stop_row, n_total, i_padding, s_weight,
    o_col, N: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, NORM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N]: the sum of the rows from one position to before another; and how many ids count, how many of these
    no shard has, and with NORM how many the table at hand has.

    Rows of BLOCK_M positions are under way at a time. They are added one by one, whatever BLOCK_M is.
    """
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    n_counted, n_wrong, n_inside = 0, 0, 0
    for i_next in tl.range(i_first, i_stop, BLOCK_M):
        for i_place in tl.static_range(BLOCK_M):
            i = i_next + i_place
            if BLOCK_M > 1:
                i = tl.minimum(i, i_stop - 1)
            i_id = id_at(p_index, p_base, i, n_base)
            counted = i_id != i_padding
            if BLOCK_M > 1:
                counted = counted & (i_next + i_place < i_stop)
            n_counted += tl.cast(counted, tl.int32)
            n_wrong += tl.cast(counted & ((i_id < 0) | (i_id >= n_total)), tl.int32)
            if NORM:
                n_inside += tl.cast((i_id >= first_row) & (i_id < stop_row), tl.int32)
            b_value = load_values(p_weight, p_steps, i_id, counted, first_row, stop_row, s_weight, o_col, N, FORMAT)
            if p_sample is not None:
                b_value *= tl.where(counted, tl.load(p_sample + i).to(tl.float32), 0.0)
            b_sum += b_value
    return b_sum, n_counted, n_wrong, n_inside


@triton.jit
def sum_bag(
    p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_out, i_bag, n, n_offsets, n_each, n_base, first_row, stop_row,
    n_total, i_padding, s_weight, factor, eps, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
    MEAN: tl.constexpr, BLOCK_M: tl.constexpr = 1, PART: tl.constexpr = 0,
):  # fmt: skip
    """Stores a block of columns of one bag; with PART only of a bag of at most so many ids."""
    i_first, i_stop = bag_ends(p_offsets, i_bag, n, n_offsets, n_each)
    m_col = o_col < N
    if PART > 0:
        is_short = i_stop - i_first <= PART
        i_stop = tl.where(is_short, i_stop, i_first)
        m_col = m_col & is_short
    b_sum, n_counted, n_wrong, n_inside = sum_positions(
        p_index, p_base, p_sample, p_weight, p_steps, i_first, i_stop, n_base, first_row, stop_row, n_total, i_padding,
        s_weight, o_col, N, BLOCK_N, FORMAT, eps is not None, BLOCK_M,
    )  # fmt: skip
    if MEAN:
        b_sum = b_sum / tl.maximum(n_counted, 1).to(tl.float32)
    b_sum = b_sum * factor + tl.where(n_wrong > 0, float("nan"), 0.0)
    if eps is not None:
        eps_row = tl.where(n_inside > 0, eps, 1.0)  # a row that the table does not have stays zeros, or NaN
        b_sum = tl.reshape(normalise(tl.reshape(b_sum, [1, BLOCK_N]), eps_row, N), [BLOCK_N])
    tl.store(p_out + i_bag * N + o_col, b_sum.to(p_out.dtype.element_ty), mask=m_col)


@triton.jit
def bag_of(p_offsets, i, n_bags, n_each):
    """int64: the last bag that begins at position `i` or before; 0 where none does."""
    if p_offsets is None:
        return i // n_each
    else:
        o_mark = tl.arange(0, 64)
        i_bag = i * 0
        n_left = n_bags
        while n_left > 1:  # bags from `i_bag`, of which 64 are looked at
            step = tl.cdiv(n_left, 64)
            m_mark = o_mark * step < n_left
            b_first = tl.load(p_offsets + i_bag + o_mark * step, mask=m_mark, other=0)
            n_before = tl.sum((m_mark & (b_first <= i)).to(tl.int32), axis=0)
            n_passed = tl.maximum(n_before - 1, 0) * step
            i_bag += n_passed
            n_left = tl.minimum(n_left - n_passed, step)
        return i_bag


@triton.jit
def sum_part(
    p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_parts, p_counts, i_part, n, n_bags, n_offsets, n_each, n_base,
    first_row, stop_row, n_total, i_padding, s_weight, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
    MEAN: tl.constexpr, BLOCK_M: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Stores a block of columns of a row of the partial sums, and how many ids count, if a long bag has a part for it."""
    i_window = i_part // 2 * PART
    i_last = i_part % 2 * (PART - 1)  # 0 in the row of the bag with the first position
    i_at = tl.minimum(i_window + i_last, n - 1)
    i_first, i_stop = bag_ends(p_offsets, bag_of(p_offsets, i_at, n_bags, n_each), n, n_offsets, n_each)
    i_begin = i_first + tl.cdiv(tl.maximum(i_window - i_first, 0), PART) * PART
    is_own = (i_first <= i_at) & ((i_last == 0) | (i_first > i_window))
    if is_own & (i_begin < i_stop) & (i_stop - i_first > PART):
        b_sum, n_counted, n_wrong, n_inside = sum_positions(
            p_index, p_base, p_sample, p_weight, p_steps, i_begin, tl.minimum(i_begin + PART, i_stop), n_base, first_row,
            stop_row, n_total, i_padding, s_weight, o_col, N, BLOCK_N, FORMAT, False, BLOCK_M,
        )  # fmt: skip
        b_sum += tl.where(n_wrong > 0, float("nan"), 0.0)
        tl.store(p_parts + i_part * N + o_col, b_sum, mask=o_col < N)
        if MEAN:
            tl.store(p_counts + i_part, n_counted)


@triton.jit
def count_ids(p_index, p_base, i_first, i_stop, n_base, i_padding):
    """int32: how many ids from one position to before another are in their bag."""
    n_counted = 0
    for i_next in tl.range(i_first, i_stop, 256):
        o_i = i_next + tl.arange(0, 256)
        b_id = id_at(p_index, p_base, tl.minimum(o_i, i_stop - 1), n_base)
        n_counted += tl.sum(((b_id != i_padding) & (o_i < i_stop)).to(tl.int32), axis=0)
    return n_counted


@triton.jit
def store_zeros(p_dx, p_dsample, i_first, i_stop, n, i_block, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros in a block of columns of dx, and in dsample, of positions that are in no bag."""
    b_zero = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.range(i_first, i_stop):
        if p_dx is not None:
            tl.store(p_dx + i * N + o_col, b_zero.to(p_dx.dtype.element_ty), mask=o_col < N)
        if p_dsample is not None:
            tl.store(p_dsample + i_block * tl.cast(n, tl.int64) + i + tl.arange(0, 1), tl.zeros([1], tl.float32))


@triton.jit
def spread_positions(
    p_dy, p_index, p_base, p_sample, p_weight, p_dx, p_dsample, i_bag, i_first, i_stop, n_counted, n, n_base, first_row,
    stop_row, i_padding, s_dy, s_weight, factor, eps, i_block, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """Stores a block of columns of dx of positions of one bag, and its part of their dsample; n_counted: ids of the bag."""
    b_dy = tl.load(p_dy + i_bag * s_dy + o_col, mask=o_col < N, other=0.0).to(tl.float32) * factor
    if MEAN:
        b_dy = b_dy / tl.maximum(n_counted, 1).to(tl.float32)
    for i in tl.range(i_first, i_stop):
        b_dx = b_dy
        if p_weight is not None:
            i_id = id_at(p_index, p_base, i, n_base)
            counted = i_id != i_padding
            b_x = load_values(p_weight, None, i_id, counted, first_row, stop_row, s_weight, o_col, N, "")
            if eps is not None:
                b_x = tl.reshape(b_x * factor, [1, BLOCK_N])
                b_dx = tl.reshape(normalise_backward(b_x, tl.reshape(b_dx, [1, BLOCK_N]), eps, N), [BLOCK_N])
        if p_dsample is not None:
            b_dot = tl.zeros([1], tl.float32)
            if counted & (i_id >= first_row) & (i_id < stop_row):  # else 0 * dy, which is NaN where dy is inf
                b_dot = tl.sum(tl.reshape(b_x * b_dy, [1, BLOCK_N]), axis=1)  # [1]
            tl.store(p_dsample + i_block * tl.cast(n, tl.int64) + i + tl.arange(0, 1), b_dot)
        if p_dx is not None:
            if p_sample is not None:
                b_dx = b_dx * tl.load(p_sample + i).to(tl.float32)
            tl.store(p_dx + i * N + o_col, b_dx.to(p_dx.dtype.element_ty), mask=o_col < N)


@triton.jit(do_not_specialize=["n", "n_bags", "n_offsets", "n_base", "first_row", "stop_row", "n_total", "i_padding"])
def sum_bags_kernel(
    # As those of Ascend's kernel.
    p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_out,
    p_parts,  # fp32 [2 * windows, N]: partial sums of bags of more than PART ids; None without PART
    p_counts,  # int32 [2 * windows]: how many ids count in each; None without MEAN
    n, n_bags, n_offsets, n_base, first_row, stop_row, n_total, i_padding, s_weight, factor, eps,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, MEAN: tl.constexpr,
    PART: tl.constexpr,  # 0: no bag is in parts
):  # fmt: skip
    """The sum of the rows of each bag, decoded, weighted and times a factor; MEAN: over the number of its ids.

    Of a bag of more than PART ids the sums of its parts, whose programs come first.
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n_each = ids_of_each(p_offsets, n, n_bags)
    n_parts = 0
    if PART > 0:
        n_parts = 2 * tl.cdiv(n, PART)
    for i_task in tl.range(tl.program_id(0), (n_parts + n_bags) * n_blocks, tl.num_programs(0)):
        o_col = i_task % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        i_sum = tl.cast(i_task // n_blocks, tl.int64)
        if i_sum < n_parts:
            if PART > 0:
                sum_part(
                    p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_parts, p_counts, i_sum, n, n_bags, n_offsets,
                    n_each, n_base, first_row, stop_row, n_total, i_padding, s_weight, o_col,
                    N, BLOCK_N, FORMAT, MEAN, BLOCK_M, PART,
                )  # fmt: skip
        else:
            sum_bag(
                p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_out, i_sum - n_parts, n, n_offsets, n_each,
                n_base, first_row, stop_row, n_total, i_padding, s_weight, factor, eps, o_col,
                N, BLOCK_N, FORMAT, MEAN, BLOCK_M, PART,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n", "n_bags", "n_offsets"])
def add_parts_kernel(
    p_parts, p_counts, p_offsets, p_out, n, n_bags, n_offsets, factor,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, MEAN: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """The sums of bags of more than PART ids, of their partial sums. A program looks at BLOCK_B bags."""
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n_each = ids_of_each(p_offsets, n, n_bags)
    o_bag = tl.arange(0, BLOCK_B)
    for i_task in tl.range(tl.program_id(0), tl.cdiv(n_bags, BLOCK_B) * n_blocks, tl.num_programs(0)):
        o_col = i_task % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        i_group = tl.cast(i_task // n_blocks, tl.int64) * BLOCK_B
        n_looked_at = tl.minimum(n_bags - i_group, BLOCK_B)
        b_first, b_stop = bag_ends(p_offsets, i_group + tl.minimum(o_bag, n_looked_at - 1), n, n_offsets, n_each)
        n_longest = tl.max(b_stop - b_first, axis=0)
        for i_bag in tl.range(i_group, i_group + tl.where(n_longest > PART, n_looked_at, 0)):
            i_first, i_stop = bag_ends(p_offsets, i_bag, n, n_offsets, n_each)
            if i_stop - i_first > PART:
                i_window = i_first // PART
                b_sum = tl.zeros([BLOCK_N], tl.float32)
                n_parts, n_counted = tl.cdiv(i_stop - i_first, PART), 0
                for i_next in tl.range(0, n_parts, BLOCK_M):
                    for i_place in tl.static_range(BLOCK_M):
                        i = i_next + i_place
                        # The first part is in the row of the window's last position, unless it begins with the window.
                        i_part = 2 * (i_window + i) + tl.where((i == 0) & (i_first % PART != 0), 1, 0)
                        b_sum += tl.load(p_parts + i_part * N + o_col, mask=o_col < tl.where(i < n_parts, N, 0), other=0.0)
                        if MEAN:
                            n_counted += tl.load(p_counts + i_part, mask=i < n_parts, other=0)
                if MEAN:
                    b_sum = b_sum / tl.maximum(n_counted, 1).to(tl.float32)
                tl.store(p_out + i_bag * N + o_col, (b_sum * factor).to(p_out.dtype.element_ty), mask=o_col < N)


@triton.jit(do_not_specialize=["n", "n_bags", "n_offsets", "n_base", "first_row", "stop_row", "i_padding"])
def spread_bags_kernel(
    # As those of Ascend's kernel.
    p_dy, p_index, p_offsets, p_base, p_sample, p_weight, p_dx, p_dsample,
    n, n_bags, n_offsets, n_base, first_row, stop_row, i_padding, s_dy, s_weight, factor, eps,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """dx of BLOCK_M positions, whatever bags they are in, and the gradients of their sample weights."""
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n_each = ids_of_each(p_offsets, n, n_bags)
    for i_task in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK_M) * n_blocks, tl.num_programs(0)):
        i_block = i_task % n_blocks
        o_col = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        i_place = tl.cast(i_task // n_blocks, tl.int64) * BLOCK_M
        i_end = tl.minimum(i_place + BLOCK_M, n)
        while i_place < i_end:  # the positions of one bag, or of none
            i_bag = bag_of(p_offsets, i_place, n_bags, n_each)
            i_first, i_stop = bag_ends(p_offsets, i_bag, n, n_offsets, n_each)
            i_next = tl.minimum(i_stop, i_end)
            if (i_first <= i_place) & (i_place < i_stop):
                n_counted = 0
                if MEAN:
                    n_counted = count_ids(p_index, p_base, i_first, i_stop, n_base, i_padding)
                spread_positions(
                    p_dy, p_index, p_base, p_sample, p_weight, p_dx, p_dsample, i_bag, i_place, i_next, n_counted, n, n_base,
                    first_row, stop_row, i_padding, s_dy, s_weight, factor, eps, i_block, o_col, N, BLOCK_N, MEAN,
                )  # fmt: skip
            else:
                i_next = tl.where(i_place < i_first, tl.minimum(i_first, i_end), i_end)
                store_zeros(p_dx, p_dsample, i_place, i_next, n, i_block, o_col, N, BLOCK_N)
            i_place = i_next


def bags_tiling(shape: RowShape, rule: BlockRule) -> CountTiling:
    """Blocks of a look-up of bags on CUDA."""
    return rule.tiling(shape, {"BLOCK_M": _rows_under_way(shape, rule)})


def parts_tiling(shape: RowShape) -> CountTiling:
    """Blocks of the sums of long bags on CUDA, of partial sums: rows in fp32."""
    return BAGS.tiling(shape, {"BLOCK_M": _rows_under_way(shape, BAGS), "BLOCK_B": _LOOKED_AT}, per_program=_LOOKED_AT)


def _rows_under_way(shape: RowShape, rule: BlockRule) -> int:
    return min(_UNDER_WAY, rule.rows(rule.columns(shape) * shape.itemsize))


def spread_tiling(shape: RowShape) -> CountTiling:
    """Blocks of the backward of bags up to dx and dsample, on CUDA."""
    return COPIES.tiling(shape, {"BLOCK_M": _SPREAD}, per_program=_SPREAD)


def norm_tiling(shape: RowShape) -> CountTiling:
    """Blocks of rows that are normalised, on CUDA: a row is a block, up to so many columns."""
    columns = min(power_of_two(shape.width), _NORM_COLUMNS)
    return CountTiling(
        device=shape.device,
        blocks=(("N", shape.width), ("BLOCK_N", columns), ("BLOCK_M", 1)),
        column_blocks=ceil(shape.width / columns),
        warps=max(1, min(_NORM_WARPS, columns // _NORM_WARP_COLUMNS)),
        why="a row is a block: its squares are added in one program",
        decided_at=here(),
    )


def add_sums(
    p: Plan,
    name: str,
    tiling: CountTiling,
    shape: RowShape,
    flags: Mapping[str, Any],
    out: Slot,
    reads: Mapping[str, Any],
    sizes: Mapping[str, Any],
) -> None:
    """Adds the launch that sums bags into `out` and, with PART, the one that adds the sums of parts. flags: the first's."""
    n_parts = 2 * ceil(sizes["n"] / flags["PART"]) if flags["PART"] else 0
    parts = p.new(Empty((n_parts, shape.width), FLOAT)) if n_parts else None
    partial = {"p_parts": parts, "p_counts": p.new(Empty((n_parts,), INT32)) if n_parts and flags["MEAN"] else None}
    grid = tiling.grid(n_parts + sizes["n_bags"])
    p.launch(sum_bags_kernel, name, grid, reads=reads, writes={"p_out": out, **partial}, sizes=sizes, flags=flags)
    if not n_parts:
        return
    p.launch_over(
        add_parts_kernel,
        parts_tiling(shape),
        sizes["n_bags"],
        flags={key: flags[key] for key in ("MEAN", "PART")},
        decision=f"{name}, parts",
        reads={"p_offsets": reads["p_offsets"], **partial},
        writes={"p_out": out},
        sizes={size: sizes[size] for size in ("n", "n_bags", "n_offsets", "factor")},
    )
