"""Device code: where a tile of rows of logits begins, and what stands behind its last whole block of columns."""

import triton
import triton.language as tl

from .tile import load_logits


@triton.jit
def tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M: tl.constexpr):
    """A tile's first row, how many rows are left, the mask of those, and where the first one is."""
    i_row = i_tile * BLOCK_M
    n_left = n_rows - i_row
    m_row = tl.arange(0, BLOCK_M) < n_left
    return i_row, n_left, m_row, p_logits + i_row.to(tl.int64) * s_logits


@triton.jit
def load_tail(
    p_row, s_logits, n_left, p_bias, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """z of the columns behind the last whole block, [BLOCK_M, TAIL_N]; a number where there are none."""
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    b_tail = 0.0
    if TAIL_N > 0:
        b_tail = load_logits(
            p_row, N_FULL, s_logits, n_left, p_bias, logit_scale, softcap, N, BLOCK_M, TAIL_N, N_FULL + TAIL_N == N, SCALED,
            SOFTCAP, PADDED
        )  # fmt: skip
    return b_tail
