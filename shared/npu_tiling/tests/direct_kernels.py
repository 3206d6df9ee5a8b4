"""Kernels for test_direct.py, in a module of their own: Triton wants to read their source."""

import triton
import triton.language as tl


@triton.jit
def scale_rows(x, y, n, stride, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * stride + i
    tl.store(y + at, (tl.load(x + at, mask=i < n) * scale).to(y.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=["n"])
def scale_rows_unspecialised(x, y, n, stride, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * stride + i
    tl.store(y + at, (tl.load(x + at, mask=i < n) * scale).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def add_in_place(x, y, n, BLOCK: tl.constexpr):
    """Not what it was if it is launched twice."""
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(y + i, mask=i < n) + tl.load(x + i, mask=i < n), mask=i < n)
