"""Device code that sorts the indices of a gradient by the rows that they name, equal ones in the order in which they stand.

A row is stored as its key, KEY_OF_ROW_0 + row, in the bits of a normal fp32 number: from KEY_OF_ROW_0, the smallest, up to
infinity, larger bits are a larger number, so that 2^31 - 2^24 rows are one each. The key of row n_rows stands for an index
that names no row of the table or the padding row, the next for a place after the last index.

The vector unit sorts fp32 numbers that fit in the Unified Buffer, and no others: row * BLOCK + place, in the bits of one. Of
rows too many for that, one digit is sorted after the other, the lower first.

    sort_groups_kernel     sorts groups of BLOCK indices; every PIECE-th of a group is a sample
    find_parts_kernel      sorts the samples: every SHARE-th begins a bucket; where buckets begin in each group
    copy_parts_kernel      puts the parts of a bucket one after another
    sort_buckets_kernel    sorts buckets, each to where it belongs

A bucket is a range of pairs (row, place), which are all distinct, and so has at most SHARE * PIECE + (PIECE - 1) * groups
indices, whatever they are: BLOCK is not less. One group is sorted by the first kernel alone.
"""

import triton
import triton.language as tl


@triton.jit
def sort_digits(b_digit, LOG: tl.constexpr):
    """int32, twice: digits in ascending order, and where each stood. Below (2^31 - 2^24) >> LOG, for 2^LOG digits."""
    NORMAL: tl.constexpr = 0x00800000  # the smallest normal fp32 number
    b_number = (b_digit << LOG) + tl.arange(0, 1 << LOG) + NORMAL
    b_sorted = tl.sort(b_number.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - NORMAL
    return b_sorted >> LOG, b_sorted & ((1 << LOG) - 1)


@triton.jit
def taken(b_number, b_place):
    """int32: the numbers at these places."""
    return tl.gather(b_number.to(tl.float32, bitcast=True), b_place, 0).to(tl.int32, bitcast=True)


@triton.jit
def sort_rows(b_row, LOG: tl.constexpr, WIDE: tl.constexpr):
    """int32, twice: rows in ascending order, and where each stood; equal ones in the order of their places."""
    if WIDE:
        DIGIT: tl.constexpr = 1 << 19
        b_low, b_place = sort_digits(b_row & (DIGIT - 1), LOG)
        b_high, b_again = sort_digits(taken(b_row >> 19, b_place), LOG)
        return b_high * DIGIT + taken(b_low, b_again), taken(b_place, b_again)
    else:
        return sort_digits(b_row, LOG)


@triton.jit
def named_rows(p_index, i, n, n_rows, first_row, i_padding, BLOCK: tl.constexpr, LONG: tl.constexpr):
    """int32 [BLOCK]: the rows that indices from place `i` name.

    It is `n_rows` where an index names no row or the padding row, and `n_rows` + 1 after the last index.

    LONG: an index is two int32, of which the lower stands first.
    """
    o = tl.arange(0, BLOCK)
    n_left = tl.minimum(n - i, BLOCK).to(tl.int32)
    first_row = first_row.to(tl.int64)
    i_low = first_row.to(tl.int32)
    if LONG:
        o_half = tl.arange(0, 2 * BLOCK)
        b_half = tl.load(p_index + 2 * i + o_half, mask=o_half < 2 * n_left, other=0)
        b_low, b_high = tl.split(tl.reshape(b_half, [BLOCK, 2]))
    else:
        b_low = tl.load(p_index + i + o, mask=o < n_left, other=0)
        b_high = b_low >> 31
    b_row = b_low - i_low
    b_borrow = (((b_low ^ -1) & i_low) | (((b_low ^ -1) | i_low) & b_row)) >> 31  # -1 where the lower halves borrow
    b_high = b_high - (first_row >> 32).to(tl.int32) + b_borrow
    # fp32 numbers have the sign of an int32, and are zero where it is.
    b_named = tl.where(b_high.to(tl.float32) == 0.0, b_row, n_rows)
    b_named = tl.where(b_row.to(tl.float32) < 0.0, n_rows, b_named)
    b_named = tl.where((b_named - n_rows).to(tl.float32) < 0.0, b_named, n_rows)
    b_named = tl.where((b_named - i_padding).to(tl.float32) == 0.0, n_rows, b_named)
    return tl.where((o - n_left).to(tl.float32) < 0.0, b_named, n_rows + 1)


@triton.jit(do_not_specialize=["n", "n_rows", "first_row", "i_padding"])
def make_keys_kernel(
    p_index,  # int32 [n], or [2 n] where LONG
    p_key,  # int32 [n]
    n,
    n_rows,
    first_row,
    i_padding,  # the row that gets no gradient, -1 for none
    BLOCK: tl.constexpr,
    LONG: tl.constexpr,
    KEY_OF_ROW_0: tl.constexpr,
):
    """Keys, which PyTorch sorts, of more indices than the kernels below sort."""
    o = tl.arange(0, BLOCK)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = i_tile.to(tl.int64) * BLOCK
        b_row = named_rows(p_index, i, n, n_rows, first_row, i_padding, BLOCK, LONG)
        tl.store(p_key + i + o, b_row + KEY_OF_ROW_0, mask=o < n - i)


@triton.jit(do_not_specialize=["n", "n_rows", "first_row", "i_padding"])
def sort_groups_kernel(
    p_index,  # int32 [n], or [2 n] where LONG
    p_key,  # int32 [groups * BLOCK]
    p_order,  # int32 [groups * BLOCK]
    p_sample,  # int32 [groups * BLOCK / PIECE]
    n,
    n_rows,
    first_row,
    i_padding,  # the row that gets no gradient, -1 for none
    LOG: tl.constexpr,  # of BLOCK
    PIECE: tl.constexpr,
    LONG: tl.constexpr,
    WIDE: tl.constexpr,
    KEY_OF_ROW_0: tl.constexpr,
):
    """Keys of each group in ascending order, where each stood in all, and samples."""
    # lint: allow single-buffer: a program sorts one group, which fills the Unified Buffer
    # lint: allow short-transfer: a group has few samples
    BLOCK: tl.constexpr = 1 << LOG
    o = tl.arange(0, BLOCK)
    o_piece = tl.arange(0, BLOCK // PIECE)
    for i_group in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = i_group * BLOCK
        b_row, b_place = sort_rows(named_rows(p_index, i, n, n_rows, first_row, i_padding, BLOCK, LONG), LOG, WIDE)
        b_key = b_row + KEY_OF_ROW_0
        tl.store(p_key + i + o, b_key)
        tl.store(p_order + i + o, b_place + i)
        b_piece = tl.reshape(b_key.to(tl.float32, bitcast=True), [BLOCK // PIECE, PIECE])
        b_sample = tl.min(b_piece, axis=1).to(tl.int32, bitcast=True)  # the first
        tl.store(p_sample + i_group * (BLOCK // PIECE) + o_piece, b_sample)


@triton.jit
def number_at(b_number, o, i):
    """The number at place `i` of a tile of numbers from 0 on that an fp32 number has."""
    return tl.sum(tl.where((o - i).to(tl.float32) == 0.0, b_number.to(tl.float32), 0.0), axis=0).to(tl.int32)


@triton.jit(do_not_specialize=["n_groups", "n_rows"])
def find_parts_kernel(
    p_key,
    p_sample,
    p_part,  # int32 [buckets + 1, GROUPS]: where in each group each bucket begins
    n_groups,
    n_rows,
    LOG: tl.constexpr,  # of BLOCK
    PIECE: tl.constexpr,
    SHARE: tl.constexpr,
    GROUPS: tl.constexpr,  # at most
    WIDE: tl.constexpr,
    KEY_OF_ROW_0: tl.constexpr,
):
    """Buckets: every SHARE-th sample begins one, in the order of (row, place)."""
    # lint: allow short-transfer: a bucket has a part for each group
    BLOCK: tl.constexpr = 1 << LOG
    SAMPLES: tl.constexpr = BLOCK // PIECE  # of a group
    o = tl.arange(0, BLOCK)
    o_group = tl.arange(0, GROUPS)
    n_samples = n_groups * SAMPLES
    b_sample = tl.load(p_sample + o, mask=o < n_samples, other=KEY_OF_ROW_0 + n_rows + 1)
    b_row, b_place = sort_rows(b_sample - KEY_OF_ROW_0, LOG, WIDE)
    for i_bucket in tl.range(tl.program_id(0), n_samples // SHARE + 1, tl.num_programs(0)):
        i = i_bucket * SHARE
        i_key = number_at(b_row >> 12, o, i) * 4096 + number_at(b_row & 4095, o, i) + KEY_OF_ROW_0
        i_key = tl.where(i < n_samples, i_key, KEY_OF_ROW_0 + n_rows + 2)  # above all others
        i_place = number_at(b_place, o, i)
        i_sample_group = i_place // SAMPLES
        b_part = tl.zeros([GROUPS], tl.float32)
        for i_group in tl.range(0, n_groups):
            b_key = tl.load(p_key + i_group * BLOCK + o).to(tl.float32, bitcast=True)
            # Equal keys of a group before the sample's stand before it.
            i_limit = i_key + (i_group < i_sample_group).to(tl.int32)
            n_before = tl.sum(tl.where(b_key < i_limit.to(tl.float32, bitcast=True), 1.0, 0.0), axis=0)
            inside = (i_group == i_sample_group) & (i < n_samples)
            n_before = tl.where(inside, ((i_place - i_sample_group * SAMPLES) * PIECE).to(tl.float32), n_before)
            b_part = tl.where((o_group - i_group).to(tl.float32) == 0.0, n_before, b_part)
        tl.store(p_part + i_bucket * GROUPS + o_group, b_part.to(tl.int32))


@triton.jit(do_not_specialize=["n_groups", "n_buckets"])
def copy_parts_kernel(
    p_key,
    p_order,
    p_part,
    p_bucket_key,  # int32 [buckets, BLOCK]
    p_bucket_order,  # int32 [buckets, BLOCK]
    p_bucket,  # int32 [buckets, 2]: indices before the bucket, and in it
    n_groups,
    n_buckets,
    LOG: tl.constexpr,  # of BLOCK
    GROUPS: tl.constexpr,  # at most
):
    """The indices of each bucket, group by group."""
    # lint: allow short-transfer: a group's part of a bucket is as long as it is
    # lint: allow scalar-loop: where parts begin and end are single numbers
    BLOCK: tl.constexpr = 1 << LOG
    o = tl.arange(0, BLOCK)
    for i_bucket in tl.range(tl.program_id(0), n_buckets, tl.num_programs(0)):
        n_before = i_bucket * 0
        n_inside = i_bucket * 0
        for i_group in tl.range(0, n_groups):
            i_from = tl.load(p_part + i_bucket * GROUPS + i_group)
            n_part = tl.load(p_part + (i_bucket + 1) * GROUPS + i_group) - i_from
            if n_part > 0:
                o_from = i_group * BLOCK + i_from + o
                o_to = i_bucket * BLOCK + n_inside + o
                m = o < n_part
                tl.store(p_bucket_key + o_to, tl.load(p_key + o_from, mask=m), mask=m)
                tl.store(p_bucket_order + o_to, tl.load(p_order + o_from, mask=m), mask=m)
            n_before += i_from
            n_inside += n_part
        tl.store(p_bucket + 2 * i_bucket, n_before)
        tl.store(p_bucket + 2 * i_bucket + 1, n_inside)


@triton.jit(do_not_specialize=["n", "n_buckets", "n_rows"])
def sort_buckets_kernel(
    p_bucket_key,
    p_bucket_order,
    p_bucket,
    p_key,  # int32 [n]
    p_order,  # int32 [n]
    n,
    n_buckets,
    n_rows,
    LOG: tl.constexpr,  # of BLOCK
    WIDE: tl.constexpr,
    KEY_OF_ROW_0: tl.constexpr,
):
    """All keys in ascending order, and where each stood."""
    # lint: allow single-buffer: a program sorts one bucket or two, and a sort fills the Unified Buffer
    BLOCK: tl.constexpr = 1 << LOG
    o = tl.arange(0, BLOCK)
    for i_bucket in tl.range(tl.program_id(0), n_buckets, tl.num_programs(0)):
        i = tl.load(p_bucket + 2 * i_bucket)
        n_inside = tl.load(p_bucket + 2 * i_bucket + 1)
        m = o < n_inside
        b_key = tl.load(p_bucket_key + i_bucket * BLOCK + o, mask=m, other=KEY_OF_ROW_0 + n_rows + 1)
        b_order = tl.load(p_bucket_order + i_bucket * BLOCK + o, mask=m, other=0)
        b_row, b_place = sort_rows(b_key - KEY_OF_ROW_0, LOG, WIDE)
        m = o < tl.minimum(n_inside, n - i)  # the last bucket has what stands after the last index
        tl.store(p_key + i + o, b_row + KEY_OF_ROW_0, mask=m)
        tl.store(p_order + i + o, taken(b_order, b_place), mask=m)
