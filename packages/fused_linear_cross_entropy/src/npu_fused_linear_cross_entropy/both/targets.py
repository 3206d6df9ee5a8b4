"""Columns, class weights and factors of rows, vectors of [tokens], from the targets alone. Formulas: reference.

A tile is BLOCK_M rows; programs stride over the tiles. Sums over rows are kept for every lane and reduced once. One program
stores the result (LAST); several store a row of partial sums each, which one more launch adds, in the same order every time.
Numbers are compared in fp32: compares of integers are loops over elements on Ascend.
"""

import triton
import triton.language as tl

IGNORED: tl.constexpr = tl.constexpr(-2)
NO_COLUMN: tl.constexpr = tl.constexpr(-1)
PARTIAL_WIDTH: tl.constexpr = tl.constexpr(8)  # a row of partial sums, and of factors: 32 bytes, which no two programs share
MAX_RELATIVE_WEIGHT: tl.constexpr = tl.constexpr(4096.0)  # see rows.py
_INT32_END: tl.constexpr = tl.constexpr(2.0**31)


@triton.jit
def partial_row(a, b, c, d):
    """fp32 [PARTIAL_WIDTH]: four numbers, then zeros."""
    o_lane = tl.arange(0, PARTIAL_WIDTH).to(tl.float32)
    b_high = tl.where(o_lane == 2.0, c, tl.where(o_lane == 3.0, d, 0.0))
    return tl.where(o_lane == 0.0, a, tl.where(o_lane == 1.0, b, b_high))


@triton.jit
def partial_number(b_numbers, i_number: tl.constexpr):
    """One of the numbers."""
    o_lane = tl.arange(0, PARTIAL_WIDTH).to(tl.float32)
    return tl.sum(tl.where(o_lane == 1.0 * i_number, b_numbers, 0.0))


@triton.jit
def store_first(p_out, value, n):
    """Stores a number n times."""
    o_lane = tl.arange(0, PARTIAL_WIDTH)
    tl.store(p_out + o_lane, tl.zeros([PARTIAL_WIDTH], tl.float32) + value, mask=o_lane < n)


@triton.jit
def add_partials(p_partials, n_partials, BLOCK_P: tl.constexpr):
    """fp32 [PARTIAL_WIDTH]: the sum of rows of partial sums."""
    o_partial = tl.arange(0, BLOCK_P)
    p_tile = p_partials + (o_partial[:, None] * PARTIAL_WIDTH + tl.arange(0, PARTIAL_WIDTH)[None, :])
    return tl.sum(tl.load(p_tile, mask=(o_partial < n_partials)[:, None], other=0.0), axis=0)


@triton.jit
def store_factors(
    count, weighted, total, weight_size, p_divisor, p_factors, p_unfinished, unscale, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr
):  # fmt: skip
    """Stores factors [2, PARTIAL_WIDTH] of losses and of their gradient, and the factors that gradients still lack, [3]."""
    some = tl.where(count > 0.0, 1.0, 0.0)
    of_loss, of_z_loss = some, some
    if MEAN:
        if p_divisor is not None:
            of_loss = some / tl.load(p_divisor).to(tl.float32)  # NaN for nothing of nothing
            of_z_loss = of_loss
        else:
            of_loss = tl.where(count > 0.0, 1.0 / weighted, 0.0)
            of_z_loss = tl.where(count > 0.0, 1.0 / tl.maximum(count, 1.0), 0.0)
    b_factors = partial_row(of_loss, of_z_loss, total, count)
    o_lane = tl.arange(0, PARTIAL_WIDTH)
    tl.store(p_factors + o_lane, b_factors)
    if p_unfinished is not None:
        of_z_loss = tl.where(of_loss != 0.0, of_z_loss / of_loss, 0.0)
        of_gradient = 1.0
        if WEIGHTED:
            of_gradient = tl.where(weight_size > 0.0, tl.minimum(count, MAX_RELATIVE_WEIGHT) / weight_size, 1.0)
            of_z_loss *= of_gradient
            of_loss /= of_gradient
        of_loss = tl.where(count > 0.0, of_loss, 0.0)
        tl.store(p_unfinished + o_lane, partial_row(of_loss, of_loss * unscale, of_loss * unscale, 0.0), mask=o_lane < 3)
        b_factors = partial_row(of_gradient, of_z_loss, total, count)
    tl.store(p_factors + PARTIAL_WIDTH + o_lane, b_factors)


@triton.jit(do_not_specialize=["n_rows", "ignore_index", "vocab_size", "first", "n_weights", "unscale"])
def cross_entropy_targets_kernel(
    p_target,  # integers [rows]
    p_class_weight,  # [n_weights]
    p_divisor,  # one number
    p_columns,  # int32 [rows]: the target, NO_COLUMN outside of the vocabulary, IGNORED
    p_target_weight,  # fp32 [rows]; with class weights
    p_factors,  # fp32 [2, PARTIAL_WIDTH]; LAST
    p_unfinished,  # fp32 [3]; LAST
    # fp32 [programs, PARTIAL_WIDTH], not LAST: rows that count, the sum of their class weights, of all, and of their sizes.
    p_partials,
    n_rows,
    ignore_index,
    vocab_size,
    first,  # the column of the vocabulary that the first class weight is of
    n_weights,
    unscale,
    BLOCK_M: tl.constexpr,
    SMALL_INDEX: tl.constexpr,  # fp32 counts beyond ignore_index
    SMOOTHED: tl.constexpr,
    MEAN: tl.constexpr,
    LAST: tl.constexpr,
):
    """Columns and class weights of rows from their targets; factors of the losses, or (not LAST) sums for them."""
    # lint: allow scalar-loop: the class weight of a target comes from wherever it is
    # lint: allow short-transfer: loads of single class weights dominate the time; many programs share them
    o_row = tl.arange(0, BLOCK_M)
    b_counts = tl.zeros([BLOCK_M], tl.float32)
    b_weights = tl.zeros([BLOCK_M], tl.float32)
    b_totals = tl.zeros([BLOCK_M], tl.float32)
    b_sizes = tl.zeros([BLOCK_M], tl.float32)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        m_row = o_row < n_rows - i_row
        b_target = tl.load(p_target + i_row + o_row, mask=m_row, other=0)  # [BLOCK_M]
        b_float = b_target.to(tl.float32)
        if SMALL_INDEX:
            b_counted = tl.where(b_float == ignore_index.to(tl.float32), 0.0, 1.0)
        else:
            b_counted = tl.where(b_target == ignore_index, 0.0, 1.0)
        # fp32 is not exact for a large target. The difference of integers is, and its fp32 has its sign.
        b_beyond = (b_target.to(tl.int32) - vocab_size).to(tl.float32)
        m_known = (b_float >= 0.0) & (b_float < _INT32_END) & (b_beyond < 0.0)
        b_column = tl.where(m_known, b_target.to(tl.int32), NO_COLUMN)
        b_column = tl.where(b_counted > 0.0, b_column, IGNORED)
        tl.store(p_columns + i_row + o_row, b_column, mask=m_row)
        b_counted = tl.where(o_row.to(tl.float32) < (n_rows - i_row).to(tl.float32), b_counted, 0.0)
        b_counts += b_counted
        if p_class_weight is not None:
            b_place = b_column - first
            b_after = (b_place - n_weights).to(tl.float32)
            b_safe = tl.minimum(tl.maximum(b_place, 0), n_weights - 1)
            b_weight = tl.load(p_class_weight + b_safe).to(tl.float32)
            b_weight = tl.where((b_place.to(tl.float32) >= 0.0) & (b_after < 0.0), b_weight, 0.0)
            tl.store(p_target_weight + i_row + o_row, b_weight, mask=m_row)
            b_weights += b_weight * b_counted
            b_sizes += tl.abs(b_weight) * b_counted
    if p_class_weight is not None:
        if SMOOTHED:
            for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_weights, BLOCK_M), tl.num_programs(0)):
                i_row = i_tile * BLOCK_M
                b_weight = tl.load(p_class_weight + i_row + o_row, mask=o_row < n_weights - i_row, other=0.0)
                b_totals += b_weight.to(tl.float32)
    count, total = tl.sum(b_counts), tl.sum(b_totals)
    weighted, weight_size = count, count
    if p_class_weight is not None:
        weighted, weight_size = tl.sum(b_weights), tl.sum(b_sizes)
    if LAST:
        store_factors(
            count,
            weighted,
            total,
            weight_size,
            p_divisor,
            p_factors,
            p_unfinished,
            unscale,
            MEAN,
            p_class_weight is not None,
        )
    else:
        p_partial = p_partials + tl.program_id(0) * PARTIAL_WIDTH
        tl.store(p_partial + tl.arange(0, PARTIAL_WIDTH), partial_row(count, weighted, total, weight_size))


@triton.jit(do_not_specialize=["n_partials", "unscale"])
def cross_entropy_factors_kernel(
    p_partials, p_divisor, p_factors, p_unfinished, n_partials, unscale, BLOCK_P: tl.constexpr, MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr
):  # fmt: skip
    """One program adds partial sums and stores what a single program of `cross_entropy_targets_kernel` would."""
    b_sums = add_partials(p_partials, n_partials, BLOCK_P)
    store_factors(
        partial_number(b_sums, 0), partial_number(b_sums, 1), partial_number(b_sums, 2), partial_number(b_sums, 3),
        p_divisor, p_factors, p_unfinished, unscale, MEAN, WEIGHTED
    )  # fmt: skip
