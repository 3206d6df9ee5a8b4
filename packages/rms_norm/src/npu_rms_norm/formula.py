"""RMSNorm's formulas as device helpers, each once.

Kernels of Ascend and of CUDA differ in how they hold rows; y, dx and dgate are rounded where they are stored.

    rstd = 1 / sqrt(mean(x^2) + eps)        n = x rstd        z = n (offset + w) + b        y = z
    g = dy (offset + w)                     dx = rstd (g - n mean(g n))        dw, db = sums over rows of dy n and of dy

With a gate, a = act(gate) and a' its derivative. Either the result is gated:

    y = z a            dgate = dy z a'      and dy a stands for dy above

or, GATE_FIRST, x is: u = x a stands for x above, and of its gradient du

    dx = du a          dgate = du x a'

NORMALISED, FACTORS and WEIGHTED are the dtypes that the columns of `CASTING_MODES` (call.py) with these names stand for;
WEIGHTED is what a bias or a gate meets. Blocks are fp32: [rows, columns] or, of parameters, [1, columns]; rstd and mean are
[rows]. Without a weight or a bias, None takes the place of its pointer and of its block.
"""

from npu_tiling.device import ASCEND, load_block, logistic, places_below, round_to, tl, triton, widen

TO_WHOLE = tl.constexpr(1.5 * 2.0**23)  # added and subtracted again: rounds fp32 to the nearest whole number, half to even
MIN_AMAX = tl.constexpr(1e-30)  # counts as the largest element of a row of zeros


@triton.jit
def load_factor(p_factor, o_col, offset, N: tl.constexpr, EXACT: tl.constexpr, FACTORS: tl.constexpr):
    """offset + w, or the bias with an offset of None, at the columns o_col: [1, columns]; None for None.

    EXACT: every column of o_col is below N.
    """
    if p_factor is not None:
        b_factor = load_block(p_factor + o_col, m_block=places_below(o_col, N, EXACT)).to(tl.float32)
        if offset is not None:
            b_factor += offset
        return round_to(b_factor, FACTORS)[None, :]


@triton.jit
def add_residual(b_x, b_residual, p_sum):
    """x + residual as p_sum stores it, and the same in fp32, as it is normalised."""
    b_sum = (b_x + b_residual).to(p_sum.dtype.element_ty)
    return b_sum, widen(b_sum)


@triton.jit
def inverse_rms(b_square, eps, N: tl.constexpr):
    """rstd of rows; b_square: squares, or sums of squares, that add up to those of a row."""
    return tl.rsqrt(tl.sum(b_square, axis=1) * (1.0 / N) + eps)


@triton.jit
def normalise(b_x, b_rstd, NORMALISED: tl.constexpr, FACTORS: tl.constexpr):
    """n = x rstd."""
    return round_to(b_x * round_to(b_rstd, FACTORS)[:, None], NORMALISED)


@triton.jit
def weigh(b_n, b_scale, b_bias, WEIGHTED: tl.constexpr):
    """z = n (offset + w) + b."""
    b_z = b_n
    if b_scale is not None:
        b_z *= b_scale
    if b_bias is not None:
        b_z = round_to(b_z, WEIGHTED) + b_bias
    return b_z


@triton.jit
def activate(b_gate, ACTIVATION: tl.constexpr):
    """a = act(gate), and its derivative."""
    b_sigmoid = logistic(b_gate)
    if ACTIVATION == "silu":
        b_act = b_gate * b_sigmoid
        return b_act, b_sigmoid + b_act * (1.0 - b_sigmoid)
    else:
        tl.static_assert(ACTIVATION == "sigmoid")
        return b_sigmoid, b_sigmoid * (1.0 - b_sigmoid)


@triton.jit
def amax_of_rows(b_amax, b_zero):
    """The largest |y| of each row, MIN_AMAX at least; NaN of a row with NaN or inf.

    Chips differ in whether the larger of a number and NaN is NaN. Products and sums with NaN are NaN everywhere.

    Args:
        b_amax: [rows, columns of a tile]; each is the largest |y| of those columns of a row that have this place in a tile.
        b_zero: the same with sums of 0 times y: NaN where one is NaN or inf.
    """
    return tl.maximum(tl.max(b_amax, axis=1), MIN_AMAX) + tl.sum(b_zero, axis=1)


@triton.jit
def quantise(b_y, b_amax, INT8: tl.constexpr):
    """y in steps of its row's scale, whole for int8, and the scales; b_amax: `amax_of_rows`.

    Where the scale is NaN, so are the steps, of which the conversion to int8 makes 0.
    """
    MAX_STEPS: tl.constexpr = 127.0 if INT8 else 448.0
    b_y *= (MAX_STEPS / b_amax)[:, None]
    if INT8:
        b_y = (b_y + TO_WHOLE) - TO_WHOLE
        if ASCEND:  # without saturation its compilers take the low byte of an int32, through transposed tiles
            b_y = tl.cast(b_y, tl.int8, overflow_mode="saturate")
        else:
            b_y = b_y.to(tl.int8)
    return b_y, b_amax / MAX_STEPS
