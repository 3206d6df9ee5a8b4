"""Rows of several sources of one token on CUDA, which are reached by a stride, through a table, or through arguments."""

import os

import triton
import triton.language as tl

from ..both.tile import ALIGNMENT, NO_GRADIENT

_ASSEMBLY = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # which Triton's interpreter does not know


@triton.jit
def add_pairs(a0, a1, b0, b1):
    """The sums of two numbers each, for `tl.reduce`."""
    return a0 + b0, a1 + b1


@triton.jit
def widen_tile(b_v):
    """fp32. From bf16 it takes one instruction an element; Triton's cast takes three for two elements."""
    if _ASSEMBLY and b_v.dtype == tl.bfloat16 and b_v.numel > 1:  # pairs
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [b_v], tl.float32, is_pure=True, pack=2
        )
    else:
        return b_v.to(tl.float32)


@triton.jit
def widen_again(b_v):
    """As `widen_tile`, by another instruction, for a tile's second use: the compiler would keep results of the same one."""
    if _ASSEMBLY and b_v.dtype == tl.bfloat16 and b_v.numel > 1:  # pairs
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;", "=r,=r,r", [b_v], tl.float32, is_pure=True, pack=2
        )
    else:
        return b_v.to(tl.float32)


@triton.jit
def load_row(p_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp32 [BLOCK_D], zero outside."""
    o_col = tl.arange(0, BLOCK_D)
    return tl.load(p_row + o_col, mask=o_col < D, other=0.0).to(tl.float32)


@triton.jit
def columns(I_CHUNK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The columns of a chunk of a row, and the mask of those inside the row."""
    o_col = I_CHUNK * BLOCK_D + tl.arange(0, BLOCK_D)
    return o_col, (o_col < D) | ((I_CHUNK + 1) * BLOCK_D <= D)


@triton.jit
def load_chunk(p_row, I_CHUNK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """fp32 [BLOCK_D], zero outside."""
    o_col, m_col = columns(I_CHUNK, D, BLOCK_D)
    return tl.load(p_row + o_col, mask=m_col, other=0.0).to(tl.float32)


@triton.jit
def store_chunk(p_row, b_chunk, I_CHUNK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    o_col, m_col = columns(I_CHUNK, D, BLOCK_D)
    tl.store(p_row + o_col, b_chunk, mask=m_col)


@triton.jit
def load_tiles(p_row, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr):
    """CHUNKS times [BLOCK_N, BLOCK_D], zero outside, of rows that begin at p_row [BLOCK_N]."""
    tiles = ()
    for i in tl.static_range(CHUNKS):
        o_col, m_col = columns(i, D, BLOCK_D)
        m_tile = m_row[:, None] & m_col[None, :]
        b_v = tl.load(p_row[:, None] + o_col[None, :], mask=m_tile, other=0.0)
        tiles = tiles + (b_v,)
    return tiles


@triton.jit
def block_rows(
    p_v,
    others,
    p_table,
    i_row,
    s_block,
    i_tile,
    m_block,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    PER_TILE: tl.constexpr = None,
):
    """Where a row of the blocks of a tile begins, and whether there is one, both [BLOCK_N].

    Args:
        p_v: the first block.
        others: pointers to the blocks that follow it, a tuple; None: they are reached from p_v.
        p_table: the distance from p_v to each, or NO_GRADIENT; None: block i is i * s_block away.
        i_row: from a block's begin to the row, in elements.
        m_block: which blocks there are.
        PER_TILE: how many blocks a tile has, at most BLOCK_N; None: BLOCK_N.
    """
    o_block = tl.arange(0, BLOCK_N)
    N_TILE: tl.constexpr = BLOCK_N if PER_TILE is None else PER_TILE
    if others is not None:
        p_row = p_v + o_block * 0
        for i in tl.static_range(len(others)):
            # The place in the tile is known when this is compiled, so that a row is chosen among those of its place alone.
            is_here = (o_block == (i + 1) % N_TILE) & (i_tile == (i + 1) // N_TILE)
            p_row = tl.where(is_here, others[i], p_row)
        return p_row + i_row, m_block
    elif p_table is None:
        return p_v + ((o_block + i_tile * N_TILE).to(tl.int64) * s_block + i_row), m_block
    else:
        o_offset = tl.load(p_table + i_tile * N_TILE + o_block, mask=m_block, other=NO_GRADIENT)
        m_block &= o_offset != NO_GRADIENT
        if ALIGNED:
            o_offset = tl.multiple_of(o_offset, ALIGNMENT)
        return p_v + (o_offset + i_row), m_block


@triton.jit
def store_gradients(
    p_dv, gradients, p_table, b_dv, i_token, n_tokens, i_tile, m_needed, o_col, m_col,
    D: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr, PER_TILE: tl.constexpr = None
):  # fmt: skip
    """Stores the gradients of a tile's blocks, contiguous [n_tokens, D] each, at the columns o_col of a token's row.

    m_needed: which blocks need one. p_dv, gradients and p_table lead to them as `block_rows` says.
    """
    s_block = tl.cast(n_tokens, tl.int64) * D
    p_row, m_row = block_rows(p_dv, gradients, p_table, i_token * D, s_block, i_tile, m_needed, BLOCK_N, ALIGNED, PER_TILE)
    b_dv = b_dv.to(p_dv.dtype.element_ty)
    m_tile = m_row[:, None] & m_col[None, :]
    tl.store(p_row[:, None] + o_col[None, :], b_dv, mask=m_tile, eviction_policy="evict_first")
