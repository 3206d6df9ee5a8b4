"""Kernels of the loss in one sweep, and their launches: E overwrites the logits; v and g follow once S is known.

Formulas: formula.py.

Logits are read once, and E is written once. A row's tail is the first tile, then blocks of columns from the last to the
first. k is the maximum of the first tile, rounded. A tile whose maximum exceeds k by more than SWEEP_LIMIT raises k; at the
end of such a row the earlier exponentials are rescaled.
"""

from __future__ import annotations

from typing import Any

from npu_tiling import Device
from npu_tiling.budget import here, power_of_two
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling
from npu_tiling.plans import Plan

from ..call import Options
from ..formula import LOWEST, exponentials_of, load_logits, load_tail, store_tile, target_column, target_logit, tile_of_rows
from ..tiling import ChunkKernel
from . import Chunk, TargetGradients, launch_chunk, scales_of


@triton.jit
def exponentiate(
    p_out, b_z, b_reference, b_sum, i_col, s_out, n_rows, COLUMNS: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the exponentials of a tile. Returns the references of rows and their sums of exponentials so far, [BLOCK_M]."""
    b_e, b_raised, b_sum = exponentials_of(b_z, b_reference, b_sum, COLUMNS)
    store_tile(p_out, b_e, i_col, s_out, n_rows, COLUMNS, BARRIER)
    return b_raised, b_sum


@triton.jit
def rescale_tile(
    p_out, b_factor, i_col, s_out, n_rows, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Multiplies the exponentials of a tile by a factor of their row."""
    b_e = load_logits(p_out, i_col, s_out, n_rows, None, None, None, COLUMNS, b_factor.shape[0], BLOCK_N)
    store_tile(p_out, b_e * b_factor[:, None], i_col, s_out, n_rows, COLUMNS, BARRIER)


@triton.jit
def sweep_exponentials(
    p_row, p_out, b_reference, b_sum, s_row, s_out, n_rows, n_left, p_bias, logit_scale, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, TILES: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Writes E of a tile of rows, all of it relative to the references that are returned.

    Returns:
        References and sums of exponentials, [BLOCK_M] each; both include the values that were passed in.
    """
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    if TAIL_N > 0:
        b_tail = load_tail(p_row, s_row, n_rows, p_bias, logit_scale, None, N, BLOCK_M, BLOCK_N, TAIL_N)
        b_reference, b_sum = exponentiate(p_out, b_tail, b_reference, b_sum, N_FULL, s_out, n_left, N - N_FULL, BARRIER)
    if N_FULL > 0:
        o_tile = tl.arange(0, TILES).to(tl.float32)[None, :]
        b_first = b_reference
        b_references = tl.zeros([BLOCK_M, TILES], tl.float32)
        for i_block in tl.range(0, N_FULL, BLOCK_N):
            i_col = N_FULL - BLOCK_N - i_block
            b_z = load_logits(p_row, i_col, s_row, n_rows, p_bias, logit_scale, None, BLOCK_N, BLOCK_M, BLOCK_N)
            b_reference, b_sum = exponentiate(p_out, b_z, b_reference, b_sum, i_col, s_out, n_left, BLOCK_N, BARRIER)
            i_tile = (i_block // BLOCK_N).to(tl.float32)
            b_references = tl.where(o_tile == i_tile, b_reference[:, None], b_references)
        # The smallest reference that a row was given.
        b_low = tl.sum(tl.where(o_tile == 0.0, b_references, 0.0), axis=1)
        if TAIL_N > 0:
            b_low = tl.minimum(b_low, b_first)
        if tl.max(tl.where(b_reference > b_low, 1.0, 0.0), axis=0) > 0:
            if BARRIER:
                tl.debug_barrier()
            if TAIL_N > 0:
                b_factor = tl.exp(b_first - b_reference)
                rescale_tile(p_out, b_factor, N_FULL, s_out, n_left, N - N_FULL, TAIL_N, BARRIER)
            for i_block in tl.range(0, N_FULL, BLOCK_N):
                i_tile = (i_block // BLOCK_N).to(tl.float32)
                b_then = tl.sum(tl.where(o_tile == i_tile, b_references, 0.0), axis=1)
                b_factor = tl.exp(b_then - b_reference)
                rescale_tile(p_out, b_factor, N_FULL - BLOCK_N - i_block, s_out, n_left, BLOCK_N, BLOCK_N, BARRIER)
    return b_reference, b_sum


@triton.jit(do_not_specialize=["n_rows", "s_statistics", "first"])
def cross_entropy_exponentials_kernel(
    p_logits,  # [rows, N], some columns
    p_exponentials,  # [rows, N], over the logits' memory or elsewhere
    p_target,  # int32 [rows], negative: none
    p_bias,  # [N]
    p_statistics,  # fp32 [7, rows]: k, sum of exp(z - k), the target's z
    p_reference,  # fp32 [rows]: k after these columns
    n_rows, s_logits, s_exponentials, s_statistics,
    first,  # the column of the vocabulary that column 0 is
    logit_scale,  # None: 1
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,  # as in two_sweeps.py
    TILES: tl.constexpr,  # at least the blocks of a row
    PADDED: tl.constexpr,  # the logits' memory has whole tiles of rows
    BARRIER: tl.constexpr,
    MERGE: tl.constexpr,  # begin with the statistics of earlier columns
):  # fmt: skip
    """Writes E and the statistics of a chunk of columns."""
    # time: rare: that a tile's maximum exceeds the first one's by 30
    # lint: allow scalar-loop: one logit a row, the target's, comes from wherever it is
    # lint: allow short-transfer: a row's tail is as long as its vocabulary makes it
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; those not of whole 32 bytes are padded on chip
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_row = tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M)
        p_out = p_exponentials + i_row.to(tl.int64) * s_exponentials
        b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1) - first  # [BLOCK_M]
        m_here, b_safe = target_column(b_column, N)
        b_z = target_logit(p_row, m_here, b_safe, s_logits, n_left, p_bias, logit_scale, None)
        p_row_statistics = p_statistics + i_row + o_row
        if MERGE:
            b_reference = tl.load(p_row_statistics, mask=m_row, other=0.0)
            b_sum = tl.load(p_row_statistics + s_statistics, mask=m_row, other=0.0)
            b_z += tl.load(p_row_statistics + 2 * s_statistics, mask=m_row, other=0.0)
        else:
            b_reference = tl.full([BLOCK_M], LOWEST, tl.float32)
            b_sum = tl.zeros([BLOCK_M], tl.float32)
        if BARRIER:
            tl.debug_barrier()
        b_reference, b_sum = sweep_exponentials(
            p_row, p_out, b_reference, b_sum, s_logits, s_exponentials, None if PADDED else n_left, n_left, p_bias,
            logit_scale, N, BLOCK_M, BLOCK_N, TAIL_N, TILES, BARRIER
        )  # fmt: skip
        tl.store(p_row_statistics, b_reference, mask=m_row)
        tl.store(p_row_statistics + s_statistics, b_sum, mask=m_row)
        tl.store(p_row_statistics + 2 * s_statistics, b_z, mask=m_row)
        tl.store(p_reference + i_row + o_row, b_reference, mask=m_row)


@triton.jit(do_not_specialize=["n_rows", "s_coefficients", "first"])
def cross_entropy_settle_kernel(
    p_exponentials,  # [rows, N]
    p_target,  # int32 [rows], negative: none
    p_target_logit,  # fp32 [rows]: z of the targets
    p_reference,  # fp32 [rows]: k of these exponentials
    p_last,  # fp32 [rows]: the final k
    p_coefficients,  # fp32 [5, rows], of which the first three are k, a, b
    p_v,  # fp32 [rows]
    p_gradient,  # fp32 [rows]: g, 0 of rows whose target is elsewhere
    n_rows, s_exponentials, s_coefficients, first, logit_scale,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, BARRIER: tl.constexpr,
    FIRST: tl.constexpr,  # the first chunk of columns stores every g, others those of their own targets
):  # fmt: skip
    """Runs once S is known: rescales E where k rose, sets the targets' elements to 0, and stores v and g."""
    # time: rare: that a later column exceeds the first ones by 30
    # lint: allow scalar-reduction: once a tile of rows, whether their reference was raised
    # lint: allow short-transfer: numbers of rows; exponentials only where a reference was raised
    # lint: allow unaligned-rows: rows are as wide as the vocabulary; those not of whole 32 bytes are padded on chip
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    o_row = tl.arange(0, BLOCK_M)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        i_row, n_left, m_row, p_out = tile_of_rows(p_exponentials, i_tile, n_rows, s_exponentials, BLOCK_M)
        b_column = tl.load(p_target + i_row + o_row, mask=m_row, other=-1) - first  # [BLOCK_M]
        m_here, b_safe = target_column(b_column, N)
        b_z = tl.load(p_target_logit + i_row + o_row, mask=m_row, other=0.0)
        b_before = tl.load(p_reference + i_row + o_row, mask=m_row, other=0.0)
        b_reference = tl.load(p_last + i_row + o_row, mask=m_row, other=0.0)
        p_in = p_coefficients + i_row + o_row
        b_of_sum = tl.load(p_in, mask=m_row, other=0.0)
        b_a = tl.load(p_in + s_coefficients, mask=m_row, other=0.0)
        b_b = tl.load(p_in + 2 * s_coefficients, mask=m_row, other=0.0)
        if tl.max(tl.where(b_reference > b_before, 1.0, 0.0), axis=0) > 0:
            b_factor = tl.exp(b_before - b_reference)
            if TAIL_N > 0:
                rescale_tile(p_out, b_factor, N_FULL, s_exponentials, n_left, N - N_FULL, TAIL_N, BARRIER)
            if N_FULL > 0:
                for i_col in tl.range(0, N_FULL, BLOCK_N):
                    rescale_tile(p_out, b_factor, i_col, s_exponentials, n_left, BLOCK_N, BLOCK_N, BARRIER)
        if BARRIER:
            tl.debug_barrier()  # other threads have stored the row
        p_element = p_out + o_row * s_exponentials + b_safe
        tl.store(p_element, tl.zeros([BLOCK_M], tl.float32).to(p_out.dtype.element_ty), mask=m_here & m_row)
        b_v = b_a * tl.exp(b_reference - b_of_sum)
        b_g = b_a * tl.exp(b_z - b_of_sum) - b_b
        if logit_scale is not None:
            b_v *= logit_scale
            b_g *= logit_scale
        b_others = 0.0
        if not FIRST:
            b_others = tl.load(p_gradient + i_row + o_row, mask=m_row, other=0.0)
        tl.store(p_v + i_row + o_row, b_v, mask=m_row)
        tl.store(p_gradient + i_row + o_row, tl.where(m_here, b_g, b_others), mask=m_row)


# Tiles and launches.

_SETTLE_ROWS, _SETTLE_COLUMNS = 32, 128  # 16 KB of fp32


def settle_tiling(width: int, device: Device) -> CountTiling:
    """Tiles of many rows: E is scaled where k rose, and set to 0 at the targets, so that columns are rarely read."""
    on_cuda, rest = device.kind == "cuda", width % _SETTLE_COLUMNS
    tail = power_of_two(rest) if on_cuda and rest else rest
    blocks = ("N", width), ("BLOCK_M", _SETTLE_ROWS), ("BLOCK_N", _SETTLE_COLUMNS), ("TAIL_N", tail), ("BARRIER", on_cuda)
    why = "many rows a tile, whose columns are rarely read"
    return CountTiling(device=device, blocks=blocks, per_program=_SETTLE_ROWS, why=why, decided_at=here())


def exponentials(p: Plan, chunk: Chunk, options: Options, exponentials: Any, result: Any, k: Any, *, merge: bool) -> None:
    """Writes statistics [7, rows], E = exp(z - k) in any memory, and k [rows].

    `merge`: as for `statistics` in two_sweeps.py.
    """
    launch_chunk(
        p,
        cross_entropy_exponentials_kernel,
        ChunkKernel.EXPONENTIALS,
        chunk,
        options,
        reads={"p_logits": chunk.logits, "p_target": chunk.target, "p_bias": chunk.bias},
        writes={"p_exponentials": exponentials, "p_statistics": result, "p_reference": k},
        sizes={
            "s_exponentials": exponentials.strides[0],
            "s_statistics": result.strides[0],
            "logit_scale": scales_of(options)["logit_scale"],
        },
        flags={"MERGE": merge},
    )


def end_exponentials(
    p: Plan,
    chunk: Chunk,
    options: Options,
    k: Any,
    final_k: Any,
    target_logit: Any,
    coefficients: Any,
    v: Any,
    targets: TargetGradients,
) -> None:
    """Ends E, which is in chunk.logits: zeros at targets; writes v [rows] and g. See formula.py.

    Args:
        k: [rows], of this E.
        final_k: [rows], that E is to have.
        target_logit: [rows].
        coefficients: [5, rows].
    """
    rows, width = chunk.logits.shape
    of_rows = {"p_target_logit": target_logit, "p_reference": k, "p_last": final_k, "p_coefficients": coefficients}
    strides = {"s_exponentials": chunk.logits.strides[0], "s_coefficients": coefficients.strides[0]}
    p.launch_over(
        cross_entropy_settle_kernel,
        settle_tiling(width, p.chip),
        rows,
        flags={"FIRST": chunk.columns.start == 0},
        reads={"p_target": chunk.target, **of_rows},
        writes={"p_exponentials": chunk.logits, "p_v": v, "p_gradient": targets.values},
        sizes={"n_rows": rows, **strides, "first": chunk.first, "logit_scale": scales_of(options)["logit_scale"]},
    )
