"""Kernels for test_cann.py and test_cann_kernels.py, in a module of its own: Triton wants to read their source."""

import triton
import triton.language as tl


@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@triton.jit
def exchange(x, y, BLOCK: tl.constexpr):
    """y is what one of the programs has in x: the compiler has them take turns, with a lock."""
    i = tl.arange(0, BLOCK)
    tl.atomic_xchg(y + i, tl.load(x + tl.program_id(0) * BLOCK + i))
