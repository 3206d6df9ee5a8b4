"""Forward and backward on CUDA, for rows that a program, or several programs together, hold in registers.

Formulas: formula.py. Sizes: tiling.py. A tile has M rows in CHUNKS chunks of BLOCK_N columns, a power of two, as stock
Triton asks: a row of 2560 columns is five chunks of 512, and not one block of 4096 of which a third is padding. Rows lie on
two levels, as in wide.py. Unlike on Ascend, offsets may need a division, so a tile may have rows of several groups.

ORDER says how rows are numbered. Rows with consecutive numbers share a tile:

    "one"      there is one group
    "groups"   group after group
    "tokens"   groups are heads with parameters of their own, token after token
    "heads"    the same, head after head: a program takes tiles of one head
"""

from npu_tiling.device import collect, gradient_of_rows, publish, round_to, tl, triton
from npu_tiling.partials import store_partial

from ..formula import (
    MIN_AMAX,
    activate,
    add_residual,
    inverse_rms,
    load_factor,
    normalise,
    quantise,
    weigh,
)
from ..wide import load_columns, row_at, row_position, store_columns


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
    m_chunk = chunk_mask(m_row, CHUNK, N, M, BLOCK_N)
    if m_chunk is None:
        return tl.load(p_chunk).to(tl.float32)
    else:
        return tl.load(p_chunk, mask=m_chunk, other=0.0).to(tl.float32)


@triton.jit
def store_chunk(p_tile, b_chunk, m_row, CHUNK: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rounds [M, BLOCK_N] to the tensor's dtype (of y, dx and dgate the last rounding), and stores it."""
    p_chunk = p_tile + (CHUNK * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    tl.store(p_chunk, b_chunk.to(p_tile.dtype.element_ty), mask=chunk_mask(m_row, CHUNK, N, M, BLOCK_N))


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
    s_x_outer, s_x_inner, s_residual_outer, s_residual_inner, s_gate_outer, s_gate_inner,
    eps, offset,
    N: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """y of rows held in registers, each read once; and the sum, y in fp32, rstd and scales where they are asked for."""
    # The weight is loaded before the sum over the row, which all that follows waits for. Not where y is quantised: the row
    # waits for its largest element too, and more programs are resident where none of them keeps a weight.
    KEEPS_SCALE: tl.constexpr = p_weight is not None and p_scale is None
    i_first, i_stop, n_step, i_head = tiles_of_program(tl.program_id(0), tl.num_programs(0), n_outer, n_inner, M, ORDER)
    p_weight = parameters_of_head(p_weight, i_head, N, ORDER)
    p_bias = parameters_of_head(p_bias, i_head, N, ORDER)
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, o_row, m_row = tile_position(i_tile, i_head, n_outer, n_inner, M, ORDER)
        p_x_tile = rows_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, M, ORDER)
        p_residual_tile = rows_at(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, M, ORDER)
        p_gate_tile = rows_at(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, M, ORDER)
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
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_gate_outer, s_gate_inner,
    s_dx_outer, s_dx_inner, offset,
    N: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr
):  # fmt: skip
    """`backward_kernel` for program i_program of n_programs. It stores its partial sums in row tl.program_id(0)."""
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
        p_dsum_tile = rows_at(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner, M, ORDER)
        p_x_tile = rows_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, M, ORDER)
        p_gate_tile = rows_at(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, M, ORDER)
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
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_gate_outer, s_gate_inner,
    s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradients of rows held in registers, and a partial sum of each parameter's gradient."""
    backward_of_tiles(
        tl.program_id(0), tl.num_programs(0), p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd, p_dx, p_dgate, p_dw, p_db,
        n_outer, n_inner, s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_gate_outer,
        s_gate_inner, s_dx_outer, s_dx_inner, offset, N, CHUNKS, M, BLOCK_N, ORDER, NORMALISED, FACTORS, WEIGHTED,
        ACTIVATION, GATE_FIRST
    )  # fmt: skip


# Rows that are too wide for one program: a group of SHARE programs holds each row. A program keeps its columns of x, dy and
# dw in registers. The programs of a group exchange their parts of mean(g n) through memory. A program finishes a row after
# it has read the next one, so it seldom has to wait for the parts. npu_tiling/device.py says why no program waits
# for one that cannot start. The call has neither a gate nor a bias nor parameters for each head.


@triton.jit
def finish_row(
    p_dx, p_dsum, p_words, b_n, b_g, rstd, i_row, n_inner, s_dx_outer, s_dx_inner, s_dsum_outer, s_dsum_inner, i_col,
    N: tl.constexpr, SHARE: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr
):  # fmt: skip
    """Stores dx of a row, once all programs of the group have published their parts of mean(g n)."""
    i_outer, i_inner, _ = row_position(i_row, 0, n_inner, ORDER)
    o_slot = tl.arange(0, SLOTS)
    b_part = collect(p_words + tl.cast(i_row, tl.int64) * SHARE + tl.minimum(o_slot, SHARE - 1), 1)  # [SLOTS]
    mean = tl.sum(tl.where(o_slot < SHARE, b_part, 0.0), axis=0) * (1.0 / N)
    b_dx = gradient_of_rows(b_g, b_n, tl.full([1], rstd, tl.float32), tl.full([1], mean, tl.float32))
    if p_dsum is not None:
        b_dx += load_columns(row_at(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
    store_columns(row_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner), b_dx, i_col, N, BLOCK_N)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_shared_kernel(
    p_dy, p_dsum, p_x, p_weight, p_rstd,  # read; no p_dsum or p_weight: None
    p_dx,
    p_dw,  # fp32 [programs / SHARE, N], partial sums; where one group runs, the gradient; None: not needed
    p_words,  # int64 [rows * SHARE], zeros: the parts of mean(g n) of each row
    n_outer, n_inner,
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, SHARE: tl.constexpr, SLOTS: tl.constexpr,  # SLOTS: a power of two, >= SHARE
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ORDER: tl.constexpr,  # SHARE * BLOCK_N >= N
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """dx of rows that SHARE programs hold together, and partial sums of dw."""
    n_rows = n_inner
    if ORDER == "groups":
        n_rows = n_outer * n_inner
    i_group = tl.program_id(0) // SHARE
    i_part = tl.program_id(0) - i_group * SHARE
    n_groups = tl.num_programs(0) // SHARE
    i_col = i_part * BLOCK_N
    o_col = i_col + tl.arange(0, BLOCK_N)
    b_dw = tl.zeros([1, BLOCK_N], tl.float32)
    # n, g and rstd of the previous row: its dx waits for the parts of the other programs.
    b_last_n, b_last_g = tl.zeros([1, BLOCK_N], tl.float32), tl.zeros([1, BLOCK_N], tl.float32)
    last_rstd = 0.0
    for i_row in tl.range(i_group, n_rows, n_groups, num_stages=STAGES):
        i_outer, i_inner, _ = row_position(i_row, 0, n_inner, ORDER)
        b_x = load_columns(row_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
        b_g = load_columns(row_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
        rstd = tl.load(p_rstd + i_row)  # a scalar: the compiler loads a block twice, the second time late
        b_n = normalise(b_x, tl.full([1], rstd, tl.float32), NORMALISED, FACTORS)
        if p_dw is not None:
            b_dw += b_g * b_n
        if p_weight is not None:
            b_g *= load_factor(p_weight, o_col, offset, N, N % BLOCK_N == 0, FACTORS)
        part = tl.sum(tl.sum(b_g * b_n, axis=1), axis=0)
        publish(p_words + tl.cast(i_row, tl.int64) * SHARE + i_part, part, 1)
        if i_row >= n_groups:
            finish_row(
                p_dx, p_dsum, p_words, b_last_n, b_last_g, last_rstd, i_row - n_groups, n_inner, s_dx_outer, s_dx_inner,
                s_dsum_outer, s_dsum_inner, i_col, N, SHARE, SLOTS, BLOCK_N, ORDER
            )  # fmt: skip
        b_last_n, b_last_g, last_rstd = b_n, b_g, rstd
    i_last = i_group + (n_rows - 1 - i_group) // n_groups * n_groups  # tiling makes no more groups than rows
    finish_row(
        p_dx, p_dsum, p_words, b_last_n, b_last_g, last_rstd, i_last, n_inner, s_dx_outer, s_dx_inner, s_dsum_outer,
        s_dsum_inner, i_col, N, SHARE, SLOTS, BLOCK_N, ORDER
    )  # fmt: skip
    if p_dw is not None:
        store_partial(p_dw, b_dw, i_group, o_col, N, N % BLOCK_N == 0)


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
    N: tl.constexpr, CHUNKS: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
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
            tl.where(is_q, p_dq, p_dk), None, tl.where(is_q, p_q, p_k), None, p_weight, None,
            tl.where(is_q, p_q_rstd, p_k_rstd), tl.where(is_q, p_dx_q, p_dx_k), None, p_dw, None,
            n_outer, tl.where(is_q, n_q_inner, n_k_inner),
            tl.where(is_q, s_dq_outer, s_dk_outer), tl.where(is_q, s_dq_inner, s_dk_inner), 0, 0, s_x_outer, s_x_inner, 0, 0,
            s_dx_outer, s_dx_inner, offset, N, CHUNKS, M, BLOCK_N, ORDER, NORMALISED, FACTORS, "", "", False  # no gate
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
