"""CUDA: forward and backward of rows that a program holds in registers, and which kernel, tile and grid a call takes.

The first row of FORWARD_RULES or BACKWARD_RULES that a shape matches decides; it may name a kernel of wide.py. Both were
measured on an H200, with the shapes of the documentation's tables. Formulas: formula.py.

A tile has M rows in CHUNKS chunks of BLOCK_N columns, a power of two, as stock
Triton asks: a row of 2560 columns is five chunks of 512, and not one block of 4096 of which a third is padding. Rows lie on
two levels, as in wide.py. Unlike on Ascend, offsets may need a division, so a tile may have rows of several groups.

ORDER says how rows are numbered. Rows with consecutive numbers share a tile:

    "one"      there is one group
    "groups"   group after group
    "tokens"   groups are heads with parameters of their own, token after token
    "heads"    the same, head after head: a program takes tiles of one head
"""

import functools
from dataclasses import dataclass
from enum import Flag, auto
from math import ceil
from typing import Any, NamedTuple

from npu_tiling import ALL_TILES, Device, persistent_grid
from npu_tiling.budget import CORE_REGISTERS, WARP, equal_chunks, here, power_of_two, register_cap, row_options
from npu_tiling.device import gradient_of_rows, load_block, round_to, store_block, tl, triton
from npu_tiling.partials import store_partial

from .call import MAX_COUNTED_ROWS, RowTiling, Shape
from .formula import MIN_AMAX, activate, add_residual, inverse_rms, load_factor, normalise, quantise, weigh


@triton.jit
def tiles_of_program(i_program, n_programs, n_outer, n_inner, M: tl.constexpr, ORDER: tl.constexpr):
    """A program's first tile, the tile it stops before, the step between its tiles, and its head."""
    if ORDER == "heads":
        return i_program // n_outer, tl.cdiv(n_inner, M), n_programs // n_outer, i_program % n_outer
    elif ORDER == "one":
        return i_program, tl.cdiv(n_inner, M), n_programs, 0
    else:
        return i_program, tl.cdiv(n_outer * n_inner, M), n_programs, 0


@triton.jit
def parameters_of_head(p_parameters, i_head, N: tl.constexpr, ORDER: tl.constexpr):
    """The [N] parameters of a program's head, or of all rows; None for None."""
    if p_parameters is not None:
        if ORDER == "heads":
            return p_parameters + i_head * N
        else:
            return p_parameters


@triton.jit
def tile_position(i_tile, i_head, n_outer, n_inner, M: tl.constexpr, ORDER: tl.constexpr):
    """Where the rows of a tile are.

    Returns:
        The group and the row in it: of the tile's first row ("one", "heads"), or of each row, [M] ("groups", "tokens"). Then
        for each row its place in rstd, [M], and whether it exists, [M].
    """
    i_first = i_tile * M
    o_tile = tl.arange(0, M)
    if ORDER == "heads":
        return i_head, i_first, tl.cast(i_head, tl.int64) * n_inner + i_first + o_tile, o_tile < n_inner - i_first
    elif ORDER == "one":
        return 0, i_first, tl.cast(i_first, tl.int64) + o_tile, o_tile < n_inner - i_first
    else:
        o_row = i_first + o_tile
        m_row = o_tile < n_outer * n_inner - i_first
        if ORDER == "tokens":
            o_token = o_row // n_outer
            o_head = o_row - o_token * n_outer
            return o_head, o_token, tl.cast(o_head, tl.int64) * n_inner + o_token, m_row
        else:
            o_outer = o_row // n_inner
            return o_outer, o_row - o_outer * n_inner, o_row, m_row


@triton.jit
def rows_at(p_rows, s_outer, s_inner, i_outer, i_inner, M: tl.constexpr, ORDER: tl.constexpr):
    """Pointers [M, 1] to the first elements of a tile's rows; None for None."""
    if p_rows is not None:
        if ORDER == "one":
            return p_rows + tl.cast(i_inner, tl.int64) * s_inner + tl.arange(0, M)[:, None] * s_inner
        elif ORDER == "heads":
            p_first = p_rows + tl.cast(i_outer, tl.int64) * s_outer + tl.cast(i_inner, tl.int64) * s_inner
            return p_first + tl.arange(0, M)[:, None] * s_inner
        else:
            return (p_rows + tl.cast(i_outer, tl.int64) * s_outer + tl.cast(i_inner, tl.int64) * s_inner)[:, None]


@triton.jit
def result_rows_at(p_rows, i_outer, i_inner, o_row, n_outer, N: tl.constexpr, M: tl.constexpr, ORDER: tl.constexpr):
    """As `rows_at`, for a contiguous tensor: where groups are heads, it is [..., H, D]."""
    if p_rows is not None:
        if ORDER == "one":
            return p_rows + tl.cast(i_inner, tl.int64) * N + tl.arange(0, M)[:, None] * N
        elif ORDER == "heads":
            s_row = tl.cast(n_outer, tl.int64) * N
            return p_rows + tl.cast(i_outer, tl.int64) * N + i_inner * s_row + tl.arange(0, M)[:, None] * s_row
        elif ORDER == "tokens":
            return p_rows + (tl.cast(i_inner * n_outer + i_outer, tl.int64) * N)[:, None]
        else:
            return p_rows + (tl.cast(o_row, tl.int64) * N)[:, None]


@triton.jit
def chunk_mask(m_row, CHUNK: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of a chunk exist; None: all do. A tile of one row (M = 1) has a row that exists."""
    if CHUNK * BLOCK_N + BLOCK_N > N:
        m_chunk = (tl.arange(0, BLOCK_N) < N - CHUNK * BLOCK_N)[None, :]
        if M > 1:
            m_chunk = m_chunk & m_row[:, None]
        return m_chunk
    elif M > 1:
        return m_row[:, None]


@triton.jit
def load_chunk(p_tile, m_row, CHUNK: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 [M, BLOCK_N], zero outside the tensor: a chunk of the rows that start at p_tile."""
    p_chunk = p_tile + (CHUNK * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    return load_block(p_chunk, chunk_mask(m_row, CHUNK, N, M, BLOCK_N)).to(tl.float32)


@triton.jit
def store_chunk(p_tile, b_chunk, m_row, CHUNK: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rounds [M, BLOCK_N] to the tensor's dtype (of y, dx and dgate the last rounding), and stores it."""
    p_chunk = p_tile + (CHUNK * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    store_block(p_chunk, b_chunk, chunk_mask(m_row, CHUNK, N, M, BLOCK_N))


@triton.jit
def load_factor_rows(
    p_factor, i_outer, offset, N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    FACTORS: tl.constexpr
):  # fmt: skip
    """offset + w, or the bias with an offset of None, for each row of a tile with one chunk, [M, BLOCK_N]; None for None.

    Each thread loads the parameters of its own elements from a cache. A block [1, columns], as `load_factor` makes it, would
    reach the threads through shared memory.
    """
    if p_factor is not None:
        o_head = tl.zeros([M], tl.int32)
        if ORDER == "tokens":
            o_head = i_outer * N
        p_tile = p_factor + (o_head[:, None] + tl.arange(0, BLOCK_N)[None, :])
        if BLOCK_N == N:
            b_factor = tl.load(p_tile).to(tl.float32)
        else:
            b_factor = tl.load(p_tile, mask=(tl.arange(0, BLOCK_N) < N)[None, :], other=0.0).to(tl.float32)
        if offset is not None:
            b_factor += offset
        return round_to(b_factor, FACTORS)


@triton.jit
def load_factor_chunk(
    p_factor, i_outer, offset, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, ORDER: tl.constexpr, FACTORS: tl.constexpr
):  # fmt: skip
    """A chunk of offset + w, or of the bias with an offset of None; None for None."""
    if CHUNKS == 1:
        return load_factor_rows(p_factor, i_outer, offset, N, M, BLOCK_N, ORDER, FACTORS)
    else:
        o_col = CHUNK * BLOCK_N + tl.arange(0, BLOCK_N)
        return load_factor(p_factor, o_col, offset, N, CHUNK * BLOCK_N + BLOCK_N <= N, FACTORS)


@triton.jit
def larger(a, b):
    """The larger of two numbers; NaN where either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_kernel(
    # Read; None: the call has no such input.
    p_x, p_residual, p_gate, p_weight, p_bias,
    # Written; None: not asked for. p_scale: the scales of a quantised y, fp32 [rows], in the order of rstd.
    p_y, p_sum, p_fp32, p_rstd, p_scale,
    n_outer, n_inner,
    s_x_outer, s_x_inner, s_extra_outer, s_extra_inner,  # extra: the residual or the gate; no call has both
    eps, offset,
    N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """y of rows held in registers, each read once; and the sum, y in fp32, rstd and scales where they are asked for."""
    CHUNKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    # The weight is loaded before the sum over the row, which all that follows waits for. Not where y is quantised: the row
    # waits for its largest element too, and more programs are resident where none of them keeps a weight.
    KEEPS_SCALE: tl.constexpr = p_weight is not None and p_scale is None
    i_first, i_stop, n_step, i_head = tiles_of_program(tl.program_id(0), tl.num_programs(0), n_outer, n_inner, M, ORDER)
    p_weight = parameters_of_head(p_weight, i_head, N, ORDER)
    p_bias = parameters_of_head(p_bias, i_head, N, ORDER)
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, o_row, m_row = tile_position(i_tile, i_head, n_outer, n_inner, M, ORDER)
        p_x_tile = rows_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, M, ORDER)
        p_residual_tile = rows_at(p_residual, s_extra_outer, s_extra_inner, i_outer, i_inner, M, ORDER)
        p_gate_tile = rows_at(p_gate, s_extra_outer, s_extra_inner, i_outer, i_inner, M, ORDER)
        p_sum_tile = result_rows_at(p_sum, i_outer, i_inner, o_row, n_outer, N, M, ORDER)

        row, acts, scales = (), (), ()
        b_square = tl.zeros([M, BLOCK_N], tl.float32)
        for c in tl.static_range(CHUNKS):
            b_x = load_chunk(p_x_tile, m_row, c, N, M, BLOCK_N)
            if p_residual is not None:
                b_sum, b_x = add_residual(b_x, load_chunk(p_residual_tile, m_row, c, N, M, BLOCK_N), p_sum)
                store_chunk(p_sum_tile, b_sum, m_row, c, N, M, BLOCK_N)
            if p_gate is not None:
                b_act, _ = activate(load_chunk(p_gate_tile, m_row, c, N, M, BLOCK_N), ACTIVATION)
                if GATE_FIRST:
                    b_x *= b_act
                else:
                    acts = acts + (b_act,)
            if KEEPS_SCALE:
                b_scale = load_factor_chunk(p_weight, i_outer, offset, c, CHUNKS, N, M, BLOCK_N, ORDER, FACTORS)
                scales = scales + (b_scale,)
            b_square += b_x * b_x
            row = row + (b_x,)

        b_rstd = inverse_rms(b_square, eps, N)  # [M]
        if p_rstd is not None:
            tl.store(p_rstd + o_row, b_rstd, mask=m_row)
        p_fp32_tile = result_rows_at(p_fp32, i_outer, i_inner, o_row, n_outer, N, M, ORDER)
        p_y_tile = result_rows_at(p_y, i_outer, i_inner, o_row, n_outer, N, M, ORDER)
        results = ()
        for c in tl.static_range(CHUNKS):
            b_bias = load_factor_chunk(p_bias, i_outer, None, c, CHUNKS, N, M, BLOCK_N, ORDER, FACTORS)
            b_n = normalise(row[c], b_rstd, NORMALISED, FACTORS)
            if KEEPS_SCALE:
                b_scale = scales[c]
            else:
                b_scale = load_factor_chunk(p_weight, i_outer, offset, c, CHUNKS, N, M, BLOCK_N, ORDER, FACTORS)
            b_y = weigh(b_n, b_scale, b_bias, WEIGHTED)
            if p_gate is not None:
                if not GATE_FIRST:
                    b_y = round_to(b_y, WEIGHTED) * acts[c]
            if p_fp32 is not None:
                store_chunk(p_fp32_tile, b_y, m_row, c, N, M, BLOCK_N)
            if p_scale is None:
                store_chunk(p_y_tile, b_y, m_row, c, N, M, BLOCK_N)
            else:
                results = results + (b_y,)

        if p_scale is not None:
            b_columns_amax = tl.abs(results[0])
            for c in tl.static_range(1, CHUNKS):
                b_columns_amax = larger(b_columns_amax, tl.abs(results[c]))
            b_amax = tl.reduce(b_columns_amax, 1, larger)  # [M]
            b_amax = larger(b_amax, MIN_AMAX) + b_amax * 0.0  # NaN of inf too, as `amax_of_rows` has it
            for c in tl.static_range(CHUNKS):
                b_y, b_steps = quantise(results[c], b_amax, p_y.dtype.element_ty == tl.int8)
                store_chunk(p_y_tile, b_y, m_row, c, N, M, BLOCK_N)
            tl.store(p_scale + o_row, b_steps, mask=m_row)


@triton.jit
def backward_of_tiles(
    i_program, n_programs, p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd, p_dx, p_dgate, p_dw, p_db, n_outer, n_inner,
    s_dy_outer, s_dy_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner, s_extra_outer, s_extra_inner, offset,
    N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr
):  # fmt: skip
    """`backward_kernel` for program i_program of n_programs. It stores its partial sums in row tl.program_id(0)."""
    CHUNKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_first, i_stop, n_step, i_head = tiles_of_program(i_program, n_programs, n_outer, n_inner, M, ORDER)
    p_weight = parameters_of_head(p_weight, i_head, N, ORDER)
    p_bias = parameters_of_head(p_bias, i_head, N, ORDER)
    if CHUNKS == 1:  # several chunks are loaded again for each tile: kept, they would take the registers that rows need
        o_col = tl.arange(0, BLOCK_N)
        b_scale = load_factor(p_weight, o_col, offset, N, BLOCK_N == N, FACTORS)
        if p_dgate is not None:  # nothing else needs the bias
            b_bias = load_factor(p_bias, o_col, None, N, BLOCK_N == N, FACTORS)
    # The sums over this program's rows stay in registers until its last tile.
    dw, db = (), ()
    for _ in tl.static_range(CHUNKS):
        if p_dw is not None:
            dw = dw + (tl.zeros([M, BLOCK_N], tl.float32),)
        if p_db is not None:
            db = db + (tl.zeros([M, BLOCK_N], tl.float32),)
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, o_row, m_row = tile_position(i_tile, i_head, n_outer, n_inner, M, ORDER)
        p_dy_tile = rows_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, M, ORDER)
        p_dsum_tile = rows_at(p_dsum, s_extra_outer, s_extra_inner, i_outer, i_inner, M, ORDER)
        p_x_tile = rows_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, M, ORDER)
        p_gate_tile = rows_at(p_gate, s_extra_outer, s_extra_inner, i_outer, i_inner, M, ORDER)
        p_dx_tile = rows_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner, M, ORDER)
        p_dgate_tile = result_rows_at(p_dgate, i_outer, i_inner, o_row, n_outer, N, M, ORDER)

        b_rstd = tl.load(p_rstd + o_row, mask=m_row, other=0.0)  # [M]
        b_product = tl.zeros([M, BLOCK_N], tl.float32)
        new_dw, new_db, normalised, gradients, acts, slopes = (), (), (), (), (), ()
        for c in tl.static_range(CHUNKS):
            b_x = load_chunk(p_x_tile, m_row, c, N, M, BLOCK_N)
            b_dy = load_chunk(p_dy_tile, m_row, c, N, M, BLOCK_N)
            o_chunk = c * BLOCK_N + tl.arange(0, BLOCK_N)
            if CHUNKS > 1:
                b_scale = load_factor(p_weight, o_chunk, offset, N, c * BLOCK_N + BLOCK_N <= N, FACTORS)
            b_u = b_x
            if p_gate is not None:
                b_act, b_slope = activate(load_chunk(p_gate_tile, m_row, c, N, M, BLOCK_N), ACTIVATION)
                if GATE_FIRST:
                    b_u = b_x * b_act
                    acts, slopes = acts + (b_act,), slopes + (b_x * b_slope,)
            b_n = normalise(b_u, b_rstd, NORMALISED, FACTORS)
            if p_gate is not None:
                if not GATE_FIRST:
                    if p_dgate is not None:
                        if CHUNKS > 1:
                            b_bias = load_factor(p_bias, o_chunk, None, N, c * BLOCK_N + BLOCK_N <= N, FACTORS)
                        b_z = round_to(weigh(b_n, b_scale, b_bias, WEIGHTED), WEIGHTED)
                        store_chunk(p_dgate_tile, b_dy * b_z * b_slope, m_row, c, N, M, BLOCK_N)
                    b_dy *= b_act
            if p_dw is not None:
                new_dw = new_dw + (dw[c] + b_dy * b_n,)
            if p_db is not None:
                new_db = new_db + (db[c] + b_dy,)
            if p_dx is not None:
                b_g = b_dy
                if p_weight is not None:
                    b_g = b_dy * b_scale
                b_product += b_g * b_n
                normalised, gradients = normalised + (b_n,), gradients + (b_g,)
        dw, db = new_dw, new_db

        if p_dx is not None:
            b_mean = tl.sum(b_product, axis=1) * (1.0 / N)  # [M]
            for c in tl.static_range(CHUNKS):
                b_dx = gradient_of_rows(gradients[c], normalised[c], b_rstd, b_mean)
                if GATE_FIRST:
                    if p_dgate is not None:
                        store_chunk(p_dgate_tile, b_dx * slopes[c], m_row, c, N, M, BLOCK_N)
                    b_dx *= acts[c]
                if p_dsum is not None:
                    b_dx += load_chunk(p_dsum_tile, m_row, c, N, M, BLOCK_N)
                store_chunk(p_dx_tile, b_dx, m_row, c, N, M, BLOCK_N)
    for c in tl.static_range(CHUNKS):
        o_chunk = c * BLOCK_N + tl.arange(0, BLOCK_N)
        if p_dw is not None:
            store_partial(p_dw, dw[c], tl.program_id(0), o_chunk, N, CHUNKS * BLOCK_N == N)
        if p_db is not None:
            store_partial(p_db, db[c], tl.program_id(0), o_chunk, N, CHUNKS * BLOCK_N == N)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_kernel(
    # Read; None: the call has no such input. p_dsum: the gradient of the forward's sum.
    p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd,
    # Written; None: not needed. p_dw, p_db: fp32 [programs, N], partial sums; of one program (a head), the gradients.
    p_dx, p_dgate, p_dw, p_db,
    n_outer, n_inner,
    s_dy_outer, s_dy_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner,
    s_extra_outer, s_extra_inner, offset,  # extra: dsum or the gate; no call has both
    N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradients of rows held in registers, and a partial sum of each parameter's gradient."""
    backward_of_tiles(
        tl.program_id(0), tl.num_programs(0), p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd, p_dx, p_dgate, p_dw, p_db,
        n_outer, n_inner, s_dy_outer, s_dy_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner, s_extra_outer, s_extra_inner,
        offset, N, M, BLOCK_N, ORDER, NORMALISED, FACTORS, WEIGHTED, ACTIVATION, GATE_FIRST
    )  # fmt: skip


# A fused projection of q, k and v: one launch writes the whole gradient. The first n_q programs take rows of q, the next n_k
# rows of k, and the others copy rows of v; the numbers are in proportion to the bytes that they move.


@triton.jit(do_not_specialize=["n_outer", "n_q_inner", "n_k_inner", "n_q", "n_k"])
def qk_backward_kernel(
    # Read; p_q_weight, p_k_weight: None where there are none. q and k have equal strides, and so have p_dx_q and p_dx_k.
    p_dq, p_dk, p_dv, p_q, p_k, p_q_weight, p_k_weight, p_q_rstd, p_k_rstd,
    # Written: slices of the projection's gradient. p_dw: fp32 [n_q + n_k, N], partial sums; None: no weight needs them.
    p_dx_q, p_dx_k, p_dx_v, p_dw,
    n_outer, n_q_inner, n_k_inner, n_q, n_k,
    s_dq_outer, s_dq_inner, s_dk_outer, s_dk_inner, s_dv_outer, s_dv_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k and v, and partial sums of the weights' gradients."""
    i_program = tl.program_id(0)
    n_norms = n_q + n_k
    if i_program < n_norms:
        is_q = i_program < n_q
        p_weight = p_q_weight
        if p_q_weight is not None:
            p_weight = tl.where(is_q, p_q_weight, p_k_weight)
        backward_of_tiles(
            tl.where(is_q, i_program, i_program - n_q), tl.where(is_q, n_q, n_k),
            tl.where(is_q, p_dq, p_dk), None, tl.where(is_q, p_q, p_k), None, p_weight, None,  # no dsum, no gate, no bias
            tl.where(is_q, p_q_rstd, p_k_rstd), tl.where(is_q, p_dx_q, p_dx_k), None, p_dw, None,  # nor their gradients
            n_outer, tl.where(is_q, n_q_inner, n_k_inner),
            tl.where(is_q, s_dq_outer, s_dk_outer), tl.where(is_q, s_dq_inner, s_dk_inner), s_x_outer, s_x_inner,
            s_dx_outer, s_dx_inner, 0, 0, offset, N, M, BLOCK_N, ORDER, NORMALISED, FACTORS, "", "", False  # nor strides
        )  # fmt: skip
    else:
        i_first, i_stop, n_step, i_head = tiles_of_program(
            i_program - n_norms, tl.num_programs(0) - n_norms, n_outer, n_k_inner, M, ORDER
        )
        for i_tile in tl.range(i_first, i_stop, n_step):
            i_outer, i_inner, o_row, m_row = tile_position(i_tile, i_head, n_outer, n_k_inner, M, ORDER)
            p_from = rows_at(p_dv, s_dv_outer, s_dv_inner, i_outer, i_inner, M, ORDER)
            p_to = rows_at(p_dx_v, s_dx_outer, s_dx_inner, i_outer, i_inner, M, ORDER)
            store_chunk(p_to, load_chunk(p_from, m_row, 0, N, M, BLOCK_N), m_row, 0, N, M, BLOCK_N)


SHARE_COLUMNS = 1024  # of a row that several programs hold, in each program
ONE_ROW = 0  # `size`: a tile is one row, in chunks
BY_CHUNK = 0  # `warps`: by the size of a chunk
BY_REGISTERS = 0  # `per_core`: as many programs as a core has registers for


class Trait(Flag):
    """What a row of a table asks of a shape, beside its columns."""

    GATED = auto()
    QUANTISED = auto()
    ALONE = auto()  # there is no residual
    ONE_CHUNK = auto()  # several chunks would pad the row as much as one block does
    IN_CHUNKS = auto()  # asks nothing: the row's columns are counted padded to chunks, and not to a power of two
    CHUNKS = auto()  # several chunks pad it less
    UNSHAREABLE = auto()  # programs cannot hold a row together


GATED, QUANTISED, ALONE, ONE_CHUNK, IN_CHUNKS, CHUNKS, UNSHAREABLE = Trait
ANY = Trait(0)


class Rule(NamedTuple):
    """A row of a table. It matches a shape that has all of its traits and no more than `columns`.

    Attributes:
        columns: the most columns of a row, padded.
        kernel: "rows": a program holds whole rows in registers. "wide": a program reads a row twice (three times where y is
            quantised). "shared": several programs hold a row together.
        size: elements of a tile of "rows", which has as many rows as they make, or ONE_ROW; columns of a block of "wide" and
            "shared", below 1 that part of the padded row.
        warps: of a program, or BY_CHUNK.
        per_core: programs resident on a core at once, or BY_REGISTERS.
        capped: the compiler may use only as many registers as leave room for `per_core` programs.
        why: the reason, which explanations print.
        decided_at: file and line of the row.
    """

    traits: Trait
    columns: int
    kernel: str
    size: float
    warps: int
    per_core: int
    capped: bool
    why: str
    decided_at: str


def _row(*columns: Any) -> Rule:
    return Rule._make((*columns, here(2)))


END = 2**31  # `columns` of rows of any width
_SEVERAL = "rows fit registers: several a program"
_ONCE = "a row fits registers: the gate is read while the row is summed"
_THRICE = "other kernels would read it three times"
_TOGETHER = "programs hold a row together"
_CHUNKS = "a row fits registers, in chunks"
_CACHED = "the second read finds the row in a cache, and fewer registers leave room for more rows"
_ALONE = "one program a core: rows of two evict each other before the second read"
# Quantised rows wait for two sums, one after the other: the fewer warps a program has, the shorter it waits, and the more
# programs are resident. Backwards of several rows keep sums of dw in registers: small programs of few warps hide more of the
# wait for memory. Microseconds on an H200, cold cache, bf16, of the row's tile and warps beside another choice (2026-11-30):
#   quantised    65536 x 1024   57.5, tile 4096 with 4 warps 61.3     16384 x 2048   32.4, 4 warps 37.0
#                8192 x 4096    33.2, 8 warps 37.4                    8192 x 8192    61.4, 16 warps 71.5
#                4096 x 16384   68.6, "wide" 86.2                     8192 x 5120    38.5, 8 warps 42.9
#                4096 x 12288   56.5, 8 warps 62.3                    16384 x 2560   37.9, 4 warps 39.5
#     of a sum   4096 x 16384   120 "wide", rows held 131             4096 x 12288   94.5 "wide", rows held 104
#   backward     65536 x 512    62.4, tile 2048 64.2, 4096 68.4       131072 x 256   65.0, tile 1024 63.1, 4096 67.8
#                262144 x 128   62.2, tile 1024 61.6, 4096 63.2       32768 x 1024   61.9, tile 1024 62.8, 4096 73.1
#   gated        65536 x 512    98.5, tile 2048 with 8 warps 104      131072 x 128   53.8, tile 1024 54.9
#                32768 x 1024   96.3, tile 2048 with 8 warps 101; with a bias 104, 114
# fmt: off
FORWARD_RULES = (
    #    traits                         columns kernel   size     warps     per core      capped
    _row(GATED,                         1024,  "rows",   1024,    4,        ALL_TILES,    False, _SEVERAL),
    _row(GATED | ONE_CHUNK,             4096,  "rows",   4096,    4,        ALL_TILES,    False, _ONCE),
    _row(QUANTISED,                     1024,  "rows",   2048,    2,        ALL_TILES,    False, _SEVERAL),
    _row(ANY,                           256,   "rows",   2048,    4,        ALL_TILES,    False, _SEVERAL),
    _row(ANY,                           1024,  "rows",   4096,    4,        ALL_TILES,    False, _SEVERAL),
    _row(QUANTISED | ONE_CHUNK,         2048,  "rows",   ONE_ROW, 2,        ALL_TILES,    False, _THRICE),
    _row(QUANTISED | ONE_CHUNK,         4096,  "rows",   ONE_ROW, 4,        ALL_TILES,    False, _THRICE),
    _row(QUANTISED | ONE_CHUNK,         8192,  "rows",   ONE_ROW, 8,        ALL_TILES,    False, _THRICE),
    _row(QUANTISED | CHUNKS,            8192,  "rows",   ONE_ROW, BY_CHUNK, ALL_TILES,    False, _THRICE),
    _row(QUANTISED | ALONE | ONE_CHUNK, 16384, "rows",   ONE_ROW, 16,       ALL_TILES,    False, _THRICE),
    _row(QUANTISED | ALONE | CHUNKS,    16384, "rows",   ONE_ROW, BY_CHUNK, ALL_TILES,    False, _THRICE),
    _row(IN_CHUNKS | CHUNKS,            6144,  "rows",   ONE_ROW, BY_CHUNK, ALL_TILES,    False, "chunks pad it least"),
    _row(ANY,                           2048,  "wide",   1 / 2,   4,        ALL_TILES,    False, _CACHED),
    _row(ANY,                           8192,  "wide",   1 / 2,   8,        ALL_TILES,    False, _CACHED),
    _row(ANY,                           16384, "wide",   4096,    16,       ALL_TILES,    False, _CACHED),
    _row(ANY,                           END,   "wide",   1 / 4,   32,       1,            True,  _ALONE),
)
BACKWARD_RULES = (
    #    traits                         columns kernel   size     warps     per core      capped
    _row(GATED,                         32,    "rows",   2048,    8,        3,            False, _SEVERAL),
    _row(ANY,                           32,    "rows",   4096,    8,        3,            False, _SEVERAL),
    _row(GATED,                         256,   "rows",   2048,    8,        3,            True,  _SEVERAL),
    _row(GATED,                         1024,  "rows",   1024,    4,        6,            True,  _SEVERAL),
    _row(ANY,                           256,   "rows",   2048,    4,        5,            True,  _SEVERAL),
    _row(ANY,                           512,   "rows",   1024,    2,        10,           True,  _SEVERAL),
    _row(ANY,                           1024,  "rows",   2048,    4,        5,            True,  _SEVERAL),
    _row(GATED | ONE_CHUNK,             2048,  "rows",   2048,    4,        5,            True,  "a row fits registers"),
    _row(GATED | ONE_CHUNK,             4096,  "rows",   2048,    8,        2,            True,  "a row fits registers"),
    _row(ONE_CHUNK,                     4096,  "rows",   4096,    8,        3,            True,  "a row fits registers"),
    _row(IN_CHUNKS,                     4096,  "rows",   ONE_ROW, 4,        BY_REGISTERS, True,  _CHUNKS),
    _row(IN_CHUNKS,                     8192,  "rows",   ONE_ROW, 8,        BY_REGISTERS, True,  _CHUNKS),
    _row(ANY,                           16384, "rows",   ONE_ROW, 16,       BY_REGISTERS, True,  _CHUNKS),
    _row(UNSHAREABLE,                   END,   "wide",   2048,    8,        4,            False, "no program holds a row"),
    _row(ANY,                           END,   "shared", SHARE_COLUMNS, 2,  8,            True,  _TOGETHER),
)
# For `qk_backward_kernel`, which `choose` never takes: see qk.py.
QK_BACKWARD_RULE = _row(ANY, 1024, "rows", 2048, 4, 5, True, "q, k and v share a launch")
# fmt: on

MIN_CHUNK = 256  # columns of a chunk: the loop over chunks is unrolled, so more chunks are more code
SMALL_CHUNK = 512  # columns
CHUNK_WARPS = (4, 8)  # of a forward: its warps for small chunks, and for larger ones
WARP_COLUMNS = 256  # of a quantised row's chunk, a warp: each thread loads 8 elements, 16 bytes of bf16
WIDE_BLOCKS = (4096, 16384)  # the most columns of a block of "wide", and of one whose program has a core to itself
CORE_ALONE = 32  # warps of such a program
BACKWARD_CHUNKS = 4  # of a backward's row that chunks pad as much as one block: one block would take more registers
SHARES_A_CORE = 4  # half of the programs that "shared" keeps on a core: at least two groups are resident
# Registers of a thread in a backward's row in chunks, as ptxas counts them, by the elements of the row that it holds (up to
# and including); with a gate or a bias; and the columns above which a bias doubles the warps.
CHUNK_REGISTERS = ((20, 80), (24, 96), (END, 128))
MORE_REGISTERS = ((12, 96), (END, 128))
WIDE_BIAS, MAX_CHUNK_WARPS = 2560, 16
MAX_HEADS = 1024  # whose rows may share tiles in a forward
MAX_SHARE = 128  # programs that may hold a row together


@dataclass(frozen=True, kw_only=True)
class CudaTiling(RowTiling):
    """How one direction runs on CUDA. Where a row is in chunks, `columns` are those of a chunk.

    Attributes:
        rule: the row of FORWARD_RULES or BACKWARD_RULES.
        warps: of a program.
        per_core: programs resident on a core at once.
        order: how the kernel numbers rows: ORDER of this module or, for "wide" and "shared", of wide.py.
    """

    rule: Rule
    warps: int
    per_core: int
    order: str

    @property
    def way(self) -> str:
        chunks = f" in {self.column_blocks} chunks" if self.kernel == "rows" and self.column_blocks > 1 else ""
        return self.kernel + chunks

    @property
    def share(self) -> int:
        """Programs that hold a row together; 0: each program holds its own."""
        return self.column_blocks if self.kernel == "shared" else 0

    @property
    def heads(self) -> int:
        """Heads with parameters of their own, of which a program sees one; 1 where a tile may have rows of several heads."""
        return self.shape.n_outer if self.order == "heads" else 1

    @property
    def row_tiles(self) -> int:
        if self.order == "heads":
            return self.shape.n_outer * ceil(self.shape.n_inner / self.rows)
        return ceil(self.shape.n_outer * self.shape.n_inner / self.rows)

    @property
    def _resident(self) -> int:
        return self.device.vector_cores * self.per_core

    @functools.cached_property
    def grid(self) -> int:
        """Programs of every kernel that takes rows."""
        if self.share:
            return self.splits * self.share
        if self.heads == 1:
            return persistent_grid(self.row_tiles, self.device, per_core=self.per_core)
        limit = min(max(1, self.device.max_grid // self.heads), self._resident // self.heads)
        return self.heads * max(1, min(self.row_tiles // self.heads, limit))

    @functools.cached_property
    def splits(self) -> int:
        """Rows of partial sums of dw, of all heads: one a program, of "shared" one a group, of "wide" one a set of rows."""
        if self.share:
            return min(self.row_tiles, self._resident // self.share)
        if self.kernel == "rows":
            return self.grid
        return self.heads * max(1, min(self.row_tiles // self.heads, self._resident // self.column_blocks // self.heads))

    @functools.cached_property
    def column_grid(self) -> int:
        """Programs of `backward_wide_kernel`, which take blocks of columns."""
        return persistent_grid(self.column_blocks * self.splits, self.device, per_core=self.per_core)

    @property
    def stores_sums(self) -> bool:
        """Whether the kernel stores the gradients of parameters in place of partial sums: each has one partial sum."""
        return self.splits == self.heads

    @property
    def constants(self) -> dict[str, object]:
        """`tl.constexpr` parameters."""
        sizes: dict[str, object] = {"N": self.shape.width, "BLOCK_N": self.columns, "ORDER": self.order}
        if self.kernel == "shared":
            sizes["PARTS"] = power_of_two(self.share)
        elif self.kernel == "rows":
            sizes["M"] = self.rows
        return {**sizes, **self.shape.formula_constants}

    @property
    def options(self) -> dict[str, int]:
        """Compiler options."""
        options = row_options(self.columns, self.warps)
        if self.shape.biased and self.shape.rounding.factors != "fp32":
            # Else the compiler would fuse a product and the addition of a bias, and not round in between.
            options["enable_fp_fusion"] = False
        if self.rule.capped:
            options["maxnreg"] = register_cap(self.warps, self.per_core)
        return options


def choose(shape: Shape, device: Device) -> CudaTiling:
    """The tiling of the first row that a shape matches. The last row of each table matches every shape."""
    padded = power_of_two(shape.width)
    chunk, chunks = equal_chunks(shape.width, least=MIN_CHUNK)
    share = ceil(shape.width / SHARE_COLUMNS)
    is_shareable = shape.with_rows and not (shape.gated or shape.biased or shape.per_head)
    is_shareable = is_shareable and share <= min(MAX_SHARE, SHARES_A_CORE * device.vector_cores)
    order = _order(shape)
    traits = IN_CHUNKS | (ONE_CHUNK if chunks == 1 else CHUNKS)
    traits |= (GATED if shape.gated else ANY) | (QUANTISED if shape.quantised else ANY)
    traits |= (ANY if shape.residual_itemsize else ALONE) | (ANY if is_shareable else UNSHAREABLE)
    for rule in BACKWARD_RULES if shape.backward else FORWARD_RULES:
        columns = chunk * chunks if IN_CHUNKS in rule.traits else padded
        if columns <= rule.columns and rule.traits in traits:
            break
    make = functools.partial(CudaTiling, shape=shape, device=device, rule=rule)
    warps, per_core = rule.warps, rule.per_core
    if rule.kernel != "rows":
        share_of_row = min(int(rule.size * padded), WIDE_BLOCKS[warps >= CORE_ALONE])
        columns = share_of_row if rule.size < 1 else int(rule.size)
        return make(columns=columns, warps=warps, per_core=per_core, order=shape.order)
    if rule.size != ONE_ROW:
        wanted = max(1, int(rule.size) // padded)
        wanted = min(shape.max_rows, wanted) if order in ("one", "heads") else wanted
        rows = 1 << (max(1, wanted).bit_length() - 1)  # a power of two
        return make(rows=rows, columns=padded, warps=warps, per_core=per_core, order=order)
    if shape.backward:
        if chunks == 1:
            chunk, chunks = padded // BACKWARD_CHUNKS, BACKWARD_CHUNKS
        warps, per_core = _programs_by_registers(shape, warps, chunk * chunks)
    elif warps == BY_CHUNK:
        warps = chunk // WARP_COLUMNS if shape.quantised else CHUNK_WARPS[chunk > SMALL_CHUNK]
    return make(columns=chunk, warps=warps, per_core=per_core, order=shape.order)


def _order(shape: Shape) -> str:
    """How kernels number rows where a tile may have several: ORDER of this module."""
    if not shape.per_head:
        return shape.order
    in_tokens = not shape.backward and shape.n_outer <= MAX_HEADS and shape.n_outer * shape.n_inner <= MAX_COUNTED_ROWS
    return "tokens" if in_tokens else "heads"


def _programs_by_registers(shape: Shape, warps: int, padded: int) -> tuple[int, int]:
    """Warps of a backward's program that holds a row in chunks, and how many such programs a core has registers for."""
    table = MORE_REGISTERS if shape.gated or shape.biased else CHUNK_REGISTERS
    if shape.gated or (shape.biased and padded > WIDE_BIAS):
        warps = min(2 * warps, MAX_CHUNK_WARPS)
    registers = next(registers for most, registers in table if padded // (warps * WARP) <= most)
    return warps, CORE_REGISTERS // (registers * warps * WARP)
