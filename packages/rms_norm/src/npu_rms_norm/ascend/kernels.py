"""Forward and backward on Ascend, for rows that fit the Unified Buffer whole. Formulas: formula.py. Sizes: tiling.py.

Rows lie on two levels, n_outer groups of n_inner rows, and every tensor has a stride for each level: a slice of a wider
tensor is read in place. A tile has G groups, M rows of each and BLOCK_N columns; where G > 1, M is n_inner. Offsets are sums
of ranges times strides, without a division: so the compiler moves a tile in one transfer.

SPLIT says which tiles a program takes:

    "rows"    there is one group: each program takes a contiguous share of its rows
    "tiles"   program i of n takes tiles i, i + n, i + 2 n and so on
    "heads"   a group is a head with parameters of its own: the same with the tiles and the programs of one head
"""

from npu_tiling.device import gradient_of_rows, round_to, tl, triton
from npu_tiling.partials import store_partial

from ..formula import (
    activate,
    add_residual,
    amax_of_rows,
    inverse_rms,
    load_factor,
    normalise,
    quantise,
    weigh,
)
from ..wide import result_strides


@triton.jit
def share_of_rows(n_rows):
    """The first row of this program's contiguous share, and the row it stops before. The last shares may be shorter."""
    n_share = tl.cdiv(n_rows, tl.num_programs(0))
    i_first = tl.minimum(tl.program_id(0) * n_share, n_rows)
    return i_first, tl.minimum(i_first + n_share, n_rows)


@triton.jit
def tiles_of_program(n_outer, n_inner, G: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr):
    """This program's first tile, the tile it stops before, and the step between its tiles.

    With "rows" the tiles of each share are numbered from 0, with "heads" those of each head.
    """
    if SPLIT == "rows":
        i_first, i_stop = share_of_rows(n_inner)
        return 0, tl.cdiv(i_stop - i_first, M), 1
    elif SPLIT == "heads":
        return tl.program_id(0) // n_outer, tl.cdiv(n_inner, M), tl.num_programs(0) // n_outer
    else:
        return tl.program_id(0), tl.cdiv(n_outer, G) * tl.cdiv(n_inner, M), tl.num_programs(0)


@triton.jit
def tile_position(i_tile, n_outer, n_inner, G: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr):
    """A tile's first group and its first row in that group; the number of groups, and of rows in a group, from there on."""
    if SPLIT == "rows":
        i_first, i_stop = share_of_rows(n_inner)
        # Tiles count back from the end of the share: the short tile comes first, while the pipeline fills.
        i_tile_stop = i_stop - (tl.cdiv(i_stop - i_first, M) - 1 - i_tile) * M
        i_inner = tl.maximum(i_tile_stop - M, i_first)
        return 0, i_inner, 1, i_tile_stop - i_inner
    elif SPLIT == "heads":
        return tl.program_id(0) % n_outer, i_tile * M, 1, n_inner - i_tile * M
    else:
        n_tiles = tl.cdiv(n_inner, M)  # of one group
        i_group = i_tile // n_tiles
        i_outer, i_inner = i_group * G, (i_tile - i_group * n_tiles) * M
        return i_outer, i_inner, n_outer - i_outer, n_inner - i_inner


@triton.jit
def parameters_of_program(p_parameters, n_outer, N: tl.constexpr, SPLIT: tl.constexpr):
    """The [N] parameters of this program's head, or of all rows; None for None."""
    if p_parameters is not None:
        if SPLIT == "heads":
            return p_parameters + tl.program_id(0) % n_outer * N
        else:
            return p_parameters


@triton.jit
def row_mask(n_groups, n_rows, G: tl.constexpr, M: tl.constexpr):
    """Which of a tile's G * M rows are inside the tensor."""
    if G > 1:
        return tl.arange(0, G * M) < tl.minimum(n_groups, G) * n_rows
    else:
        return tl.arange(0, M) < n_rows


@triton.jit
def tile_mask(n_groups, n_rows, N: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of a tile are inside the tensor; None: all. A masked load would have to fill the tile first."""
    if G > 1:
        m_tile = (tl.arange(0, G) < n_groups)[:, None, None]
        if BLOCK_N != N:
            m_tile = m_tile & (tl.arange(0, BLOCK_N) < N)[None, None, :]
        return m_tile
    elif M > 1:
        m_tile = (tl.arange(0, M) < n_rows)[:, None]
        if BLOCK_N != N:
            m_tile = m_tile & (tl.arange(0, BLOCK_N) < N)[None, :]
        return m_tile
    elif BLOCK_N != N:
        return (tl.arange(0, BLOCK_N) < N)[None, :]


@triton.jit
def tile_pointers(p_rows, s_outer, s_inner, i_outer, i_inner, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Pointers [M, N] or, with several groups, [G, M, N]. tiling.py keeps offsets inside a tile below 2^31."""
    p_first = p_rows + tl.cast(i_outer, tl.int64) * s_outer + tl.cast(i_inner, tl.int64) * s_inner
    o_row, o_col = tl.arange(0, M), tl.arange(0, N)
    if G > 1:
        s_group, s_row = tl.cast(s_outer, tl.int32), tl.cast(s_inner, tl.int32)
        return p_first + (tl.arange(0, G)[:, None, None] * s_group + o_row[None, :, None] * s_row + o_col[None, None, :])
    elif M > 1:
        return p_first + (o_row[:, None] * tl.cast(s_inner, tl.int32) + o_col[None, :])
    else:
        return p_first + o_col[None, :]


@triton.jit
def load_rows(
    p_rows, s_outer, s_inner, i_outer, i_inner, m_tile, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """A tile in fp32, [G * M, N], zero outside the tensor."""
    p_tile = tile_pointers(p_rows, s_outer, s_inner, i_outer, i_inner, G, M, N)
    if m_tile is None:
        b_tile = tl.load(p_tile).to(tl.float32)
    else:
        b_tile = tl.load(p_tile, mask=m_tile, other=0.0).to(tl.float32)
    if G > 1:
        b_tile = tl.reshape(b_tile, (G * M, N))
    return b_tile


@triton.jit
def store_rows(
    p_rows, b_tile, s_outer, s_inner, i_outer, i_inner, m_tile, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Rounds a tile [G * M, N] to the tensor's dtype (of y, dx and dgate the last rounding), and stores it."""
    p_tile = tile_pointers(p_rows, s_outer, s_inner, i_outer, i_inner, G, M, N)
    b_tile = b_tile.to(p_rows.dtype.element_ty)
    if G > 1:
        b_tile = tl.reshape(b_tile, (G, M, N))
    if m_tile is None:
        tl.store(p_tile, b_tile)
    else:
        tl.store(p_tile, b_tile, mask=m_tile)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_kernel(
    # Read; None: the call has no such input.
    p_x, p_residual, p_gate, p_weight, p_bias,
    # Written; None: not asked for. p_scale: the scales of a quantised y, fp32 [rows], in the order of rstd.
    p_y, p_sum, p_fp32, p_rstd, p_scale,
    n_outer, n_inner,
    s_x_outer, s_x_inner, s_residual_outer, s_residual_inner, s_gate_outer, s_gate_inner,
    eps, offset,
    N: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """y of tiles of whole rows, each read once; and the sum, y in fp32, rstd and scales where they are asked for."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    o_col = tl.arange(0, BLOCK_N)
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, SPLIT == "heads")
    b_scale = load_factor(parameters_of_program(p_weight, n_outer, N, SPLIT), o_col, offset, N, BLOCK_N == N, FACTORS)
    b_bias = load_factor(parameters_of_program(p_bias, n_outer, N, SPLIT), o_col, None, N, BLOCK_N == N, FACTORS)
    i_first, i_stop, n_step = tiles_of_program(n_outer, n_inner, G, M, SPLIT)
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, n_groups, n_rows = tile_position(i_tile, n_outer, n_inner, G, M, SPLIT)
        i_row = tl.cast(i_outer, tl.int64) * n_inner + i_inner
        o_row, m_row = tl.arange(0, G * M), row_mask(n_groups, n_rows, G, M)
        m_tile = tile_mask(n_groups, n_rows, N, G, M, BLOCK_N)

        b_x = load_rows(p_x, s_x_outer, s_x_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        if p_residual is not None:
            b_residual = load_rows(p_residual, s_residual_outer, s_residual_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            b_sum, b_x = add_residual(b_x, b_residual, p_sum)
            store_rows(p_sum, b_sum, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        if p_gate is not None:
            b_gate = load_rows(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            b_act, _ = activate(b_gate, ACTIVATION)
            if GATE_FIRST:
                b_x *= b_act

        b_rstd = inverse_rms(b_x * b_x, eps, N)  # [G * M]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_row, b_rstd, mask=m_row)
        b_y = weigh(normalise(b_x, b_rstd, NORMALISED, FACTORS), b_scale, b_bias, WEIGHTED)
        if p_gate is not None:
            if not GATE_FIRST:
                b_y = round_to(b_y, WEIGHTED) * b_act

        if p_fp32 is not None:
            store_rows(p_fp32, b_y, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        if p_scale is not None:
            b_amax = amax_of_rows(tl.abs(b_y), b_y * 0.0)
            b_y, b_steps = quantise(b_y, b_amax, p_y.dtype.element_ty == tl.int8)
            tl.store(p_scale + i_row + o_row, b_steps, mask=m_row)
        store_rows(p_y, b_y, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_kernel(
    # Read; None: the call has no such input. p_dsum: the gradient of the forward's sum.
    p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd,
    # Written; None: not needed. p_dw and p_db: fp32 [programs, N], a partial sum of each program.
    p_dx, p_dgate, p_dw, p_db,
    n_outer, n_inner,
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_gate_outer, s_gate_inner,
    s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradients of tiles of whole rows, and a partial sum of each parameter's gradient."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    o_col = tl.arange(0, BLOCK_N)
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, SPLIT == "heads")
    b_scale = load_factor(parameters_of_program(p_weight, n_outer, N, SPLIT), o_col, offset, N, BLOCK_N == N, FACTORS)
    if p_dgate is not None:  # nothing else needs the bias
        b_bias = load_factor(parameters_of_program(p_bias, n_outer, N, SPLIT), o_col, None, N, BLOCK_N == N, FACTORS)
    # The sums over this program's rows stay on chip until its last tile.
    if p_dw is not None:
        b_dw = tl.zeros([G * M, BLOCK_N], tl.float32)
    if p_db is not None:
        b_db = tl.zeros([G * M, BLOCK_N], tl.float32)
    i_first, i_stop, n_step = tiles_of_program(n_outer, n_inner, G, M, SPLIT)
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, n_groups, n_rows = tile_position(i_tile, n_outer, n_inner, G, M, SPLIT)
        i_row = tl.cast(i_outer, tl.int64) * n_inner + i_inner
        m_tile = tile_mask(n_groups, n_rows, N, G, M, BLOCK_N)

        b_x = load_rows(p_x, s_x_outer, s_x_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        b_dy = load_rows(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        b_rstd = tl.load(p_rstd + i_row + tl.arange(0, G * M), mask=row_mask(n_groups, n_rows, G, M), other=0.0)
        b_u = b_x
        if p_gate is not None:
            b_gate = load_rows(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            b_act, b_slope = activate(b_gate, ACTIVATION)
            if GATE_FIRST:
                b_u = b_x * b_act
        b_n = normalise(b_u, b_rstd, NORMALISED, FACTORS)
        if p_gate is not None:
            if not GATE_FIRST:
                if p_dgate is not None:
                    b_z = weigh(b_n, b_scale, b_bias, WEIGHTED)
                    b_dgate = b_dy * round_to(b_z, WEIGHTED) * b_slope
                    store_rows(p_dgate, b_dgate, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
                b_dy *= b_act

        if p_dw is not None:
            b_dw += b_dy * b_n
        if p_db is not None:
            b_db += b_dy
        if p_dx is not None:
            b_g = b_dy
            if p_weight is not None:
                b_g = b_dy * b_scale
            b_mean = tl.sum(b_g * b_n, axis=1) * (1.0 / N)  # [G * M]
            b_dx = gradient_of_rows(b_g, b_n, b_rstd, b_mean)
            if GATE_FIRST:
                if p_dgate is not None:
                    b_dgate = b_dx * b_x * b_slope
                    store_rows(p_dgate, b_dgate, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
                b_dx *= b_act
            if p_dsum is not None:
                b_dx += load_rows(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            store_rows(p_dx, b_dx, s_dx_outer, s_dx_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
    if p_dw is not None:
        store_partial(p_dw, b_dw, tl.program_id(0), o_col, N, BLOCK_N == N)
    if p_db is not None:
        store_partial(p_db, b_db, tl.program_id(0), o_col, N, BLOCK_N == N)
