"""Ascend: forward and backward of rows that fit the Unified Buffer whole, and which kernel, tile and grid a call takes.

The first row of RULES that fits the Unified Buffer decides; it may name a kernel of wide.py. Formulas: formula.py.

Rows lie on two levels, n_outer groups of n_inner rows, and every tensor has a stride for each level: a slice of a wider
tensor is read in place. A tile has G groups, M rows of each and BLOCK_N columns; where G > 1, M is n_inner. Offsets are sums
of ranges times strides, without a division: so the compiler moves a tile in one transfer.

SPLIT says which tiles a program takes:

    "rows"    there is one group: each program takes a contiguous share of its rows
    "tiles"   program i of n takes tiles i, i + n, i + 2 n and so on
    "heads"   a group is a head with parameters of its own: the same with the tiles and the programs of one head
"""

import dataclasses
import functools
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any, NamedTuple

from npu_tiling import Block, Candidate, Device, Tile, first_fit, footprint, passed_over, persistent_grid
from npu_tiling.budget import FP32, equal_blocks, here, round_up
from npu_tiling.device import gradient_of_rows, load_block, round_to, store_block, tl, triton
from npu_tiling.partials import store_partial

from .call import RowTiling, Shape
from .formula import activate, add_residual, amax_of_rows, inverse_rms, load_factor, normalise, quantise, weigh
from .wide import result_strides


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
    """Which elements of a tile are inside the tensor; None: all."""
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
    """Pointers [M, N] or, with several groups, [G, M, N]. `Shape.max_rows` keeps offsets inside a tile below 2^31."""
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
    b_tile = load_block(p_tile, m_tile).to(tl.float32)
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
    store_block(p_tile, b_tile, m_tile)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_kernel(
    # Read; None: the call has no such input.
    p_x, p_residual, p_gate, p_weight, p_bias,
    # Written; None: not asked for. p_scale: the scales of a quantised y, fp32 [rows], in the order of rstd.
    p_y, p_sum, p_fp32, p_rstd, p_scale,
    n_outer, n_inner,
    s_x_outer, s_x_inner, s_extra_outer, s_extra_inner,  # extra: the residual or the gate; no call has both
    eps, offset,
    N: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """y of tiles of whole rows, each read once; and the sum, y in fp32, rstd and scales where they are asked for."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    # lint: allow grid: programs of several heads fill whole rounds of all cores
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
            b_residual = load_rows(p_residual, s_extra_outer, s_extra_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            b_sum, b_x = add_residual(b_x, b_residual, p_sum)
            store_rows(p_sum, b_sum, s_y_outer, s_y_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
        if p_gate is not None:
            b_gate = load_rows(p_gate, s_extra_outer, s_extra_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
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
    s_dy_outer, s_dy_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner,
    s_extra_outer, s_extra_inner, offset,  # extra: dsum or the gate; no call has both
    N: tl.constexpr, G: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradients of tiles of whole rows, and a partial sum of each parameter's gradient."""
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    # lint: allow grid: programs of several heads fill whole rounds of all cores
    # lint: allow short-transfer: a partial sum of a head is as wide as the head
    # lint: allow scalar-reduction: two rows of 4096 and the two that are loaded ahead do not fit
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
            b_gate = load_rows(p_gate, s_extra_outer, s_extra_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
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
                b_dx += load_rows(p_dsum, s_extra_outer, s_extra_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
            store_rows(p_dx, b_dx, s_dx_outer, s_dx_inner, i_outer, i_inner, m_tile, G, M, BLOCK_N)
    if p_dw is not None:
        store_partial(p_dw, b_dw, tl.program_id(0), o_col, N, BLOCK_N == N)
    if p_db is not None:
        store_partial(p_db, b_db, tl.program_id(0), o_col, N, BLOCK_N == N)


HALF = FP32 // 2


class Rule(NamedTuple):
    """A row of RULES.

    Attributes:
        way: its name, and how it holds rows on chip.
        kernel: "rows" holds a tile of whole rows; "wide" reads a row twice (three times where y is quantised), in blocks of
            columns.
        rows: rows of a tile: "several", as many as one transfer moves (ROWS_BYTES), or "one".
        buffers: 2: the next tile is loaded while this one is computed; 1: it is not.
        spare: the part of the Unified Buffer that the declared buffers must leave free.
        kinds: of launches that may take this way (`_kinds`): "forward" and "backward" on a 910B, where fp32 rows are read
            also "forward of fp32" and "backward of fp32"; "forward 950" and "backward 950" on an Ascend950.
        why: the reason, which explanations print.
        decided_at: file and line of the row.
    """

    way: str
    kernel: str
    rows: str
    buffers: int
    spare: float
    kinds: frozenset[str]
    why: str
    decided_at: str


def _row(*columns: Any) -> Rule:
    return Rule._make((*columns, here(2)))


ALL = frozenset({"forward", "backward", "forward 950", "backward 950"})
# Not a forward on an Ascend950: tiles that leave no room take twice the time (predicted, CANN 9.1, bf16, 6144, a bias).
NO_ROOM = ALL - {"forward 950"}
# A 16-bit row is cast as soon as it is loaded, and its buffer is free for the next row. An fp32 row stays in the buffer it
# was loaded to, so a second buffer pays. In a forward on an Ascend950 it pays for every dtype.
FP32_ROWS = frozenset({"forward of fp32", "backward of fp32", "forward 950"})
# Not a backward on an Ascend950, which sums a single row again for every 64 columns that use the sum: "wide" is faster.
ONE_ROW = ALL - {"backward 950"}

# The first row that fits is taken. The numbers beside the rows are microseconds that the time model predicts, for 4096 rows
# on an Ascend910B4 with CANN 9.1: bf16 forwards (f.) and backwards (b.) of these widths, without the launch that adds
# partial sums, and in the last column a gated forward of fp32. -: it does not fit. None of it was measured on a chip.
# For CANN 8.5 and 9.0 the model ranks the ways alike:
#   - A forward with several rows and no room left takes 20 to 36 % less time than one with single rows (bf16, widths from
#     4096 with a bias, 3072 with a residual and int8, 5504 plain).
#   - A bf16 row takes as long with two buffers as with one, or 3 to 11 % longer, on CANN 8.5 up to 34 % longer (forward
#     10240: 395 against 294).
#   - An fp32 row takes up to 12 % longer with one buffer than with two.
# fmt: off
RULES = (
    #                                                                                   f.   f.   b.   b.   f.   b.   f.
    #                                                                                 2048 5760 2048 3584 8192 8192 4096
    #    way                           kernel  rows       buffers  spare  kinds        bf16                           fp32
    _row("several rows",               "rows", "several", 2,       1 / 8, ALL,       #  57    -   80    -    -    -    -
         "a transfer of several rows is fast, and their sums stay in the vector unit"),
    _row("several rows, no room left", "rows", "several", 2,       0,     NO_ROOM,   #  57  169   80  184    -    -    -
         "rows that fill the Unified Buffer are no slower than one"),
    _row("a row, two buffers",         "rows", "one",     2,       0,     FP32_ROWS, # 129  194  141  201  236    -  339
         "one row fits beside the next one, and a second buffer pays"),
    _row("a row, one buffer",          "rows", "one",     1,       0,     ONE_ROW,   # 120  185  128  187  226  386  353
         "a row is read once; in blocks of columns it is read twice"),
    _row("blocks of columns",          "wide", "one",     2,       0,     ALL,       # 131  221  254  345  267  674  339
         "a row does not fit whole, or, in a backward on an Ascend950, takes longer whole than in two passes"),
)
# fmt: on
_BY_WAY = {rule.way: rule for rule in RULES}
ONE_BUFFER, COLUMNS = _BY_WAY["a row, one buffer"], _BY_WAY["blocks of columns"]

# The bytes of a tile or block that one transfer moves. 8 KiB reach 76 % of the bandwidth, 16 KiB 94 %. Larger ones would
# fill the Unified Buffer and leave no room for the compilers, which differ in what they need. A "wide" kernel keeps more
# blocks at once, so its blocks are smaller.
ROWS_BYTES, COLUMNS_BYTES = 12 * 1024, 8 * 1024


def tiles_of_rows(shape: Shape, device: Device, width: int, *, several: bool, buffers: int) -> list[Tile]:
    """The buffers that a "rows" kernel has at once, as the compiler plans them. `several`: a tile has more than one row.

    A test holds the sums against the widest tiles that all compilers place.
    """
    forward, on_950 = not shape.backward, device.arch == "dav-c310"
    rounds, rounds_factors = shape.rounding.normalised != "fp32", shape.rounding.factors != "fp32"
    tile: tuple[str | int, ...] = ("ROWS", width)
    parameters: tuple[str | int, ...] = (1, width)
    # dsum is added last, in a buffer that nothing else needs any more. So is a residual where several rows are a tile: its
    # buffer holds the sum, too.
    read = shape.itemsizes_without_addend if shape.backward or several else shape.itemsizes
    # Arithmetic takes one tile beside the row that was loaded. It takes a second one where a tensor is narrower than fp32,
    # and always on an Ascend950; half of it where another row is fp32 and nothing waits for a second buffer or a rounding.
    fp32_reads = sum(itemsize == FP32 for itemsize in read)
    is_mixed = (
        shape.backward and not (shape.gated or several or on_950 or rounds_factors) and buffers == 1 and fp32_reads > 0
    )
    fp32_halves = 3 if is_mixed and shape.narrow else 4 if shape.narrow or on_950 else 2
    # Half fp32 tiles that a gated backward has at once, as the compilers plan them: for the gate, its activation, the slope,
    # products and dgate. They reuse more with single rows, and without a second buffer.
    gate_halves = 12 if on_950 else 10 if several else 11 if buffers > 1 else 9
    table = (
        # what                        shape        bytes                    copies            where
        *(("row read", tile, itemsize, buffers, True) for itemsize in read),
        ("fp32 arithmetic", tile, HALF, fp32_halves, True),
        ("copy of fp32 that was read", tile, FP32, fp32_reads, on_950 and fp32_reads > 0),
        ("result in another dtype", tile, HALF, 3, on_950 and shape.second_output),
        ("row reduction", tile, HALF, 1, True),
        ("result times 0", tile, FP32, 1, shape.quantised),
        ("residual, sum stored", tile, shape.residual_itemsize, 1, several and shape.residual_itemsize > 0),
        ("rounded product", tile, FP32, 1, several and forward and shape.biased and rounds),
        ("scale", parameters, FP32, 1, True),
        ("bias", parameters, FP32, 1, shape.biased and (forward or shape.gated)),
        ("rstd, mean, rounded rstd", ("ROWS", 1), FP32, 3, True),
        ("sums of dw and db", tile, FP32, 1 + shape.biased, shape.backward),
        ("gate, slope, products", tile, HALF, gate_halves, shape.backward and shape.gated),
        ("sum of dw over rows", tile, HALF, 1, shape.backward and several),
        ("rounded product", tile, HALF, 1, shape.backward and rounds_factors and buffers > 1 and not (several or on_950)),
    )
    return [Tile(what, size, itemsize, copies) for what, size, itemsize, copies, where in table if where]


def tiles_of_columns(shape: Shape) -> list[Tile]:
    """The buffers that a "wide" kernel has at once, for a block of columns of one row."""
    tile: tuple[str | int, ...] = (1, "BLOCK_N")
    number: tuple[str | int, ...] = (1, 1)
    table = (
        # what                   shape   bytes  copies  where
        *(("row read", tile, itemsize, 2, True) for itemsize in shape.itemsizes),
        ("fp32 arithmetic", tile, FP32, 2, True),
        ("row reduction", tile, HALF, 1, True),
        ("result times 0", tile, FP32, 1, shape.quantised),
        ("weight read", tile, FP32, 2, True),
        ("scale", tile, FP32, 1, True),
        ("bias, read and added", tile, FP32, 3, shape.biased),
        ("rstd and mean", number, FP32, 2, True),
        ("sums", tile, FP32, 1 + (shape.biased and shape.backward), True),
        ("gate, slope, products", tile, FP32, 5, shape.gated and shape.backward),
    )
    return [Tile(what, size, itemsize, copies) for what, size, itemsize, copies, where in table if where]


@dataclass(frozen=True, kw_only=True)
class AscendTiling(RowTiling):
    """How one direction runs on Ascend.

    Attributes:
        rule: the row of `RULES`.
        groups: of a tile, `rows` of each; all rows of each where there are several.
    """

    rule: Rule
    groups: int = 1

    @property
    def way(self) -> str:
        return self.rule.way

    @property
    def why(self) -> str:
        better = passed_over(_candidates(self.shape, self.device), self.rule, self.device)
        needed = f"; {better[0].way} would need {better[1]:,} of {self.device.ub_bytes:,} bytes" if better else ""
        return f"{self.rule.why}{needed}"

    @property
    def split(self) -> str:
        """How programs share the rows: SPLIT of this module."""
        if self.shape.per_head:
            return "heads"
        return "rows" if self.shape.n_outer == 1 and self.rows > 1 else "tiles"

    @property
    def heads(self) -> int:
        """Heads with parameters of their own, of which a program sees one; else 1."""
        return self.shape.n_outer if self.shape.per_head else 1

    @property
    def row_tiles(self) -> int:
        return ceil(self.shape.n_outer / self.groups) * ceil(self.shape.n_inner / self.rows)

    @functools.cached_property
    def grid(self) -> int:
        """Programs of every kernel that takes rows."""
        if self.heads == 1:
            rows_are_split = self.kernel == "rows" and self.split == "rows"
            return persistent_grid(self.shape.n_inner if rows_are_split else self.row_tiles, self.device)
        # As many of each head as fill whole rounds: every core then has a program in each of them.
        cores = self.device.vector_cores
        limit = min(max(1, self.device.max_grid // self.heads), cores // gcd(cores, self.heads))
        return self.heads * max(1, min(self.row_tiles // self.heads, limit))

    @functools.cached_property
    def splits(self) -> int:
        """Rows of partial sums of dw, of all heads: one for each program or, of "wide", for each set of rows."""
        if self.kernel == "rows":
            return self.grid
        wanted = self.device.vector_cores // self.column_blocks // self.heads
        return self.heads * max(1, min(self.row_tiles // self.heads, wanted))

    @functools.cached_property
    def column_grid(self) -> int:
        """Programs of `backward_wide_kernel`, which take blocks of columns."""
        return persistent_grid(self.column_blocks * self.splits, self.device)

    @property
    def stores_sums(self) -> bool:
        """Whether the kernel stores the gradients of parameters in place of partial sums: never on Ascend."""
        return False

    @property
    def ub_bytes(self) -> int:
        """Bytes of the Unified Buffer that the declared buffers take."""
        if self.kernel == "wide":
            return footprint(tiles_of_columns(self.shape), {"BLOCK_N": self.columns}, self.device)
        rows = self.groups * self.rows
        tiles = tiles_of_rows(self.shape, self.device, self.columns, several=rows > 1, buffers=self.rule.buffers)
        return footprint(tiles, {"ROWS": rows}, self.device)

    @property
    def constants(self) -> dict[str, object]:
        """`tl.constexpr` parameters."""
        sizes: dict[str, object] = {"N": self.shape.width, "BLOCK_N": self.columns}
        if self.kernel == "rows":
            sizes |= {"G": self.groups, "M": self.rows, "SPLIT": self.split}
        else:
            sizes |= {"ORDER": self.shape.order}
        return {**sizes, **self.shape.formula_constants}

    @property
    def options(self) -> dict[str, bool]:
        """Compiler options."""
        return {"multibuffer": self.rule.buffers > 1}

    def smaller(self) -> "AscendTiling | None":
        """Fewer groups, then fewer rows, then one buffer, then blocks of columns."""
        if self.groups > 1:
            return dataclasses.replace(self, groups=self.groups // 2)
        if self.rows > 1:
            return dataclasses.replace(self, rows=self.rows // 2)
        if self.rule.buffers > 1 and self.kernel == "rows":
            # Whatever `kinds` of that way are: they say where it is fast, and here the tile has to fit.
            return dataclasses.replace(self, rule=ONE_BUFFER)
        unit = _unit(self.shape, self.device)
        if self.columns <= unit:
            return None
        return dataclasses.replace(self, rule=COLUMNS, columns=round_up(ceil(self.columns / 2), unit))


def choose(shape: Shape, device: Device) -> AscendTiling:
    """The tiling of the first rule that fits. Raises `npu_tiling.UnifiedBufferError` where none does."""
    unit = _unit(shape, device)
    padded, rows_block = round_up(shape.width, unit), _rows_block(shape, device)
    rule, blocks = first_fit(_candidates(shape, device), device)
    if rule.kernel == "wide":
        columns = equal_blocks(padded, blocks["BLOCK_N"], unit)
        return AscendTiling(shape=shape, device=device, rule=rule, rows=1, columns=columns)
    rows, groups = blocks["ROWS"], 1
    if rows > 1 and rows_block.multiple_of > 1:
        rows, groups = shape.n_inner, rows // shape.n_inner
    elif shape.n_outer > 1:  # equal tiles: no short one at the end of every group
        rows = ceil(shape.n_inner / ceil(shape.n_inner / rows))
    return AscendTiling(shape=shape, device=device, rule=rule, groups=groups, rows=rows, columns=padded)


def _candidates(shape: Shape, device: Device) -> list[Candidate[Rule]]:
    """The rules for a kind of launch, with what each keeps on chip."""
    unit, itemsize = _unit(shape, device), min(shape.itemsizes)
    padded, rows_block = round_up(shape.width, unit), _rows_block(shape, device)
    columns_block = Block("BLOCK_N", min(padded, COLUMNS_BYTES // itemsize), unit, unit)
    kinds = _kinds(shape, device)
    candidates = []
    for rule in RULES:
        if not rule.kinds & kinds:
            continue
        if rule.kernel == "wide":
            candidates.append(Candidate(rule, tiles_of_columns(shape), (columns_block,)))
            continue
        # A tile of "several" rows that has room for one alone compiles as a tile of one row.
        several = rule.rows == "several" and rows_block.largest > 1
        tiles = tiles_of_rows(shape, device, padded, several=several, buffers=rule.buffers)
        if rule.spare:
            tiles.append(Tile("room to spare", (1, int(device.ub_bytes * rule.spare)), 1))
            if rows_block.multiple_of > 1:  # a tile of several groups is loaded and stored through a second one
                tiles.append(Tile("rows of groups", ("ROWS", padded), FP32))
        candidates.append(Candidate(rule, tiles, (rows_block if rule.rows == "several" else Block("ROWS", 1),)))
    return candidates


def _kinds(shape: Shape, device: Device) -> set[str]:
    """The kinds in `Rule.kinds` that a launch is of."""
    direction = "backward" if shape.backward else "forward"
    if device.arch == "dav-c310":
        return {f"{direction} 950"}
    return {direction, f"{direction} of fp32"} if FP32 in shape.itemsizes else {direction}


def _unit(shape: Shape, device: Device) -> int:
    """The fewest columns that are a multiple of `ub_align` bytes in every tensor that is read, and in a quantised y."""
    return device.ub_align // (1 if shape.quantised else min(shape.itemsizes))


def _rows_block(shape: Shape, device: Device) -> Block:
    """The rows that a tile may have: of one group or, where a good transfer is two groups or more, of whole groups."""
    row_bytes = round_up(shape.width, _unit(shape, device)) * min(shape.itemsizes)
    wanted = max(2, ROWS_BYTES // row_bytes)
    rows, groups = min(wanted, shape.max_rows), min(wanted // shape.n_inner, shape.max_groups)
    if shape.per_head or shape.n_outer == 1 or rows < shape.n_inner or groups < 2:
        return Block("ROWS", rows, min(2, rows))
    return Block("ROWS", groups * shape.n_inner, 2 * shape.n_inner, shape.n_inner)
