"""Kernels of the distributions of rows, and their launches: statistics of a chunk of logits, their gradient in their place.

Formulas: reference.py; z is that of formula.py times the row's rate. Tiles, tails and the order of columns: as in
loss/two_sweeps.py.
"""

from __future__ import annotations

from typing import Any

from npu_tiling.device import tl, triton
from npu_tiling.plans import Plan

from ..call import Options
from ..formula import (
    LOWEST,
    VANISHES,
    at_rate,
    gradient_of_raw,
    inside,
    load_logits,
    load_tail,
    merge_squares,
    merge_statistics,
    statistics_of_rows,
    store_tile,
    tile_of_rows,
)
from ..loss import launch_shape, scales_of
from ..tiling import ChunkKernel, ChunkShape


@triton.jit(do_not_specialize=["n_rows", "s_statistics"])
def distribution_statistics_kernel(
    p_logits,  # [rows, N], some columns
    p_rates,  # fp32 [rows]: 1 / temperature
    p_statistics,  # fp32 [5, rows]: maximum, sum of exp, sum of exp times z, sum of exp^2, sum of z
    n_rows, s_logits, s_statistics,
    logit_scale,  # None: 1
    softcap,  # None: there is none
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,  # as in loss/two_sweeps.py
    PADDED: tl.constexpr,  # the logits' memory has whole tiles of rows
    MERGE: tl.constexpr,  # with the statistics of earlier columns, that are there already
):  # fmt: skip
    """Statistics of rows of logits: log-probability, entropy, sum of squares and mean. PyTorch finds the largest."""
    # lint: allow nan-maximum: NaN of a logit stays in its exponential, which the larger number is a factor of
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it; bf16 tiles leave room for the next load
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; those not of whole 32 bytes are padded on chip
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M)
        n_read, b_rate = None if PADDED else n_left, None
        if p_rates is not None:
            b_rate = tl.load(p_rates + (i_row + o_row), mask=m_row, other=1.0)  # [BLOCK_M]
        b_tail = load_tail(p_row, s_logits, n_read, None, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N)
        b_max, b_sum, b_total, b_dot, b_index, b_squares, _ = statistics_of_rows(
            p_row, at_rate(b_tail, b_rate), s_logits, n_read, b_rate, None, None, logit_scale, softcap, N, BLOCK_M,
            BLOCK_N, True, True, False, True
        )  # fmt: skip
        b_total += b_max * N
        p_out = p_statistics + i_row + o_row
        if MERGE:
            b_max0 = tl.load(p_out, mask=m_row, other=0.0)
            b_sum0 = tl.load(p_out + s_statistics, mask=m_row, other=1.0)
            b_dot0 = tl.load(p_out + 2 * s_statistics, mask=m_row, other=0.0)
            b_squares0 = tl.load(p_out + 3 * s_statistics, mask=m_row, other=1.0)
            b_total += tl.load(p_out + 4 * s_statistics, mask=m_row, other=0.0)
            b_squares = merge_squares(b_max0, b_squares0, b_max, b_squares)
            b_max, b_sum, b_dot, b_index = merge_statistics(
                b_max0, b_sum0, b_dot0, 0.0, b_max, b_sum, b_dot, 0.0, True, False
            )
        tl.store(p_out, b_max, mask=m_row)
        tl.store(p_out + s_statistics, b_sum, mask=m_row)
        tl.store(p_out + 2 * s_statistics, b_dot, mask=m_row)
        tl.store(p_out + 3 * s_statistics, b_squares, mask=m_row)
        tl.store(p_out + 4 * s_statistics, b_total, mask=m_row)


@triton.jit
def store_gradient(
    p_out, b_z, b_max, b_a, b_b, b_c, b_d, b_rate, i_col, s_out, n_rows, logit_scale, softcap, COLUMNS: tl.constexpr,
    DOTS: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the gradient of a tile of raw logits. With DOTS, returns sums [BLOCK_M] of (z - k) times the gradient of z."""
    b_below = tl.maximum(b_z - b_max[:, None], VANISHES)
    b_e = tl.exp(b_below)
    b_g = b_e * (b_a[:, None] + b_b[:, None] * b_below + b_c[:, None] * b_e) + b_d[:, None]
    b_dot = b_max * 0.0
    if DOTS:
        b_dot = tl.sum(inside(b_g * tl.maximum(b_z - b_max[:, None], LOWEST), 0.0, COLUMNS), axis=1)
    b_g = gradient_of_raw(b_g, b_z, b_rate, logit_scale, softcap)
    store_tile(p_out, b_g, i_col, s_out, n_rows, COLUMNS, BARRIER)
    return b_dot


@triton.jit(do_not_specialize=["n_rows", "s_coefficients"])
def distribution_gradient_kernel(
    p_logits,  # [rows, N], some columns
    p_rates,  # fp32 [rows]
    p_gradient,  # [rows, N], over the logits' memory
    p_coefficients,  # fp32 [7, rows]: k, log S, a, b, c, d; the last one is not read
    p_dots,  # fp32 [rows]: gets the sum of (z - k) times the gradient of z
    n_rows, s_logits, s_gradient, s_coefficients,
    logit_scale,  # None: 1
    softcap,  # None: there is none
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, BARRIER: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits that their distributions' outputs received, in the logits' place."""
    # lint: allow nan-maximum: the factors of a row with NaN are NaN, which its statistics keep
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it; bf16 tiles leave room for the next load
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; those not of whole 32 bytes are padded on chip
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M)
        p_out, b_rate = p_gradient + i_row.to(tl.int64) * s_gradient, None
        if p_rates is not None:
            b_rate = tl.load(p_rates + (i_row + o_row), mask=m_row, other=1.0)  # [BLOCK_M]
        p_in = p_coefficients + i_row + o_row
        b_max = tl.load(p_in, mask=m_row, other=0.0)
        b_log = tl.load(p_in + s_coefficients, mask=m_row, other=0.0)
        b_a = tl.load(p_in + 2 * s_coefficients, mask=m_row, other=0.0)
        b_b = tl.load(p_in + 3 * s_coefficients, mask=m_row, other=0.0)
        b_c = tl.load(p_in + 4 * s_coefficients, mask=m_row, other=0.0)
        b_d = tl.load(p_in + 5 * s_coefficients, mask=m_row, other=0.0)
        b_inverse = tl.exp(-b_log)
        b_a, b_b, b_c = (b_a - b_b * b_log) * b_inverse, b_b * b_inverse, b_c * b_inverse * b_inverse
        b_dot = b_max * 0.0
        if TAIL_N > 0:
            b_tail = load_tail(p_row, s_logits, n_left, None, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N)
            b_dot += store_gradient(
                p_out, at_rate(b_tail, b_rate), b_max, b_a, b_b, b_c, b_d, b_rate, N_FULL, s_gradient, n_left, logit_scale,
                softcap, N - N_FULL, p_dots is not None, BARRIER
            )  # fmt: skip
        if N_FULL > 0:
            for i_block in tl.range(0, N_FULL, BLOCK_N):
                i_col = N_FULL - BLOCK_N - i_block
                b_z = load_logits(p_row, i_col, s_logits, n_left, None, logit_scale, softcap, BLOCK_N, BLOCK_M, BLOCK_N)
                b_dot += store_gradient(
                    p_out, at_rate(b_z, b_rate), b_max, b_a, b_b, b_c, b_d, b_rate, i_col, s_gradient, n_left, logit_scale,
                    softcap, BLOCK_N, p_dots is not None, BARRIER
                )  # fmt: skip
        if p_dots is not None:
            tl.store(p_dots + i_row + o_row, b_dot, mask=m_row)


# Launches.


def statistics(p: Plan, logits: Any, rates: Any, options: Options, result: Any, *, merge: bool) -> None:
    """Writes statistics [5, rows]; `merge`: merged with the statistics of earlier columns in `result`."""
    launch_shape(
        p,
        distribution_statistics_kernel,
        _shape(ChunkKernel.DISTRIBUTIONS, logits),
        reads={"p_logits": logits, "p_rates": rates},
        writes={"p_statistics": result},
        sizes={
            "n_rows": logits.shape[0],
            "s_logits": logits.strides[0],
            "s_statistics": result.strides[0],
            **scales_of(options),
        },
        flags={"MERGE": merge},
    )


def gradient(p: Plan, logits: Any, rates: Any, options: Options, gradient: Any, coefficients: Any, dots: Any) -> None:
    """Writes the gradient of raw logits but for ids, which may share their memory, given coefficients [7, rows].

    Args:
        dots: [rows], gets the sum of (z - k) times the gradient of z; None: not asked for.
    """
    strides = {"s_gradient": gradient.strides[0], "s_coefficients": coefficients.strides[0]}
    launch_shape(
        p,
        distribution_gradient_kernel,
        _shape(ChunkKernel.DISTRIBUTION_GRADIENT, logits, gradient),
        reads={"p_logits": logits, "p_rates": rates, "p_coefficients": coefficients},
        writes={"p_gradient": gradient, "p_dots": dots},
        sizes={"n_rows": logits.shape[0], "s_logits": logits.strides[0], **strides, **scales_of(options)},
        flags={},
    )


def _shape(kernel: ChunkKernel, logits: Any, written: Any = None) -> ChunkShape:
    return ChunkShape(
        kernel=kernel,
        width=logits.shape[1],
        itemsize=logits.dtype.itemsize,
        written_itemsize=0 if written is None else written.dtype.itemsize,
        smoothed=True,
        entropy=True,
        transformed=True,
    )
