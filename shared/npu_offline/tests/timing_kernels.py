"""Kernels whose time can be worked out by hand."""

import triton
import triton.language as tl


@triton.jit
def copy(x_ptr, y_ptr, n_tiles, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    for i in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        tl.store(y_ptr + i * BLOCK + o, tl.load(x_ptr + i * BLOCK + o))


@triton.jit
def exp_often(x_ptr, y_ptr, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b = tl.load(x_ptr + o)
    for _ in tl.range(0, TIMES):
        b = tl.exp(b)
    tl.store(y_ptr + o, b)


@triton.jit
def copy_counted(count_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    for i in tl.range(0, tl.load(count_ptr).to(tl.int32)):
        tl.store(y_ptr + i * BLOCK + o, tl.load(x_ptr + i * BLOCK + o))


@triton.jit
def read_again(x_ptr, y_ptr, TIMES: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for _ in tl.range(0, TIMES):
        b_sum += tl.load(x_ptr + o)
    tl.store(y_ptr + o, b_sum)


@triton.jit
def gather_rows(index_ptr, x_ptr, y_ptr, n, D: tl.constexpr):
    o = tl.arange(0, D)
    for i in tl.range(tl.program_id(0), n, tl.num_programs(0)):
        tl.store(y_ptr + i * D + o, tl.load(x_ptr + tl.load(index_ptr + i) * D + o))


@triton.jit
def exp_if_large(x_ptr, y_ptr, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b = tl.load(x_ptr + o)
    tl.store(y_ptr + o, b)
    if tl.max(b, axis=0) > 1:
        for _ in tl.range(0, TIMES):
            b = tl.exp(b)
        tl.store(y_ptr + o, b)


@triton.jit
def exp_if_large_noted(x_ptr, y_ptr, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    # time: rare: a value above one
    o = tl.arange(0, BLOCK)
    b = tl.load(x_ptr + o)
    tl.store(y_ptr + o, b)
    if tl.max(b, axis=0) > 1:
        for _ in tl.range(0, TIMES):
            b = tl.exp(b)
        tl.store(y_ptr + o, b)


@triton.jit
def copy_noted_without_reason(x_ptr, y_ptr, BLOCK: tl.constexpr):
    # time: rare
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o))
