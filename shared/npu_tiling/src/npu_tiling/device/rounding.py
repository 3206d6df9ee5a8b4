"""Rounding to a named dtype between two steps of fp32 arithmetic, the sigmoid, and the gradient of an RMSNorm."""

from .language import tl, triton

ASCEND = tl.constexpr("ascend" in triton.backends.backends)


@triton.jit
def widen(b_value):
    """fp32 of a block that the same kernel has rounded."""
    if ASCEND and b_value.dtype != tl.float32:
        # CANN 8.5 removes a cast to 16 bits that is cast back at once. A change of shape between the two casts keeps both.
        return tl.reshape(tl.expand_dims(b_value, 0).to(tl.float32), b_value.shape)
    else:
        return b_value.to(tl.float32)


@triton.jit
def round_to(b_value, DTYPE: tl.constexpr):
    """fp32 b_value, rounded to DTYPE: "fp32" (no rounding), "fp16" or "bf16"."""
    if DTYPE == "fp32":
        return b_value
    elif DTYPE == "fp16":
        return widen(b_value.to(tl.float16))
    else:
        tl.static_assert(DTYPE == "bf16")
        return widen(b_value.to(tl.bfloat16))


@triton.jit
def logistic(b_value):
    """1 / (1 + exp(-x))."""
    if ASCEND:
        return tl.sigmoid(b_value)
    else:
        # Triton's division also handles quotients at the ends of fp32's range, in twice the instructions. 1 + exp(-x) >= 1.
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t;"  # -log2(e)
            " add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t;}",
            "=f,f",
            [b_value],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def gradient_of_rows(b_g, b_n, b_rstd, b_mean):
    """dx = rstd (g - n mean(g n)) of an RMSNorm n = x rstd: g is the gradient of n, b_mean = mean(g n) of each row."""
    return (b_g - b_n * b_mean[:, None]) * b_rstd[:, None]
