"""Device code of the cross entropy in one sweep: exponentials in place of the logits, whose factors are known after the row.

    E = exp(z - k)      L = k + log sum E      p = E exp(k - L)      k: a reference of the row
    gradient of raw = logit_scale (a p - b [column = target]) = v (E - [column = target] b / a exp(L - k))

with factors a, b and v = logit_scale a exp(k - L) of each row: x's gradient is v (E W), and the weight's E^T (v x).
So logits are read once, E is written once, and the target's element is put right when L is known. k is the first tile's
maximum. A tile that rises above it by more than LIMIT raises k; at the end of such a row what was written before is
multiplied by a power of two, which bf16 and fp32 do not round. fp16 has no room for such numbers.

Tiles, tails and the order in which columns are swept are those of chunk.py's second sweep.
"""

import triton
import triton.language as tl

from .statistics import LOWEST
from .tile import load_logits, store_tile, transform

LIMIT: tl.constexpr = tl.constexpr(30.0)  # e^30 times a vocabulary is far from the end of fp32 and bf16, and so is e^-30
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 2^23: a smaller number plus this is rounded to an integer
ROUNDED: tl.constexpr = tl.constexpr(2.0e6)  # numbers for which that holds
SPLIT: tl.constexpr = tl.constexpr(65537.0)  # 2^16 + 1, by which Veltkamp's splitting takes 16 of fp32's 24 bits away
FEWEST: tl.constexpr = tl.constexpr(2.0**-24)  # of b, that a counts as at least


@triton.jit
def raise_reference(b_reference, b_top):
    """References [BLOCK_M] for a tile with maxima b_top: exponentials of other references differ by powers of two."""
    b_rounded = ((b_top * LOG2E + ROUND) - ROUND) * LN2
    b_rounded = tl.where(tl.abs(b_top) < ROUNDED, b_rounded, b_top)
    return tl.where(b_top > b_reference + LIMIT, b_rounded, b_reference)


@triton.jit
def exponentials_of(b_z, b_reference, b_sum, i_col, N: tl.constexpr, BLOCK_N: tl.constexpr, EXACT_N: tl.constexpr):
    """The exponentials of a tile, the references of its rows, and their sums of exponentials so far, [BLOCK_M]."""
    b_seen = b_z
    if not EXACT_N:
        b_seen = tl.where((tl.arange(0, BLOCK_N) < N - i_col)[None, :], b_z, LOWEST)
    b_raised = raise_reference(b_reference, tl.max(b_seen, axis=1))
    b_e = tl.exp(b_seen - b_raised[:, None])
    b_sum = b_sum * tl.exp(b_reference - b_raised) + tl.sum(b_e, axis=1)
    return b_e, b_raised, b_sum


@triton.jit
def exponentiate(
    p_out, b_z, b_reference, b_sum, i_col, s_out, n_left, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EXACT_N: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the exponentials of a tile. Returns the references of rows and their sums of exponentials so far, [BLOCK_M]."""
    b_e, b_raised, b_sum = exponentials_of(b_z, b_reference, b_sum, i_col, N, BLOCK_N, EXACT_N)
    store_tile(p_out, b_e, i_col, s_out, n_left, N, BLOCK_M, BLOCK_N, EXACT_N, BARRIER)
    return b_raised, b_sum


@triton.jit
def place(b_column, N: tl.constexpr):
    """Whether int32 columns [BLOCK_M] are columns here, and those, or others that are."""
    b_number = b_column.to(tl.float32)  # compares of integers are loops over elements on Ascend; exact below 2^24
    return (b_number >= 0.0) & (b_number < N), tl.minimum(tl.maximum(b_column, 0), N - 1)


@triton.jit
def target_logit(
    p_row, m_here, b_safe, s_logits, n_left, p_bias, logit_scale, BLOCK_M: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """z of the rows' targets, [BLOCK_M], 0 where those are no columns here; the rest as `place` returns it."""
    # One load for each row; a row that has no target here loads another column and drops it.
    b_z = tl.load(p_row + tl.minimum(tl.arange(0, BLOCK_M), n_left - 1) * s_logits + b_safe).to(tl.float32)
    b_bias = 0.0
    if p_bias is not None:
        b_bias = tl.load(p_bias + b_safe).to(tl.float32)
    b_z = transform(b_z, b_bias, logit_scale, 1.0, p_bias is not None, SCALED, False)
    return tl.where(m_here, b_z, 0.0)


@triton.jit
def rescale(
    p_out, b_factor, i_col, s_out, n_left, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EXACT_N: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Multiplies the exponentials of a tile by a factor of their row."""
    b_e = load_logits(p_out, i_col, s_out, n_left, None, 1.0, 1.0, N, BLOCK_M, BLOCK_N, EXACT_N, False, False)
    store_tile(p_out, b_e * b_factor[:, None], i_col, s_out, n_left, N, BLOCK_M, BLOCK_N, EXACT_N, BARRIER)


@triton.jit
def sweep(
    p_row, p_out, b_reference, b_sum, s_logits, s_out, n_left, p_bias, logit_scale, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr, TILES: tl.constexpr, PADDED: tl.constexpr, SCALED: tl.constexpr,
    BARRIER: tl.constexpr
):  # fmt: skip
    """Exponentials of a tile of rows in place of their logits, all of them for the references that are returned.

    Returns:
        References of rows and their sums of exponentials, [BLOCK_M] each; of earlier columns too, if they began with those.
    """
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    EXACT_N: tl.constexpr = N_FULL + TAIL_N == N
    if TAIL_N > 0:
        b_tail = load_logits(
            p_row, N_FULL, s_logits, n_left, p_bias, logit_scale, 1.0, N, BLOCK_M, TAIL_N, EXACT_N, SCALED, False, PADDED
        )  # fmt: skip
        b_reference, b_sum = exponentiate(
            p_out, b_tail, b_reference, b_sum, N_FULL, s_out, n_left, N, BLOCK_M, TAIL_N, EXACT_N, BARRIER
        )  # fmt: skip
    if N_FULL > 0:
        o_tile = tl.arange(0, TILES).to(tl.float32)[None, :]
        b_first = b_reference
        b_references = tl.zeros([BLOCK_M, TILES], tl.float32)
        for i_block in tl.range(0, N_FULL, BLOCK_N):
            i_col = N_FULL - BLOCK_N - i_block
            b_z = load_logits(
                p_row, i_col, s_logits, n_left, p_bias, logit_scale, 1.0, N, BLOCK_M, BLOCK_N, True, SCALED, False,
                PADDED
            )  # fmt: skip
            b_reference, b_sum = exponentiate(
                p_out, b_z, b_reference, b_sum, i_col, s_out, n_left, N, BLOCK_M, BLOCK_N, True, BARRIER
            )  # fmt: skip
            i_tile = (i_block // BLOCK_N).to(tl.float32)
            b_references = tl.where(o_tile == i_tile, b_reference[:, None], b_references)
        # The first block's reference, of rows that no earlier columns gave one.
        b_low = tl.sum(tl.where(o_tile == 0.0, b_references, 0.0), axis=1)
        if TAIL_N > 0:
            b_low = tl.minimum(b_low, b_first)
        if tl.max(tl.where(b_reference > b_low, 1.0, 0.0), axis=0) > 0:
            if BARRIER:
                tl.debug_barrier()
            if TAIL_N > 0:
                b_factor = tl.exp(b_first - b_reference)
                rescale(p_out, b_factor, N_FULL, s_out, n_left, N, BLOCK_M, TAIL_N, EXACT_N, BARRIER)
            for i_block in tl.range(0, N_FULL, BLOCK_N):
                i_tile = (i_block // BLOCK_N).to(tl.float32)
                b_then = tl.sum(tl.where(o_tile == i_tile, b_references, 0.0), axis=1)
                b_factor = tl.exp(b_then - b_reference)
                i_col = N_FULL - BLOCK_N - i_block
                rescale(p_out, b_factor, i_col, s_out, n_left, N, BLOCK_M, BLOCK_N, True, BARRIER)
    return b_reference, b_sum


@triton.jit
def put_targets_right(
    p_out, b_z, b_reference, b_lse, b_a, b_b, m_here, b_safe, n_left, s_out, logit_scale, BLOCK_M: tl.constexpr,
    SCALED: tl.constexpr, BARRIER: tl.constexpr
):  # fmt: skip
    """Stores the targets' elements of E such that v E is the gradient; returns v, [BLOCK_M]."""
    o_row = tl.arange(0, BLOCK_M)
    b_least = FEWEST * tl.abs(b_b)
    b_a = tl.where(tl.abs(b_a) < b_least, b_least, b_a)
    b_ratio = tl.where(b_b == 0.0, 0.0, b_b / b_a)
    b_e = tl.exp(b_z - b_reference) - b_ratio * tl.exp(b_lse - b_reference)
    if BARRIER:
        tl.debug_barrier()  # other threads have stored the row
    b_stored = b_e
    if p_out.dtype.element_ty == tl.bfloat16:
        # To eight bits. A cast there and back would be one to the compiler, which leaves it out.
        b_split = b_e * SPLIT
        b_stored = b_split - (b_split - b_e)
    tl.store(p_out + o_row * s_out + b_safe, b_stored.to(p_out.dtype.element_ty), mask=m_here & (o_row < n_left))
    b_v = b_a * tl.exp(b_reference - b_lse)
    # v times what was stored is the target's gradient again, which outweighs what rounding is then added to the others.
    m_some = m_here & (b_stored != 0.0)
    b_v = tl.where(m_some, b_v * (b_e / tl.where(m_some, b_stored, 1.0)), b_v)
    if SCALED:
        b_v *= logit_scale
    return b_v
