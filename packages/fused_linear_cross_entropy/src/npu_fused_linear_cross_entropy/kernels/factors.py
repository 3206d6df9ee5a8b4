"""Device code: the factors of the gradient of rows whose loss is one number. Formulas: row_math.py."""

import triton
import triton.language as tl


@triton.jit
def loss_factors(
    p_factors, p_class_weight, b_lse, b_z, m_here, b_safe, smoothing, z_scale, N: tl.constexpr, SMOOTHED: tl.constexpr,
    Z_LOSS: tl.constexpr, TOKEN_SCALING: tl.constexpr
):  # fmt: skip
    """a, b and c, [BLOCK_M] each, of rows that have L, the target's z, whether that is a column here, and the column.

    p_factors: fp32, of the loss, of the z-loss, the sum of the class weights.
    """
    b_on = tl.where(m_here, tl.load(p_factors), 0.0)
    b_b = b_on * (1.0 - smoothing)
    b_a = b_on
    b_c = b_on * (smoothing / N)
    if p_class_weight is not None:
        b_b *= tl.load(p_class_weight + b_safe).to(tl.float32)
        b_a = b_b
        if SMOOTHED:
            b_a += b_c * tl.load(p_factors + 2)
    if Z_LOSS:
        b_a += tl.where(m_here, tl.load(p_factors + 1), 0.0) * (2.0 * z_scale) * b_lse
    if TOKEN_SCALING:
        b_f = tl.exp(b_z - b_lse)
        b_a, b_b, b_c = b_a * b_f, b_b * b_f, b_c * b_f
    return b_a, b_b, b_c
