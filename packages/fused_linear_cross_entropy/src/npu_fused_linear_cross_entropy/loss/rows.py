"""The arithmetic on rows, vectors of [tokens]: kernels, their tiles, and their launches. Formulas: reference.py.

From the targets alone come columns, class weights and factors; from statistics losses and the gradient's factors; statistics
of parts of the vocabulary are joined.

A tile is BLOCK_M rows; programs stride over the tiles. Sums over rows are kept for every lane and reduced once. One program
stores the result; several store a row of partial sums each, which one more launch adds, in the same order every time.
Numbers are compared in fp32: compares of integers are loops over elements on Ascend.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil
from typing import Any

from npu_tiling import Block, Device, Tile, collectives, fit, footprint
from npu_tiling.budget import FP32 as FP32_BYTES
from npu_tiling.budget import here, power_of_two
from npu_tiling.calls import Empty
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling
from npu_tiling.plans import Plan

from .. import call
from ..call import COEFFICIENTS, FP32, INT32, INT64, Options
from ..formula import merge_statistics, merge_totals, row_coefficients
from ..head import moved, row, sum_of_rows
from . import TargetFacts

_LANES = 8  # of a row of partial sums, and of factors: 32 bytes, which no two programs share
IGNORED: tl.constexpr = tl.constexpr(call.IGNORED)
NO_COLUMN: tl.constexpr = tl.constexpr(call.NO_COLUMN)
PARTIAL_WIDTH: tl.constexpr = tl.constexpr(_LANES)
MAX_RELATIVE_WEIGHT: tl.constexpr = tl.constexpr(4096.0)  # see tokens.py
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
def store_number(p_out, value):
    """Stores a number."""
    o_lane = tl.arange(0, PARTIAL_WIDTH)
    tl.store(p_out + o_lane, tl.zeros([PARTIAL_WIDTH], tl.float32) + value, mask=o_lane < 1)


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
            of_loss = tl.where(count > 0.0, 1.0 / tl.where(weighted != 0.0, weighted, float("nan")), 0.0)
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
    p_factors, p_unfinished,  # fp32 [2, PARTIAL_WIDTH] and [3]; without partial sums
    # fp32 [programs, PARTIAL_WIDTH]: rows that count, the sum of their class weights, of all, and of their sizes; None: one
    # program has all rows
    p_partials,
    n_rows, ignore_index, vocab_size,
    first,  # the column of the vocabulary that the first class weight is of
    n_weights, unscale,
    BLOCK_M: tl.constexpr,
    SMALL_INDEX: tl.constexpr,  # fp32 counts beyond ignore_index
    SMOOTHED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Columns and class weights of rows from their targets; factors of the losses, or partial sums for them."""
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
    if p_partials is None:
        store_factors(
            count, weighted, total, weight_size, p_divisor, p_factors, p_unfinished, unscale, MEAN,
            p_class_weight is not None
        )  # fmt: skip
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


@triton.jit
def store_sums(loss, z_loss, right, p_factors, p_loss, p_z_loss, p_accuracy, REDUCED: tl.constexpr):
    """Stores the results that are one number: the reduced loss and z-loss, and the accuracy."""
    if REDUCED:
        nothing = tl.where(tl.load(p_factors + 3) > 0.0, 0.0, tl.load(p_factors))  # NaN: no row counts, the divisor is 0
        store_number(p_loss, loss + nothing)
        if p_z_loss is not None:
            store_number(p_z_loss, z_loss + nothing)
    if p_accuracy is not None:
        store_number(p_accuracy, right / tl.maximum(tl.load(p_factors + 3), 1.0))


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "vocab_size"])
def cross_entropy_losses_kernel(
    p_statistics,  # fp32 [7, rows], see two_sweeps.py
    p_columns,  # int32 [rows]
    p_target_weight,  # fp32 [rows]
    p_factors,  # fp32 [PARTIAL_WIDTH]: of the loss, of the z-loss, the sum of the class weights, how many rows count
    p_loss,  # fp32, [rows] or REDUCED one number, as the next one
    p_z_loss,
    p_accuracy,  # fp32, one number
    p_predicted,  # int64 [rows]
    p_lse,  # fp32 [rows]
    p_entropy,  # fp32 [rows]
    p_partials,  # fp32 [programs, PARTIAL_WIDTH]: loss, z-loss, rows whose largest logit is the target's; None: as above
    n_rows, s_statistics, vocab_size,
    smoothing,  # None: there is none
    z_scale,  # None: there is no z-loss
    BLOCK_M: tl.constexpr, TOKEN_SCALING: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """Losses and other outputs of rows from their statistics; reduced outputs as numbers or as partial sums."""
    # lint: allow nan-maximum: one number a row, of which a core has a few thousand
    # lint: allow short-transfer: one number a row; tiles of 1024 rows leave rows for more cores
    o_row = tl.arange(0, BLOCK_M)
    b_losses = tl.zeros([BLOCK_M], tl.float32)
    b_z_losses = tl.zeros([BLOCK_M], tl.float32)
    b_rights = tl.zeros([BLOCK_M], tl.float32)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        m_row = o_row < n_rows - i_row
        p_row = p_statistics + i_row + o_row
        b_column = tl.load(p_columns + i_row + o_row, mask=m_row, other=IGNORED).to(tl.float32)  # [BLOCK_M]
        b_sum = tl.load(p_row + s_statistics, mask=m_row, other=1.0)
        b_log = tl.log(b_sum)
        b_reference = tl.load(p_row, mask=m_row, other=0.0)
        b_nll = (b_reference - tl.load(p_row + 2 * s_statistics, mask=m_row, other=0.0)) + b_log
        b_lse = b_reference + b_log
        b_loss = b_nll
        if p_target_weight is not None:
            b_loss *= tl.load(p_target_weight + i_row + o_row, mask=m_row, other=0.0)
        if smoothing is not None:
            weights = vocab_size.to(tl.float32)
            per_column = smoothing / weights
            if p_target_weight is not None:
                weights = tl.load(p_factors + 2)
            b_total = tl.load(p_row + 3 * s_statistics, mask=m_row, other=0.0)
            b_loss = (1.0 - smoothing) * b_loss + per_column * (b_log * weights - b_total)
        b_loss *= tl.load(p_factors)
        if z_scale is not None:
            b_z_loss = z_scale * b_lse * b_lse * tl.load(p_factors + 1)
            b_loss += b_z_loss
        if TOKEN_SCALING:
            b_probability = tl.exp(-b_nll)
            b_loss *= b_probability
            if z_scale is not None:
                b_z_loss *= b_probability
        b_absent = tl.where(b_column == 1.0 * IGNORED, 0.0, float("nan"))  # 0 if ignored, NaN outside the vocabulary
        m_known = b_column >= 0.0
        b_loss = tl.where(m_known, b_loss, b_absent)
        if REDUCED:
            b_losses += b_loss
        else:
            tl.store(p_loss + i_row + o_row, b_loss, mask=m_row)
        if p_z_loss is not None:
            b_z_loss = tl.where(m_known, b_z_loss, b_absent)
            if REDUCED:
                b_z_losses += b_z_loss
            else:
                tl.store(p_z_loss + i_row + o_row, b_z_loss, mask=m_row)
        m_counted = b_column != 1.0 * IGNORED
        if p_lse is not None:
            tl.store(p_lse + i_row + o_row, tl.where(m_counted, b_lse, 0.0), mask=m_row)
        if p_entropy is not None:
            b_dot = tl.load(p_row + 4 * s_statistics, mask=m_row, other=0.0)
            tl.store(p_entropy + i_row + o_row, tl.where(m_counted, b_log - b_dot / b_sum, 0.0), mask=m_row)
        if (p_accuracy is not None) or (p_predicted is not None):
            b_place = tl.load(p_row + 5 * s_statistics, mask=m_row, other=0.0)
            if p_accuracy is not None:
                b_rights += tl.where(b_place == b_column, 1.0, 0.0)
            if p_predicted is not None:
                # A row of NaN has no maximum.
                b_inside = tl.minimum(tl.maximum(b_place, 0.0), vocab_size.to(tl.float32) - 1.0)
                tl.store(p_predicted + i_row + o_row, tl.where(m_counted, b_inside, -1.0).to(tl.int64), mask=m_row)
    if REDUCED or (p_accuracy is not None):
        loss, z_loss, right = tl.sum(b_losses), tl.sum(b_z_losses), tl.sum(b_rights)
        if p_partials is None:
            store_sums(loss, z_loss, right, p_factors, p_loss, p_z_loss, p_accuracy, REDUCED)
        else:
            p_partial = p_partials + tl.program_id(0) * PARTIAL_WIDTH
            tl.store(p_partial + tl.arange(0, PARTIAL_WIDTH), partial_row(loss, z_loss, right, 0.0))


@triton.jit(do_not_specialize=["n_partials"])
def cross_entropy_sums_kernel(
    p_partials, p_factors, p_loss, p_z_loss, p_accuracy, n_partials, BLOCK_P: tl.constexpr, REDUCED: tl.constexpr
):  # fmt: skip
    """One program adds partial sums and stores what a single program of `cross_entropy_losses_kernel` would."""
    b_sums = add_partials(p_partials, n_partials, BLOCK_P)
    loss, z_loss, right = partial_number(b_sums, 0), partial_number(b_sums, 1), partial_number(b_sums, 2)
    store_sums(loss, z_loss, right, p_factors, p_loss, p_z_loss, p_accuracy, REDUCED)


@triton.jit
def load_upstream(p_value, o_row, m_row, EACH: tl.constexpr):
    """The gradient that each row's output received, or the one that all did."""
    if EACH:
        b_value = tl.load(p_value + o_row, mask=m_row, other=0.0)
    else:
        b_value = tl.load(p_value)
    return b_value


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "s_coefficients", "vocab_size"])
def cross_entropy_coefficients_kernel(
    p_statistics,  # fp32 [7, rows]
    p_columns,  # int32 [rows]
    p_target_weight,  # fp32 [rows]
    p_factors,  # fp32 [PARTIAL_WIDTH], as above, of the gradient
    p_dloss,  # fp32 [rows] or one number; with LOSS, None for 1
    p_dentropy,  # fp32 [rows] or one number
    p_coefficients,  # fp32 [5, rows]: k, a, b, c, q
    n_rows, s_statistics, s_coefficients, vocab_size, smoothing, z_scale,
    BLOCK_M: tl.constexpr, LOSS: tl.constexpr, EACH_LOSS: tl.constexpr,
    ENTROPY: tl.constexpr,  # the last row is asked for
    EACH_ENTROPY: tl.constexpr, TOKEN_SCALING: tl.constexpr,
):  # fmt: skip
    """Factors of each row's gradient, from its statistics and the gradients that the outputs received."""
    # lint: allow nan-maximum: one number a row, of which a core has a few thousand
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        m_row = o_row < n_rows - i_row
        p_row = p_statistics + i_row + o_row
        p_out = p_coefficients + i_row + o_row
        b_column = tl.load(p_columns + i_row + o_row, mask=m_row, other=IGNORED).to(tl.float32)  # [BLOCK_M]
        b_sum = tl.load(p_row + s_statistics, mask=m_row, other=1.0)
        b_reference = tl.load(p_row, mask=m_row, other=0.0)
        b_zero = b_column * 0.0  # computed in each iteration, so that stores overlap
        b_a, b_b, b_c, b_q = b_zero, b_zero, b_zero, b_zero
        if LOSS:
            m_known, b_up = b_column >= 0.0, 1.0
            if p_dloss is not None:
                b_up = load_upstream(p_dloss, i_row + o_row, m_row, EACH_LOSS)
            b_main = tl.where(m_known, b_up * tl.load(p_factors), 0.0)
            b_of_z_loss = tl.where(m_known, b_up * tl.load(p_factors + 1), 0.0)
            b_weight, b_z = 0.0, 0.0
            if p_target_weight is not None:
                b_weight = tl.load(p_target_weight + i_row + o_row, mask=m_row, other=0.0)
            if TOKEN_SCALING:
                b_z = tl.load(p_row + 2 * s_statistics, mask=m_row, other=0.0)
            b_a, b_b, b_c = row_coefficients(
                b_main, b_of_z_loss, b_weight, p_factors + 2, b_reference, b_sum, b_z, smoothing,
                smoothing / vocab_size.to(tl.float32), z_scale, p_target_weight is not None, TOKEN_SCALING
            )  # fmt: skip
        if p_dentropy is not None:
            b_on = load_upstream(p_dentropy, i_row + o_row, m_row, EACH_ENTROPY)
            b_q = tl.where(b_column != 1.0 * IGNORED, -b_on, 0.0)
            b_dot = tl.load(p_row + 4 * s_statistics, mask=m_row, other=0.0)
            b_a -= b_q * (b_dot / b_sum)
        tl.store(p_out, b_reference, mask=m_row)
        tl.store(p_out + s_coefficients, b_a / b_sum, mask=m_row)
        tl.store(p_out + 2 * s_coefficients, b_b, mask=m_row)
        tl.store(p_out + 3 * s_coefficients, b_c, mask=m_row)
        if ENTROPY:
            tl.store(p_out + 4 * s_coefficients, b_q / b_sum, mask=m_row)


@triton.jit
def load_statistics(p_row, s_statistics, m_row):
    """The seven statistics of rows."""
    b_max = tl.load(p_row, mask=m_row, other=0.0)
    b_sum = tl.load(p_row + s_statistics, mask=m_row, other=1.0)
    b_z = tl.load(p_row + 2 * s_statistics, mask=m_row, other=0.0)
    b_total = tl.load(p_row + 3 * s_statistics, mask=m_row, other=0.0)
    b_dot = tl.load(p_row + 4 * s_statistics, mask=m_row, other=0.0)
    b_place = tl.load(p_row + 5 * s_statistics, mask=m_row, other=0.0)
    b_weight = tl.load(p_row + 6 * s_statistics, mask=m_row, other=0.0)
    return b_max, b_sum, b_z, b_total, b_dot, b_place, b_weight


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "n_parts"])
def cross_entropy_join_kernel(
    p_parts,  # fp32 [parts, 7, rows], contiguous: statistics of each part's columns
    p_statistics,  # fp32 [7, rows]: of all columns; undefined where no option asks for them
    n_rows, s_statistics, n_parts,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Joins statistics of a vocabulary's parts, from the first to the last, whichever columns each of them has."""
    # lint: allow nan-maximum: one number a row, of which a core has a few thousand
    # lint: allow short-transfer: one number a row; tiles of 1024 rows leave rows for more cores
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row = i_tile * BLOCK_M
        m_row = o_row < n_rows - i_row
        p_part = p_parts + i_row + o_row
        b_max, b_sum, b_z, b_total, b_dot, b_place, b_weight = load_statistics(p_part, n_rows, m_row)
        for i_part in tl.range(1, n_parts):
            p_next = p_part + i_part.to(tl.int64) * (7 * n_rows)
            b_max1, b_sum1, b_z1, b_total1, b_dot1, b_place1, b_weight1 = load_statistics(p_next, n_rows, m_row)
            b_total = merge_totals(b_max, b_total, b_weight, b_max1, b_total1, b_weight1)
            b_place = tl.where(b_max1 == b_max, tl.minimum(b_place, b_place1), b_place)  # the first of equal maxima
            b_max, b_sum, b_dot, b_place = merge_statistics(
                b_max, b_sum, b_dot, b_place, b_max1, b_sum1, b_dot1, b_place1, True, True
            )
            b_z += b_z1
            b_weight += b_weight1
        p_out = p_statistics + i_row + o_row
        tl.store(p_out, b_max, mask=m_row)
        tl.store(p_out + s_statistics, b_sum, mask=m_row)
        tl.store(p_out + 2 * s_statistics, b_z, mask=m_row)
        tl.store(p_out + 3 * s_statistics, b_total, mask=m_row)
        tl.store(p_out + 4 * s_statistics, b_dot, mask=m_row)
        tl.store(p_out + 5 * s_statistics, b_place, mask=m_row)
        tl.store(p_out + 6 * s_statistics, b_weight, mask=m_row)


# Tiles.

_ROWS = 1024  # of a tile: 4 KB of fp32
_WEIGHTED_ROWS = 128  # where each row loads a class weight: on Ascend .1 us by npu-offline's model
_MIN_ROWS = 32
_SINGLE_PROGRAM_TILES = 4  # tiles that one program takes alone, which takes it less time than another launch would


class RowKernel(Enum):
    """A kernel over rows.

    Attributes:
        function: its name.
        values: fp32 numbers of a row in the Unified Buffer, the maximum over the compilers of CANN 8.5, 9.0 and 9.1 and over
            all options. The compilers take fewer, down to half, where there is less room.
        loads_weights: whether each row loads a class weight.
    """

    def __init__(self, function: str, values: int, loads_weights: bool) -> None:
        self.function, self.values, self.loads_weights = function, values, loads_weights

    TARGETS = ("cross_entropy_targets_kernel", 31, False)
    WEIGHTED_TARGETS = ("cross_entropy_targets_kernel", 31, True)
    LOSSES = ("cross_entropy_losses_kernel", 46, False)
    COEFFICIENTS = ("cross_entropy_coefficients_kernel", 31, False)
    JOIN = ("cross_entropy_join_kernel", 42, False)


@dataclass(frozen=True, kw_only=True)
class RowTiling(CountTiling):
    """Tiles of `per_program` rows of one of the kernels."""

    kernel: RowKernel

    def grid_of_sums(self, rows: int) -> int:
        """Programs for that many rows, where several of them leave partial sums."""
        single = 1 if self.kernel.loads_weights else _SINGLE_PROGRAM_TILES
        return 1 if ceil(rows / self.per_program) <= single else self.grid(rows)

    @property
    def ub_bytes(self) -> int:
        """Unified Buffer that the declared tiles take."""
        return footprint(_tiles(self.kernel), self.constants, self.device)

    def smaller(self) -> RowTiling | None:
        """Half of the rows."""
        if self.device.kind == "cuda" or self.per_program <= _MIN_ROWS:
            return None
        rows = self.per_program // 2
        return replace(self, blocks=(("BLOCK_M", rows),), per_program=rows)


def partials_tiling(device: Device) -> CountTiling:
    """That of a program that adds partial sums, at most one of each core."""
    programs = power_of_two(device.vector_cores) if device.kind == "cuda" else device.vector_cores
    return CountTiling(device=device, blocks=(("BLOCK_P", programs),), why="one program adds all", decided_at=here())


@functools.lru_cache(maxsize=64)
def row_tiling(kernel: RowKernel, device: Device) -> RowTiling:
    """Blocks for one of the kernels."""
    rows = _WEIGHTED_ROWS if kernel.loads_weights else _ROWS
    if device.kind == "ascend" and not kernel.loads_weights:
        rows = fit(_tiles(kernel), (Block("BLOCK_M", rows, _MIN_ROWS, _MIN_ROWS),), device)["BLOCK_M"]
    why = "a row is a few numbers: many rows make transfers long"
    if kernel.loads_weights:
        why = "each row loads a class weight, which takes long: few rows a program"
    blocks = (("BLOCK_M", rows),)
    return RowTiling(kernel=kernel, device=device, blocks=blocks, per_program=rows, per_core=1, why=why, decided_at=here())


def _tiles(kernel: RowKernel) -> list[Tile]:
    return [Tile("numbers of a row", ("BLOCK_M",), FP32_BYTES, kernel.values)]


# Launches.

_READ = (FP32, INT64, INT32)  # dtypes of a divisor that the kernel reads
_COUNTED = 2**24  # integers below are fp32 numbers


def target_facts(
    p: Plan, target: Any, class_weight: Any, divisor: Any, options: Options, exact: Any, dweight_scale: float | None
) -> TargetFacts:
    """See `write_target_facts` in reference.py; the sums of many rows, or of ranks, are one more launch."""
    target, is_mean = p.contiguous(target), options.reduction == "mean"
    if divisor is not None:
        dtype = divisor.dtype if divisor.dtype in _READ else FP32
        divisor = p.torch(moved, divisor, p.device, dtype, makes=Empty((), dtype)) if is_mean else None
    tokens, weights = target.numel(), 0 if class_weight is None else class_weight.numel()
    columns = p.new(Empty((tokens,), INT32))
    target_weight: Any = None if class_weight is None else p.new(Empty((tokens,), FP32))
    factors = p.new(Empty((2, _LANES), FP32))
    unfinished = None if dweight_scale is None else p.new(Empty((3,), FP32))
    name = "cross_entropy_targets_kernel"
    tiling = p.decide(name, row_tiling(RowKernel.TARGETS if class_weight is None else RowKernel.WEIGHTED_TARGETS, p.chip))
    grid = tiling.grid_of_sums(max(tokens, weights if options.smoothed else 0))
    is_exchanged = bool(options.group) and class_weight is not None
    partials = p.new(Empty((grid, _LANES), FP32)) if grid > 1 or is_exchanged else None
    sizes = {"n_rows": tokens, "ignore_index": options.ignore_index, "vocab_size": options.vocab_size}
    written = {"p_factors": factors, "p_unfinished": unfinished}
    unscale = {"unscale": 1.0 / (dweight_scale or 1.0)}
    flags = {"SMALL_INDEX": abs(options.ignore_index) < _COUNTED, "SMOOTHED": options.smoothed, "MEAN": is_mean}
    p.launch(
        cross_entropy_targets_kernel,
        name,
        grid,
        reads={"p_target": target, "p_class_weight": class_weight, "p_divisor": divisor},
        writes={"p_columns": columns, "p_target_weight": target_weight, **written, "p_partials": partials},
        sizes={**sizes, "first": options.vocab_first, "n_weights": weights, **unscale},
        flags=flags,
    )
    if partials is not None:
        if is_exchanged:
            p.torch(collectives.sum_, target_weight, options.group, writes=[target_weight])
            partials = p.torch(sum_of_rows, partials, makes=Empty((1, _LANES), FP32))
            of_weights = p.view(partials, (3,), (1,), 1)
            p.torch(collectives.sum_, of_weights, options.group, writes=[of_weights])
        p.launch_over(
            cross_entropy_factors_kernel,
            partials_tiling(p.chip),
            1,
            flags={"MEAN": is_mean, "WEIGHTED": class_weight is not None},
            reads={"p_partials": partials, "p_divisor": divisor},
            writes=written,
            sizes={"n_partials": partials.shape[0], **unscale},
        )
    return TargetFacts(columns, target_weight, factors, factors if unfinished is None else row(p, factors, 1), unfinished)


def losses(p: Plan, facts: TargetFacts, statistics: Any, options: Options, outputs: Sequence[Any]) -> None:
    """See `write_losses` in reference.py."""
    is_reduced, tokens = options.reduction != "none", statistics.shape[1]
    is_summed = is_reduced or options.return_token_accuracy
    name = "cross_entropy_losses_kernel"
    tiling = p.decide(name, row_tiling(RowKernel.LOSSES, p.chip))
    grid = tiling.grid_of_sums(tokens) if is_summed else tiling.grid(tokens)
    partials = p.new(Empty((grid, _LANES), FP32)) if is_summed and grid > 1 else None
    parameters = ("p_loss", "p_z_loss", "p_accuracy", "p_predicted", "p_lse", "p_entropy")
    written = dict(zip(parameters, outputs, strict=True))
    of_rows = {"p_statistics": statistics, "p_columns": facts.columns, "p_target_weight": facts.target_weight}
    p.launch(
        cross_entropy_losses_kernel,
        name,
        grid,
        reads={**of_rows, "p_factors": facts.factors},
        writes={**written, "p_partials": partials},
        sizes={
            "n_rows": tokens,
            "s_statistics": statistics.strides[0],
            "vocab_size": options.vocab_size,
            "smoothing": options.label_smoothing or None,
            "z_scale": options.lse_square_scale if options.lse_square_scale or options.return_z_loss else None,
        },
        flags={"TOKEN_SCALING": options.token_scaling, "REDUCED": is_reduced},
    )
    if partials is not None:
        p.launch_over(
            cross_entropy_sums_kernel,
            partials_tiling(p.chip),
            1,
            flags={"REDUCED": is_reduced},
            reads={"p_partials": partials, "p_factors": facts.factors},
            writes={each: written[each] for each in parameters[:3]},
            sizes={"n_partials": grid},
        )


def coefficients(p: Plan, facts: TargetFacts, statistics: Any, options: Options, dloss: Any, dentropy: Any) -> Any:
    """[5, tokens], see `coefficients_of` in reference.py; q is written only with entropies."""
    tokens, result = statistics.shape[1], p.new(Empty((COEFFICIENTS, statistics.shape[1]), FP32))
    each_loss, each_entropy = (_dense(p, None if type(each) is float else each) for each in (dloss, dentropy))
    of_rows = {"p_statistics": statistics, "p_columns": facts.columns, "p_target_weight": facts.target_weight}
    p.launch_over(
        cross_entropy_coefficients_kernel,
        row_tiling(RowKernel.COEFFICIENTS, p.chip),
        tokens,
        flags={
            "LOSS": dloss is not None,
            "EACH_LOSS": each_loss is not None and each_loss.dim() > 0,
            "ENTROPY": options.return_entropy,
            "EACH_ENTROPY": each_entropy is not None and each_entropy.dim() > 0,
            "TOKEN_SCALING": options.token_scaling,
        },
        reads={**of_rows, "p_factors": facts.gradient_factors, "p_dloss": each_loss, "p_dentropy": each_entropy},
        writes={"p_coefficients": result},
        sizes={
            "n_rows": tokens,
            "s_statistics": statistics.strides[0],
            "s_coefficients": tokens,
            "vocab_size": options.vocab_size,
            "smoothing": options.label_smoothing,
            "z_scale": options.lse_square_scale,
        },
    )
    return result


def join(p: Plan, parts: Any, statistics: Any) -> None:
    """See `join_statistics` in reference.py."""
    n_parts, _, tokens = parts.shape
    p.launch_over(
        cross_entropy_join_kernel,
        row_tiling(RowKernel.JOIN, p.chip),
        tokens,
        reads={"p_parts": parts},
        writes={"p_statistics": statistics},
        sizes={"n_rows": tokens, "s_statistics": statistics.strides[0], "n_parts": n_parts},
    )


def _dense(p: Plan, values: Any) -> Any:
    """[tokens], contiguous; or a number where all elements are one element in memory."""
    if values is not None and values.dim() and values.strides[0] == 0:
        return row(p, values, 0)
    return p.contiguous(values)
