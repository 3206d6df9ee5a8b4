"""Look-ups that sum, decode or normalise rows (bags), bag by bag, and their backward up to dx and dsample.

    x_i = step[index[i]] weight[index[i]]      out[b] = factor * sum over the positions i of bag b of w_i x_i
    dx_i = factor w_i dy[b]                    dsample_i = factor x_i . dy[b]

w_i is the sample weight of position i. With MEAN out, dx and dsample are divided by the number of ids in the bag. The table
at hand holds rows from `first_row` to before `stop_row` of `n_total`. An id of another shard counts as zeros, an id that no
shard has as NaN; the id `i_padding` is not in its bag.

With NORM a bag has one id, and with x = factor step weight, r = 1 / sqrt(mean(x^2) + eps):

    out = r x      dx = factor r (dy - out mean(dy out))

Sums are fp32, rounded once. Bags are taken one by one, BLOCK_N columns at a time. On CUDA these are the kernels, which stand
here with their tables of blocks; those of Ascend (ascend.py) fall back on the same functions.
"""

from math import ceil

from npu_tiling.budget import here, power_of_two
from npu_tiling.device import tl, triton

from ..lookup.cuda import COPIES
from ..rows import Launch, RowShape

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
def sum_bag(
    p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_out, i_bag, n, n_offsets, n_each, n_base, first_row, stop_row,
    n_total, i_padding, s_weight, factor, eps, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr,
    MEAN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Stores a block of columns of one bag."""
    i_first, i_stop = bag_ends(p_offsets, i_bag, n, n_offsets, n_each)
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    n_counted, n_wrong, n_inside = 0, 0, 0
    for i in tl.range(i_first, i_stop):
        i_id = id_at(p_index, p_base, i, n_base)
        counted = i_id != i_padding
        n_counted += tl.cast(counted, tl.int32)
        n_wrong += tl.cast(counted & ((i_id < 0) | (i_id >= n_total)), tl.int32)
        if NORM:
            n_inside += tl.cast((i_id >= first_row) & (i_id < stop_row), tl.int32)
        b_value = load_values(p_weight, p_steps, i_id, counted, first_row, stop_row, s_weight, o_col, N, FORMAT)
        if p_sample is not None:
            b_value *= tl.where(counted, tl.load(p_sample + i).to(tl.float32), 0.0)
        b_sum += b_value
    if MEAN:
        b_sum = b_sum / tl.maximum(n_counted, 1).to(tl.float32)
    b_sum = b_sum * factor + tl.where(n_wrong > 0, float("nan"), 0.0)
    if NORM:
        eps_row = tl.where(n_inside > 0, eps, 1.0)  # a row that the table does not have stays zeros, or NaN
        b_sum = tl.reshape(normalise(tl.reshape(b_sum, [1, BLOCK_N]), eps_row, N), [BLOCK_N])
    tl.store(p_out + i_bag * N + o_col, b_sum.to(p_out.dtype.element_ty), mask=o_col < N)


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
def spread_bag(
    p_dy, p_index, p_offsets, p_base, p_sample, p_weight, p_dx, p_dsample, i_bag, n, n_bags, n_offsets, n_each, n_base,
    first_row, stop_row, i_padding, s_dy, s_weight, factor, eps, i_block, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr,
    MEAN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Stores a block of columns of dx of the positions of one bag, and its part of their dsample."""
    i_first, i_stop = bag_ends(p_offsets, i_bag, n, n_offsets, n_each)
    b_dy = tl.load(p_dy + i_bag * s_dy + o_col, mask=o_col < N, other=0.0).to(tl.float32) * factor
    if MEAN:
        n_counted = 0
        for i in tl.range(i_first, i_stop):
            n_counted += (id_at(p_index, p_base, i, n_base) != i_padding).to(tl.int32)
        b_dy = b_dy / tl.maximum(n_counted, 1).to(tl.float32)
    for i in tl.range(i_first, i_stop):
        b_dx = b_dy
        if p_weight is not None:
            i_id = id_at(p_index, p_base, i, n_base)
            counted = i_id != i_padding
            b_x = load_values(p_weight, None, i_id, counted, first_row, stop_row, s_weight, o_col, N, "")
            if NORM:
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
    if p_offsets is not None:
        if i_bag == 0:  # positions before the first bag
            store_zeros(p_dx, p_dsample, 0, tl.minimum(i_first, n), n, i_block, o_col, N, BLOCK_N)
        if i_bag == n_bags - 1:  # positions after the last bag
            store_zeros(p_dx, p_dsample, i_stop, n, n, i_block, o_col, N, BLOCK_N)


@triton.jit(
    do_not_specialize=["n", "n_bags", "n_offsets", "n_each", "n_base", "first_row", "stop_row", "n_total", "i_padding"]
)
def sum_bags_kernel(
    # As those of Ascend's kernel.
    p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_out,
    n, n_bags, n_offsets, n_each, n_base, first_row, stop_row, n_total, i_padding, s_weight, factor, eps,
    N: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, MEAN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The sum of the rows of each bag, decoded, weighted and times a factor; MEAN: over the number of its ids."""
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for i_task in tl.range(tl.program_id(0), n_bags * n_blocks, tl.num_programs(0)):
        o_col = i_task % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        sum_bag(
            p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_out, tl.cast(i_task // n_blocks, tl.int64), n,
            n_offsets, n_each, n_base, first_row, stop_row, n_total, i_padding, s_weight, factor, eps, o_col,
            N, BLOCK_N, FORMAT, MEAN, NORM,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "n_bags", "n_offsets", "n_each", "n_base", "first_row", "stop_row", "i_padding"])
def spread_bags_kernel(
    # As those of Ascend's kernel.
    p_dy, p_index, p_offsets, p_base, p_sample, p_weight, p_dx, p_dsample,
    n, n_bags, n_offsets, n_each, n_base, first_row, stop_row, i_padding, s_dy, s_weight, factor, eps,
    N: tl.constexpr, BLOCK_N: tl.constexpr, MEAN: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """dx of each position of a bag, and the gradient of its sample weight."""
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for i_task in tl.range(tl.program_id(0), n_bags * n_blocks, tl.num_programs(0)):
        i_block = i_task % n_blocks
        o_col = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        spread_bag(
            p_dy, p_index, p_offsets, p_base, p_sample, p_weight, p_dx, p_dsample, tl.cast(i_task // n_blocks, tl.int64), n,
            n_bags, n_offsets, n_each, n_base, first_row, stop_row, i_padding, s_dy, s_weight, factor, eps, i_block, o_col,
            N, BLOCK_N, MEAN, NORM,
        )  # fmt: skip


def bags_launch(shape: RowShape) -> Launch:
    """Blocks of a look-up of bags on CUDA, and of its backward up to dx and dsample."""
    return COPIES.launch(shape, {})


def norm_launch(shape: RowShape) -> Launch:
    """Blocks of rows that are normalised, on CUDA: a row is a block, up to so many columns."""
    columns = min(power_of_two(shape.width), _NORM_COLUMNS)
    return Launch(
        device=shape.device,
        blocks=(("N", shape.width), ("BLOCK_N", columns)),
        column_blocks=ceil(shape.width / columns),
        warps=max(1, min(_NORM_WARPS, columns // _NORM_WARP_COLUMNS)),
        why="a row is a block: its squares are added in one program",
        decided_at=here(),
    )
