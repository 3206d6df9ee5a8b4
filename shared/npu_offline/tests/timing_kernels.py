"""Kernels whose time can be worked out by hand."""

import triton
import triton.language as tl


@triton.jit
def copy(x_ptr, y_ptr, n_tiles, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    for i in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        tl.store(y_ptr + i * BLOCK + o, tl.load(x_ptr + i * BLOCK + o))


@triton.jit
def copy_some(x_ptr, y_ptr, n_long, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    """The first programs copy several times."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for _ in tl.range(0, tl.where(tl.program_id(0) < n_long, TIMES, 1)):
        tl.store(y_ptr + o, tl.load(x_ptr + o))


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
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    o_m, o_n, o_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    n_columns = N // BN
    for i_tile in tl.range(tl.program_id(0), M // BM * n_columns, tl.num_programs(0)):
        o_row, o_col = i_tile // n_columns * BM + o_m, i_tile % n_columns * BN + o_n
        acc = tl.zeros([BM, BN], tl.float32)
        for i_k in tl.range(0, K, BK):
            a = tl.load(a_ptr + o_row[:, None] * K + i_k + o_k[None, :])
            acc = tl.dot(a, tl.load(b_ptr + (i_k + o_k)[:, None] * N + o_col[None, :]), acc)
        tl.store(c_ptr + o_row[:, None] * N + o_col[None, :], acc.to(c_ptr.dtype.element_ty))


@triton.jit
def matmul_of_exp(a_ptr, b_ptr, c_ptr, n_tiles, K, B: tl.constexpr):
    o = tl.arange(0, B)
    for i_tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        acc = tl.zeros([B, B], tl.float32)
        for i_k in tl.range(0, K, B):
            a = tl.load(a_ptr + (i_tile * B + o)[:, None] * K + i_k + o[None, :]).to(tl.float32)
            acc = tl.dot(tl.exp(a).to(tl.bfloat16), tl.load(b_ptr + (i_k + o)[:, None] * B + o[None, :]), acc)
        tl.store(c_ptr + (i_tile * B + o)[:, None] * B + o[None, :], tl.exp(acc).to(tl.bfloat16))


@triton.jit
def exp_of_matmul(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr):
    o, o_row = tl.arange(0, B), tl.program_id(0) * B + tl.arange(0, B)
    acc = tl.zeros([B, B], tl.float32)
    for i_k in tl.range(0, K, B):
        a = tl.load(a_ptr + o_row[:, None] * K + i_k + o[None, :])
        acc = tl.dot(a, tl.load(b_ptr + (i_k + o)[:, None] * B + o[None, :]), acc)
    tl.store(c_ptr + o_row[:, None] * B + o[None, :], tl.exp(acc))


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
def exp_of_large_tiles_noted(x_ptr, y_ptr, n_tiles, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    # time: rare: a value above one
    for i_tile in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        o = i_tile * BLOCK + tl.arange(0, BLOCK)
        b = tl.load(x_ptr + o)
        tl.store(y_ptr + o, b)
        if tl.max(b, axis=0) > 1:
            for _ in tl.range(0, TIMES):
                b = tl.exp(b)
            tl.store(y_ptr + o, b)


@triton.jit
def copy_counted_noted(count_ptr, x_ptr, y_ptr, BLOCK: tl.constexpr):
    # time: rare: the note is of branches, this kernel has none
    o = tl.arange(0, BLOCK)
    for i in tl.range(0, tl.load(count_ptr).to(tl.int32)):
        tl.store(y_ptr + i * BLOCK + o, tl.load(x_ptr + i * BLOCK + o))


@triton.jit
def copy_noted_without_reason(x_ptr, y_ptr, BLOCK: tl.constexpr):
    # time: rare
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + o, tl.load(x_ptr + o))


@triton.jit
def read_twice_in_two_ways(x_ptr, y_ptr, n_tiles, n_columns, M: tl.constexpr, D: tl.constexpr):
    o = tl.arange(0, M)[:, None] * D + tl.arange(0, D)[None, :]
    for i in tl.range(tl.program_id(0), n_tiles, tl.num_programs(0)):
        b = tl.load(x_ptr + i * M * D + o)
        b += tl.load(x_ptr + i * M * D + o, mask=tl.arange(0, D)[None, :] < n_columns, other=0.0)
        tl.store(y_ptr + i * M * D + o, b)
