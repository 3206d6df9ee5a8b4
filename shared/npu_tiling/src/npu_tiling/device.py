"""Device code that all operators share, and Triton for modules of kernels: `from npu_tiling.device import tl, triton`.

Where no Triton can be imported, stand-ins let such a module be imported all the same: `triton.jit` leaves a kernel the plain
Python function that it decorates, whose parameters can be read and which cannot be launched.
"""

from __future__ import annotations

from typing import Any


class _Absent:
    """Every name of Triton's that a module asks for while it is imported."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name)

    def __contains__(self, name: object) -> bool:
        return False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if arguments else self


tl: Any
triton: Any
try:
    import triton
    import triton.backends
    import triton.language as tl
except Exception:  # two Tritons in one environment break each other in many ways; a launch says what is wrong
    triton = tl = _Absent("triton")


ASCEND = tl.constexpr("ascend" in triton.backends.backends)


@triton.jit
def load_block(p_block, m_block):
    """A block, zero where m_block is False. None: all of it exists; a masked load would have to fill the block first."""
    if m_block is None:
        return tl.load(p_block)
    else:
        return tl.load(p_block, mask=m_block, other=0.0)


@triton.jit
def store_block(p_block, b_block, m_block):
    """Rounds a block to the memory's dtype, and stores it where m_block is True. None: all of it."""
    tl.store(p_block, b_block.to(p_block.dtype.element_ty), mask=m_block)


@triton.jit
def places_below(o_place, n, EXACT: tl.constexpr):
    """Which places are below n; None where all of them are (EXACT)."""
    if not EXACT:
        return o_place < n


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


# Numbers that the programs of one CUDA launch exchange through global memory. A program publishes a number and a tag in one
# 64-bit word; others wait until the word has the tag that they expect. Programs that wait for one another form a group, of
# consecutive numbers. A GPU starts the blocks of a one-dimensional grid in the order of their numbers, which the scans of
# NVIDIA's CUB rely on too: so an unfinished group waits for programs that have started, or that start as soon as earlier
# groups end, and a GPU with room for a single group completes the launch. Numbers from an atomic counter would need no such
# order; they cost AttnRes 4 to 5 % of a backward on an H200. Before the launch all words are 0. Tags count from 1.


@triton.jit
def publish(p_words, b_value, tag):
    """Stores fp32 numbers, each with the tag in one int64 word."""
    b_bits = b_value.to(tl.uint32, bitcast=True).to(tl.int64) | (tl.cast(tag, tl.int64) << 32)
    tl.atomic_xchg(p_words, b_bits, sem="relaxed", scope="gpu")


@triton.jit
def collect(p_words, tag):
    """fp32, shaped as p_words: waits until every word has the tag, and returns their numbers."""
    return tl.inline_asm_elementwise(
        "{.reg .pred there; .reg .b64 word; .reg .b32 value, seen; AGAIN: ld.relaxed.gpu.global.b64 word, [$1];"
        " mov.b64 {value, seen}, word; setp.eq.b32 there, seen, $2; @!there bra AGAIN; mov.b32 $0, value;}",
        "=r,l,r",
        [p_words.to(tl.int64, bitcast=True), tag],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )
