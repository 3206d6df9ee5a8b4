"""Tiles of whole rows in the Unified Buffer.

Rows lie on two levels, n_outer groups of n_inner rows, and every tensor has a stride for each level: a slice of a wider
tensor is read in place. A tile has G groups, M rows of each and BLOCK_N columns; where G > 1, M is n_inner. Pointers are
sums of ranges times strides, and never quotients: the compiler then moves a tile in one transfer.

SPLIT says which tiles a program takes:

    "rows"    there is one group: a contiguous share of its rows
    "tiles"   every so-many-th tile
    "heads"   a group is a head with parameters of its own: every so-many-th tile of one head
"""

import triton
import triton.language as tl


@triton.jit
def share_of_rows(n_rows):
    """First row and stop of this program's equal, contiguous share."""
    n_share = tl.cdiv(n_rows, tl.num_programs(0))
    i_first = tl.minimum(tl.program_id(0) * n_share, n_rows)
    return i_first, tl.minimum(i_first + n_share, n_rows)


@triton.jit
def tiles_of_program(n_outer, n_inner, G: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr):
    """This program's first tile, where its tiles stop, and the step between them.

    With "rows" and "heads" tile numbers start at 0 in each share or head.
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
    """First group and row of a tile, and how many groups and rows of each are left from there on."""
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
    """Which elements of a tile are inside the tensor; None: all are, and no masked load has to fill the tile first."""
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
    """Pointers [M, N] or, of several groups, [G, M, N]. Tiling bounds offsets inside a tile: they stay 32-bit."""
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
