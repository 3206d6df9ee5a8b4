"""Device helpers for one chunk, a power of two columns, of a tile of rows: for stock Triton, see forward_chunks.py."""

import triton
import triton.language as tl

from .elements import load_gate, load_scale
from .tile import load_tile, store_tile, tile_at


@triton.jit
def load_chunk(
    p_base,
    s_outer,
    s_inner,
    i_outer,
    i_inner,
    n_groups,
    n_rows,
    CHUNK: tl.constexpr,
    N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """fp32 [BLOCK_G * BLOCK_M, BLOCK_N], zero outside: one chunk of a tile of rows."""
    i_col: tl.constexpr = CHUNK * BLOCK_N
    p_tile = tile_at(p_base, s_outer, s_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
    return load_tile(p_tile, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, i_col + BLOCK_N <= N, "")


@triton.jit
def load_gate_chunk(
    p_gate,
    s_outer,
    s_inner,
    i_outer,
    i_inner,
    n_groups,
    n_rows,
    CHUNK: tl.constexpr,
    N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GATE_SILU: tl.constexpr,
):
    """a = act(gate) and its derivative of one chunk."""
    i_col: tl.constexpr = CHUNK * BLOCK_N
    EXACT_N: tl.constexpr = i_col + BLOCK_N <= N
    return load_gate(
        p_gate,
        s_outer,
        s_inner,
        i_outer,
        i_inner,
        i_col,
        n_groups,
        n_rows,
        N - i_col,
        BLOCK_G,
        BLOCK_M,
        BLOCK_N,
        EXACT_N,
        GATE_SILU,
    )


@triton.jit
def store_chunk(
    p_base,
    b_chunk,
    s_outer,
    s_inner,
    i_outer,
    i_inner,
    n_groups,
    n_rows,
    CHUNK: tl.constexpr,
    N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stores what lies inside of one chunk, in the dtype of the memory."""
    i_col: tl.constexpr = CHUNK * BLOCK_N
    p_tile = tile_at(p_base, s_outer, s_inner, i_outer, i_inner, i_col, BLOCK_G, BLOCK_M, BLOCK_N)
    store_tile(p_tile, b_chunk, n_groups, n_rows, N - i_col, BLOCK_G, BLOCK_M, BLOCK_N, i_col + BLOCK_N <= N)


@triton.jit
def load_scale_chunk(
    p_weight,
    offset,
    CHUNK: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
):
    """offset + w, fp32 [BLOCK_N], of one chunk."""
    i_col: tl.constexpr = CHUNK * BLOCK_N
    return load_scale(p_weight, i_col + tl.arange(0, BLOCK_N), N, offset, DTYPE, i_col + BLOCK_N <= N, ROUND_FACTORS)
