"""Formulas of the cross entropy on the device, each once. Imports Triton, and nothing else.

    t = logit_scale (raw + bias)      z = softcap tanh(t / softcap)      k: a reference of the token, near its largest z
    S = sum exp(z - k)                L = k + log S                      p = exp(z - k) / S
    gradient of z:     dz = exp(z - k) (a + q (z - k)) - c w - b [column = target]
    gradient of raw:   logit_scale dz (1 - (z / softcap)^2)

a, b, c and q are factors of each token (see loss/reference.py), a and q with 1 / S; w is the class weight of a column. L,
rounded, would lose the digits that differ where all z are large: z - k comes first.

Without softcap, smoothing and entropies the gradient of raw is v E, and g more at the target:

    E = exp(z - k'), and 0 at the target     k': a reference that may be an earlier one than k
    v = logit_scale a exp(k' - k)            g = logit_scale (a exp(z - k) - b) at the target

    dx = v (E W) + g W[target]               dW = E^T (v x), then dW[target] += g x

E and v x are rounded to the dtype of products. Where exponentials are kept, dW = (v E)^T x, and v E is rounded. g stays in
fp32: the g x of several tokens may cancel, and the errors of bf16 would remain.
"""

from npu_tiling.device import tl, triton

LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # finite: LOWEST - LOWEST is 0
VANISHES: tl.constexpr = tl.constexpr(-200.0)  # exp of it is 0 in fp32
SWEEP_LIMIT: tl.constexpr = tl.constexpr(30.0)  # V e^30 and e^-30 neither overflow nor underflow
PRODUCT_LIMIT: tl.constexpr = tl.constexpr(60.0)  # as above; a row that rises further costs a second product
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 2^23: a smaller number plus this is rounded to an integer
MAX_ROUNDED: tl.constexpr = tl.constexpr(2.0e6)  # ROUND rounds numbers up to this


@triton.jit
def logits_of_raw(b_raw, b_bias, logit_scale, softcap):
    """z of raw products, fp32; None for no bias, no scale, no cap."""
    b_z = b_raw
    if b_bias is not None:
        b_z += b_bias
    if logit_scale is not None:
        b_z *= logit_scale
    if softcap is not None:
        b_e = tl.exp(tl.abs(b_z) * (-2.0 / softcap))
        b_tanh = (1.0 - b_e) / (1.0 + b_e)
        b_z = softcap * tl.where(b_z < 0.0, -b_tanh, b_tanh)
    return b_z


@triton.jit
def at_rate(b_z, b_rate):
    """z [BLOCK_M, BLOCK_N] times the rates of rows, 1 / temperature; None for 1."""
    if b_rate is not None:
        b_z *= b_rate[:, None]
    return b_z


@triton.jit
def gradient_of_raw(b_g, b_z, b_rate, logit_scale, softcap):
    """The gradient of raw products, given that of z; b_rate: as for `at_rate`."""
    if softcap is not None:
        b_t = b_z * (1.0 / softcap)
        if b_rate is not None:
            b_t /= b_rate[:, None]
        b_g *= 1.0 - b_t * b_t
    if logit_scale is not None:
        b_g *= logit_scale
    if b_rate is not None:
        b_g *= b_rate[:, None]
    return b_g


@triton.jit
def merge_statistics(
    b_max, b_sum, b_dot, b_index, b_max2, b_sum2, b_dot2, b_index2, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr
):  # fmt: skip
    """Statistics of two parts of the columns together; of equal maxima, the first part's has the place."""
    b_top = tl.maximum(b_max, b_max2)
    b_d, b_d2 = b_max - b_top, b_max2 - b_top
    b_e, b_e2 = tl.exp(b_d), tl.exp(b_d2)
    if ENTROPY:
        b_dot = b_e * (b_dot + b_d * b_sum) + b_e2 * (b_dot2 + b_d2 * b_sum2)
    if ARGMAX:
        b_index = tl.where(b_max2 > b_max, b_index2, b_index)
    return b_top, b_e * b_sum + b_e2 * b_sum2, b_dot, b_index


@triton.jit
def merge_squares(b_max, b_squares, b_max2, b_squares2):
    """Sums of exp^2 of earlier columns and of later ones together."""
    b_top = tl.maximum(b_max, b_max2)
    b_e, b_e2 = tl.exp(b_max - b_top), tl.exp(b_max2 - b_top)
    return b_e * b_e * b_squares + b_e2 * b_e2 * b_squares2


@triton.jit
def merge_totals(b_max, b_total, b_weight, b_max2, b_total2, b_weight2):
    """Sums of w (z - largest) of earlier columns and of later ones together; b_weight, b_weight2: sums of w."""
    b_top = tl.maximum(b_max, b_max2)
    return (b_total + (b_max - b_top) * b_weight) + (b_total2 + (b_max2 - b_top) * b_weight2)


@triton.jit
def row_coefficients(
    b_main, b_of_z_loss, b_weight, p_total_weight, b_reference, b_sum, b_z, smoothing, per_column, z_scale,
    WEIGHTED: tl.constexpr, SMOOTHED: tl.constexpr, Z_LOSS: tl.constexpr, TOKEN_SCALING: tl.constexpr
):  # fmt: skip
    """a, still without 1 / S, b and c [rows] of a loss.

    Args:
        b_main, b_of_z_loss: [rows], factors of the losses and z-losses; 0 for a row without a target.
        b_weight: [rows], the class weight of the target; with WEIGHTED.
        p_total_weight: the sum of the class weights, one number; with WEIGHTED and SMOOTHED.
        b_reference, b_sum, b_z: [rows], k, S and the target's z; with Z_LOSS and TOKEN_SCALING.
        per_column: the smoothing divided by the size of the vocabulary.
    """
    b_b = b_main * (1.0 - smoothing)
    b_c = b_main * per_column
    b_a = b_main
    if WEIGHTED:
        b_b *= b_weight
        b_a = b_b
        if SMOOTHED:
            b_a = b_b + b_c * tl.load(p_total_weight)
    if Z_LOSS:
        b_a += b_of_z_loss * (2.0 * z_scale) * (b_reference + tl.log(b_sum))
    if TOKEN_SCALING:
        # A row without a target has z 0, and L may be below.
        b_probability = tl.exp(tl.minimum((b_z - b_reference) - tl.log(b_sum), 0.0))
        b_a, b_b, b_c = b_a * b_probability, b_b * b_probability, b_c * b_probability
    return b_a, b_b, b_c


@triton.jit
def raise_reference(b_reference, b_top):
    """References [rows] for a tile with maxima b_top, rounded to multiples of ln 2.

    So exponentials that are rescaled later are multiplied by about a power of two, which rounds no bf16. fp16 has no range
    for them.
    """
    b_rounded = ((b_top * LOG2E + ROUND) - ROUND) * LN2
    b_rounded = tl.where(tl.abs(b_top) < MAX_ROUNDED, b_rounded, b_top)
    return tl.where(b_top > b_reference + SWEEP_LIMIT, b_rounded, b_reference)


@triton.jit
def inside(b_tile, other, COLUMNS: tl.constexpr):
    """A tile [BLOCK_M, BLOCK_N], and `other` behind its COLUMNS columns."""
    if b_tile.shape[1] != COLUMNS:
        b_tile = tl.where((tl.arange(0, b_tile.shape[1]) < COLUMNS)[None, :], b_tile, other)
    return b_tile


@triton.jit
def exponentials_of(b_z, b_reference, b_sum, COLUMNS: tl.constexpr):
    """The exponentials of a tile; the references and the running sums of its rows, [rows]."""
    b_seen = inside(b_z, LOWEST, COLUMNS)
    b_raised = raise_reference(b_reference, tl.max(b_seen, axis=1))
    b_e = tl.exp(b_seen - b_raised[:, None])
    b_sum = b_sum * tl.exp(b_reference - b_raised) + tl.sum(b_e, axis=1)
    return b_e, b_raised, b_sum
