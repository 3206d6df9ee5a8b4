"""Device code of RMSNorm: what happens to the elements of a tile. Formulas and modes: tile.py."""

import triton
import triton.language as tl

from .rounding import ASCEND, logistic, rounded, widen
from .tile import load_tile, tile_at

TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # added and taken away: rounds fp32 to the nearest whole number, half to even
SMALLEST_LARGEST = tl.constexpr(1e-30)  # counts as the largest element of a row of zeros


@triton.jit
def largest_of_rows(b_most, b_zero):
    """The largest |y| of each row, 1e-30 at least; NaN of a row with NaN or inf. Columns: the largest |y|, sums of y 0.

    Chips differ in whether the larger of a number and NaN is NaN; products and sums with NaN are NaN everywhere.
    """
    return tl.maximum(tl.max(b_most, axis=1), SMALLEST_LARGEST) + tl.sum(b_zero, axis=1)


@triton.jit
def quantise(b_y, b_largest, INT8: tl.constexpr):
    """y in steps of its row's scale, whole for int8, and the scales; b_largest: `largest_of_rows`."""
    MOST: tl.constexpr = 127.0 if INT8 else 448.0
    b_y *= (MOST / b_largest)[:, None]
    if INT8:
        b_y = (b_y + TO_WHOLE) - TO_WHOLE
        if ASCEND:  # otherwise its compilers take the low byte of an int32, through transposed tiles of 32 x 32
            b_y = tl.cast(b_y, tl.int8, overflow_mode="saturate")
        else:
            b_y = b_y.to(tl.int8)
    return b_y, b_largest / MOST


@triton.jit
def load_scale(p_weight, o_col, n_cols, offset, DTYPE: tl.constexpr, EXACT_N: tl.constexpr, ROUND_FACTORS: tl.constexpr):
    """offset + w, fp32 [BLOCK_N]; an offset of None is 0, and leaves what was loaded in 16 bits a product of 16 bits."""
    if EXACT_N:
        b_scale = tl.load(p_weight + o_col).to(tl.float32)
    else:
        b_scale = tl.load(p_weight + o_col, mask=o_col < n_cols, other=0.0).to(tl.float32)
    if offset is not None:
        b_scale += offset
    if ROUND_FACTORS:
        b_scale = widen(b_scale.to(DTYPE))
    return b_scale


@triton.jit
def load_scale_rows(
    p_weight, i_head, n_cols, offset, M: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr, EXACT_N: tl.constexpr,
    ROUND_FACTORS: tl.constexpr
):  # fmt: skip
    """As `load_scale`, fp32 [M, N]: M equal rows, or those of the heads i_head [M].

    For CUDA: threads that have a tile's elements load theirs, from a cache, where those of one row would be exchanged
    through shared memory.
    """
    o_head = tl.zeros([M], tl.int32) if i_head is None else i_head * n_cols
    o_tile = o_head[:, None] + tl.arange(0, N)[None, :]
    if EXACT_N:
        b_scale = tl.load(p_weight + o_tile).to(tl.float32)
    else:
        b_scale = tl.load(p_weight + o_tile, mask=(tl.arange(0, N) < n_cols)[None, :], other=0.0).to(tl.float32)
    if offset is not None:
        b_scale += offset
    if ROUND_FACTORS:
        b_scale = widen(b_scale.to(DTYPE))
    return b_scale


@triton.jit
def normalise(
    b_x,
    b_rstd,
    DTYPE: tl.constexpr,
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
    IN_PAIRS: tl.constexpr = True,
):
    """n = x rstd, fp32 [BLOCK_M, BLOCK_N], rounded as the mode says."""
    if ROUND_FACTORS:
        b_rstd = widen(b_rstd.to(DTYPE))
    b_n = b_x * b_rstd[:, None]
    if ROUND_NORMALISED:
        b_n = rounded(b_n, DTYPE, IN_PAIRS)
    return b_n


@triton.jit
def load_gate(
    p_gate,
    s_outer,
    s_inner,
    i_outer,
    i_inner,
    i_col,
    n_outer,
    n_inner,
    n_cols,
    G: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EXACT_N: tl.constexpr,
    GATE_SILU: tl.constexpr,
):
    """a = act(gate) and its derivative, fp32 [G * M, N]: of silu, or of the sigmoid."""
    p_tile = tile_at(p_gate, s_outer, s_inner, i_outer, i_inner, i_col, G, M, N)
    b_gate = load_tile(p_tile, n_outer, n_inner, n_cols, G, M, N, EXACT_N, "")
    b_sigmoid = logistic(b_gate)
    if GATE_SILU:
        b_act = b_gate * b_sigmoid
        return b_act, b_sigmoid + b_act * (1.0 - b_sigmoid)
    else:
        return b_sigmoid, b_sigmoid * (1.0 - b_sigmoid)


@triton.jit
def round_weighted(
    b_z,
    p_weight,
    DTYPE: tl.constexpr,
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
    IN_PAIRS: tl.constexpr = True,
):
    """What meets a bias or a gate: in the modes that round n, rounded to the weight's dtype, or all to y's."""
    if p_weight is not None:
        if ROUND_FACTORS:
            b_z = rounded(b_z, DTYPE, IN_PAIRS)
        elif ROUND_NORMALISED:
            b_z = rounded(b_z, p_weight.dtype.element_ty, IN_PAIRS)
    return b_z
