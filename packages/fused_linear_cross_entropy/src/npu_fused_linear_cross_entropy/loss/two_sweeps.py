"""Kernels of the loss in two sweeps, and their launches: statistics of each row of logits, then the gradient in their place.

For most options one sweep is enough: one_sweep.py. Formulas: formula.py.

A tile is BLOCK_M rows by BLOCK_N columns. Where N is no multiple of BLOCK_N, the last columns are a tile of TAIL_N columns.
Programs stride over the tiles of rows. The first sweep keeps a running maximum and sum for every lane and reduces them once,
at the end of the row. The second sweep goes backwards, because the caches still have the last columns, and overwrites the
logits. A narrower gradient lies in the upper half of its row, where no column is left to read once a block is stored.
"""

from __future__ import annotations

from typing import Any

from npu_tiling.device import tl, triton
from npu_tiling.plans import Plan

from ..call import Options
from ..formula import (
    gradient_of_logits,
    gradient_of_raw,
    load_logits,
    load_tail,
    row_coefficients,
    store_statistics,
    store_tile,
    tile_of_rows,
)
from ..tiling import ChunkKernel
from . import Chunk, TargetFacts, launch_chunk, scales_of


@triton.jit
def store_gradient(
    p_out, b_z, b_reference, b_a, b_b, b_c, b_q, b_column, i_col, s_out, n_rows, p_class_weight, logit_scale, softcap,
    COLUMNS: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the gradient of the raw logits of a tile, given z and the rows' factors."""
    b_g = gradient_of_logits(b_z, b_reference, b_a, b_b, b_c, b_q, b_column, i_col, p_class_weight, COLUMNS)
    b_g = gradient_of_raw(b_g, b_z, None, logit_scale, softcap)
    store_tile(p_out, b_g, i_col, s_out, n_rows, COLUMNS, BARRIER)


@triton.jit
def sweep_gradient(
    p_row, p_out, b_tail, b_reference, b_a, b_b, b_c, b_q, b_column, s_row, s_out, n_rows, n_left, p_bias, p_class_weight,
    logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the gradient of a tile of rows, whose columns behind the last whole block b_tail has, backwards."""
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    if N > N_FULL:
        store_gradient(
            p_out, b_tail, b_reference, b_a, b_b, b_c, b_q, b_column, N_FULL, s_out, n_left, p_class_weight, logit_scale,
            softcap, N - N_FULL, BARRIER
        )  # fmt: skip
    if N_FULL > 0:
        for i_block in tl.range(0, N_FULL, BLOCK_N):
            i_col = N_FULL - BLOCK_N - i_block
            b_z = load_logits(p_row, i_col, s_row, n_rows, p_bias, logit_scale, softcap, BLOCK_N, BLOCK_M, BLOCK_N)
            store_gradient(
                p_out, b_z, b_reference, b_a, b_b, b_c, b_q, b_column, i_col, s_out, n_left, p_class_weight, logit_scale,
                softcap, BLOCK_N, BARRIER
            )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "first"])
def cross_entropy_kernel(
    p_logits,  # [rows, N], all columns
    p_gradient,  # [rows, N], over the logits' memory
    p_target,  # int32 [rows], negative: none
    p_bias,  # [N]
    p_class_weight,  # [N]
    p_factors,  # fp32: of the loss, of the z-loss, the sum of the class weights
    p_statistics,  # fp32 [7, rows], see call.py
    n_rows, s_logits, s_gradient, s_statistics,
    first,  # the column of the vocabulary that column 0 is
    logit_scale,  # None: 1
    softcap,  # None: there is none
    smoothing,  # None: there is none
    z_scale,  # None: there is no z-loss
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,  # at least the columns that are left over, 0 for none; more only where masks are free (CUDA)
    PADDED: tl.constexpr,  # the logits' memory has whole tiles of rows
    BARRIER: tl.constexpr, TOKEN_SCALING: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """Statistics of whole rows, and the gradient of the loss that is one number."""
    # lint: allow scalar-loop: one logit a row, the target's, comes from wherever it is
    # lint: allow single-buffer: rows of one tile stay on chip until their gradient is stored
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it; bf16 tiles leave room for the next load
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; those not of whole 32 bytes are padded on chip
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M)
        n_read = None if PADDED else n_left
        p_out = p_gradient + i_row.to(tl.int64) * s_gradient
        b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1) - first  # [BLOCK_M]
        b_tail = load_tail(p_row, s_logits, n_read, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N)
        b_max, b_sum, b_z, m_here, b_safe = store_statistics(
            p_row, p_statistics, b_tail, b_column, i_row, m_row, s_logits, s_statistics, n_read, n_left, p_bias,
            p_class_weight, first, logit_scale, softcap, N, BLOCK_M, BLOCK_N, False, smoothing is not None, False, ARGMAX
        )  # fmt: skip
        b_main, b_of_z_loss, b_weight = tl.where(m_here, tl.load(p_factors), 0.0), 0.0, 0.0
        if z_scale is not None:
            b_of_z_loss = tl.where(m_here, tl.load(p_factors + 1), 0.0)
        if p_class_weight is not None:
            b_weight = tl.load(p_class_weight + b_safe).to(tl.float32)
        b_a, b_b, b_c = row_coefficients(
            b_main, b_of_z_loss, b_weight, p_factors + 2, b_max, b_sum, b_z, smoothing,
            None if smoothing is None else smoothing / N, z_scale, p_class_weight is not None, TOKEN_SCALING
        )  # fmt: skip
        if TAIL_N > 0 and N >= BLOCK_N:  # not kept while the other columns are swept
            b_tail = load_tail(p_row, s_logits, n_read, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N)
        sweep_gradient(
            p_row, p_out, b_tail, b_max, b_a / b_sum, b_b, None if smoothing is None else b_c, None, b_column, s_logits,
            s_gradient, n_read, n_left, p_bias, p_class_weight, logit_scale, softcap, N, BLOCK_M, BLOCK_N, BARRIER
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "first"])
def cross_entropy_statistics_kernel(
    p_logits,  # [rows, N], some columns
    p_target, p_bias, p_class_weight, p_statistics,
    n_rows, s_logits, s_statistics, first, logit_scale, softcap,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, PADDED: tl.constexpr,
    MERGE: tl.constexpr,  # with the statistics of earlier columns, that are there already
    SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr,
):  # fmt: skip
    """Statistics alone; arguments as above."""
    # lint: allow nan-maximum: NaN of a logit stays in its exponential, which the larger number is a factor of
    # lint: allow scalar-loop: one logit a row, the target's, comes from wherever it is
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it; bf16 tiles leave room for the next load
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; those not of whole 32 bytes are padded on chip
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M)
        n_read = None if PADDED else n_left
        b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1) - first  # [BLOCK_M]
        b_tail = load_tail(p_row, s_logits, n_read, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N)
        store_statistics(
            p_row, p_statistics, b_tail, b_column, i_row, m_row, s_logits, s_statistics, n_read, n_left, p_bias,
            p_class_weight, first, logit_scale, softcap, N, BLOCK_M, BLOCK_N, MERGE, SMOOTHED, ENTROPY, ARGMAX
        )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "s_coefficients", "first"])
def cross_entropy_gradient_kernel(
    p_logits,  # [rows, N], some columns
    p_gradient,  # [rows, N], over the logits' memory
    p_target, p_bias, p_class_weight,
    p_coefficients,  # fp32 [5, rows]: k, a, b, c, q
    n_rows, s_logits, s_gradient, s_coefficients, first, logit_scale, softcap,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, BARRIER: tl.constexpr,
    SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """The gradient alone, of any upstream gradient; arguments as above."""
    # lint: allow nan-maximum: NaN of a logit stays in its exponential, which the larger number is a factor of
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it; bf16 tiles leave room for the next load
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; those not of whole 32 bytes are padded on chip
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M)
        p_out = p_gradient + i_row.to(tl.int64) * s_gradient
        b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1) - first  # [BLOCK_M]
        p_in = p_coefficients + i_row + o_row
        b_reference = tl.load(p_in, mask=m_row, other=0.0)
        b_a = tl.load(p_in + s_coefficients, mask=m_row, other=0.0)
        b_b = tl.load(p_in + 2 * s_coefficients, mask=m_row, other=0.0)
        b_c = tl.load(p_in + 3 * s_coefficients, mask=m_row, other=0.0)
        b_q = None
        if ENTROPY:
            b_q = tl.load(p_in + 4 * s_coefficients, mask=m_row, other=0.0)
        b_tail = load_tail(p_row, s_logits, n_left, p_bias, logit_scale, softcap, N, BLOCK_M, BLOCK_N, TAIL_N)
        sweep_gradient(
            p_row, p_out, b_tail, b_reference, b_a, b_b, b_c if SMOOTHED else None, b_q, b_column, s_logits, s_gradient,
            n_left, n_left, p_bias, p_class_weight, logit_scale, softcap, N, BLOCK_M, BLOCK_N, BARRIER
        )  # fmt: skip


# Launches. Kernels read raw products.


def statistics(p: Plan, chunk: Chunk, options: Options, result: Any, *, merge: bool) -> None:
    """Writes statistics [7, rows]; `merge`: merged with the statistics of earlier columns in `result`."""
    launch_chunk(
        p,
        cross_entropy_statistics_kernel,
        ChunkKernel.STATISTICS,
        chunk,
        options,
        reads={**_reads(chunk), "p_bias": chunk.bias, "p_class_weight": _smoothing_weight(chunk, options)},
        writes={"p_statistics": result},
        sizes={"s_statistics": result.strides[0], **scales_of(options)},
        flags={
            "MERGE": merge,
            "SMOOTHED": options.smoothed,
            "ENTROPY": options.return_entropy,
            "ARGMAX": options.argmax,
        },
    )


def gradient(p: Plan, chunk: Chunk, options: Options, gradient: Any, coefficients: Any) -> None:
    """Writes the gradient of the logits, which may share their memory, given coefficients [5, rows]."""
    launch_chunk(
        p,
        cross_entropy_gradient_kernel,
        ChunkKernel.GRADIENT,
        chunk,
        options,
        reads={
            **_reads(chunk),
            "p_bias": chunk.bias,
            "p_class_weight": _smoothing_weight(chunk, options),
            "p_coefficients": coefficients,
        },
        writes={"p_gradient": gradient},
        sizes={"s_gradient": gradient.strides[0], "s_coefficients": coefficients.strides[0], **scales_of(options)},
        flags={"SMOOTHED": options.smoothed, "ENTROPY": options.return_entropy},
    )


def statistics_and_gradient(p: Plan, chunk: Chunk, options: Options, gradient: Any, facts: TargetFacts, result: Any) -> None:
    """Writes statistics [7, rows] of whole rows, and the gradient of the one loss that they give."""
    of_rows = {"p_bias": chunk.bias, "p_class_weight": chunk.class_weight, "p_factors": facts.gradient_factors}
    scales = {"smoothing": options.label_smoothing or None, "z_scale": options.lse_square_scale or None}
    launch_chunk(
        p,
        cross_entropy_kernel,
        ChunkKernel.BOTH,
        chunk,
        options,
        reads={**_reads(chunk), **of_rows},
        writes={"p_gradient": gradient, "p_statistics": result},
        sizes={"s_gradient": gradient.strides[0], "s_statistics": result.strides[0], **scales_of(options), **scales},
        flags={"TOKEN_SCALING": options.token_scaling, "ARGMAX": options.argmax},
    )


def _reads(chunk: Chunk) -> dict[str, Any]:
    return {"p_logits": chunk.logits, "p_target": chunk.target}


def _smoothing_weight(chunk: Chunk, options: Options) -> Any:
    """The class weights of a chunk's columns, where smoothing needs them."""
    return chunk.class_weight if options.smoothed else None
