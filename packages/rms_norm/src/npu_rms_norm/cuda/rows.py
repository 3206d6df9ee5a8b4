"""Tiles of rows in registers, for stock Triton: M rows, in chunks of a power of two columns.

A row of 2560 columns is five chunks of 512, and not one block of 4096 of which a third is padding. Rows lie on two levels,
as in both/columns.py. Threads may divide: the rows of a tile may be of several groups.

ORDER says how rows are numbered, and so which of them share a tile:

    "one"      there is one group
    "groups"   group after group
    "tokens"   groups are heads with parameters of their own, token after token
    "heads"    the same, head after head: a program takes tiles of one head
"""

import triton
import triton.language as tl
from npu_tiling.device.rounding import round_to


@triton.jit
def tiles_of_program(i_program, n_programs, n_outer, n_inner, M: tl.constexpr, ORDER: tl.constexpr):
    """A program's first tile, where its tiles stop, the step between them, and the program's head."""
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
    """Group, and row of it, of a tile's first row ("one", "heads") or of each [M]; numbers in rstd, and which exist, [M]."""
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
    """As `rows_at`, of a contiguous tensor, in which the heads of a token stand side by side."""
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
    """Which elements of a chunk exist; None: all do. The row of a tile of one row exists."""
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
    """offset + w for each row of a tile that has one chunk, [M, BLOCK_N]; with an offset of None w or the bias; None of
    None.

    Threads load what meets their elements, from a cache. The [1, columns] of `load_factor` would be exchanged through shared
    memory.
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
