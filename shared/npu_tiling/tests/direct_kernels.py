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


@triton.jit(do_not_specialize=["n"])
def scale_rows_typed(x, y, n: tl.int64, stride, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0) * stride + i
    tl.store(y + at, (tl.load(x + at, mask=i < n) * scale).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def add_in_place(x, y, n, BLOCK: tl.constexpr):
    """Not what it was if it is launched twice."""
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(y + i, mask=i < n) + tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def add_listed(x, others, y, n, BLOCK: tl.constexpr):
    """others: a tuple of pointers."""
    i = tl.arange(0, BLOCK)
    total = tl.load(x + i, mask=i < n)
    for k in tl.static_range(len(others)):
        total += tl.load(others[k] + i, mask=i < n)
    tl.store(y + i, total, mask=i < n)


@triton.jit
def copy_block(x, y, described, n, BLOCK: tl.constexpr):
    """described: a descriptor of blocks [1, BLOCK], or None."""
    i = tl.arange(0, BLOCK)
    total = tl.load(x + i, mask=i < n)
    if described is not None:
        total += tl.reshape(described.load([0, 0]), [BLOCK])
    tl.store(y + i, total, mask=i < n)
