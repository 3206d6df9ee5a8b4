"""Device helpers that round on the way, and the sigmoid: on Ascend and on CUDA each in its own way."""

import triton
import triton.backends
import triton.language as tl

# CANN 8.5's compiler leaves out a cast to 16 bits that is cast back at once. A change of shape in between costs nothing and
# keeps it. Elsewhere such a change may cost something, and nothing is left out.
ASCEND = tl.constexpr("ascend" in triton.backends.backends)


@triton.jit
def widen(b_value):
    """fp32, of what was computed, and rounded, in this kernel."""
    if ASCEND and b_value.dtype != tl.float32:
        return tl.reshape(tl.expand_dims(b_value, 0).to(tl.float32), b_value.shape)
    else:
        return b_value.to(tl.float32)


@triton.jit
def rounded(b_value, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr):
    """fp32, rounded to DTYPE and widened again.

    IN_PAIRS, on CUDA: two bf16 are converted at once, where a conversion of one takes the unit that computes exp and 1 / x.
    """
    if (ASCEND or not IN_PAIRS) or DTYPE != tl.bfloat16:  # noqa: SIM300
        return widen(b_value.to(DTYPE))
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000;}",
            "=r,=r,r,r",
            [b_value],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def logistic(b_value):
    """1 / (1 + exp(-x)): on CUDA without a quotient's steps for the ends of fp32's range, which 1 + exp(-x) never needs."""
    if ASCEND:
        return tl.sigmoid(b_value)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"  # -log2(e)
            " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t;}",
            "=f,f",
            [b_value],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
