"""Pairs of kernels: one that breaks a rule, and one that does the same job and keeps it."""

import triton
import triton.language as tl


@triton.jit
def gather_elements(i_ptr, x_ptr, y_ptr, D: tl.constexpr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.store(y_ptr + o, tl.load(x_ptr + tl.load(i_ptr + o)))


@triton.jit
def gather_rows(i_ptr, x_ptr, y_ptr, D: tl.constexpr, BN: tl.constexpr):
    o_rows, o_cols = tl.arange(0, BN), tl.arange(0, D)
    b_index = tl.load(i_ptr + o_rows)
    b_rows = tl.load(x_ptr + b_index[:, None] * D + o_cols[None, :])
    tl.store(y_ptr + o_rows[:, None] * D + o_cols[None, :], b_rows)


@triton.jit
def below_by_integers(x_ptr, y_ptr, n, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.store(y_ptr + o, tl.where(o < n, tl.load(x_ptr + o), 0.0))


@triton.jit
def below_by_floats(x_ptr, y_ptr, n, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.store(y_ptr + o, tl.where(o.to(tl.float32) < n.to(tl.float32), tl.load(x_ptr + o), 0.0))


@triton.jit
def add_wide(x_ptr, y_ptr, n, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.store(y_ptr + o, tl.load(x_ptr + o) + n)


@triton.jit
def square_narrow(x_ptr, y_ptr, BN: tl.constexpr):
    b_x = tl.load(x_ptr + tl.arange(0, BN))
    tl.store(y_ptr + tl.arange(0, BN), b_x * b_x)


@triton.jit
def square_wide(x_ptr, y_ptr, BN: tl.constexpr):
    b_x = tl.load(x_ptr + tl.arange(0, BN)).to(tl.float32)
    tl.store(y_ptr + tl.arange(0, BN), (b_x * b_x).to(tl.bfloat16))


@triton.jit
def store_positive(x_ptr, y_ptr, BN: tl.constexpr):
    b_x = tl.load(x_ptr + tl.arange(0, BN))
    tl.store(y_ptr + tl.arange(0, BN), b_x, mask=b_x > 0)


@triton.jit
def store_clamped(x_ptr, y_ptr, BN: tl.constexpr):
    b_x = tl.load(x_ptr + tl.arange(0, BN))
    tl.store(y_ptr + tl.arange(0, BN), tl.maximum(b_x, 0.0))


@triton.jit
def transpose_in_memory(x_ptr, y_ptr, BM: tl.constexpr, BN: tl.constexpr):
    o_m, o_n = tl.arange(0, BM), tl.arange(0, BN)
    tl.store(y_ptr + o_n[:, None] * BM + o_m[None, :], tl.load(x_ptr + o_m[None, :] * BN + o_n[:, None]))


@triton.jit
def transpose_on_chip(x_ptr, y_ptr, BM: tl.constexpr, BN: tl.constexpr):
    o_m, o_n = tl.arange(0, BM), tl.arange(0, BN)
    b_x = tl.load(x_ptr + o_m[:, None] * BN + o_n[None, :])
    tl.store(y_ptr + o_n[:, None] * BM + o_m[None, :], tl.trans(b_x))


@triton.jit
def copy_rows(x_ptr, y_ptr, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    o_cols = tl.arange(0, BN)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n, BM), tl.num_programs(0)):
        o_rows = i_tile * BM + tl.arange(0, BM)
        o = o_rows[:, None] * D + o_cols[None, :]
        m = (o_rows < n)[:, None] & (o_cols < D)[None, :]
        tl.store(y_ptr + o, tl.load(x_ptr + o, mask=m, other=0.0) * 2.0, mask=m)


@triton.jit
def sum_rows(x_ptr, y_ptr, n, D: tl.constexpr, BM: tl.constexpr):
    o_cols = tl.arange(0, D)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n, BM), tl.num_programs(0)):
        o_rows = i_tile * BM + tl.arange(0, BM)
        b_x = tl.load(x_ptr + o_rows[:, None] * D + o_cols[None, :], mask=(o_rows < n)[:, None], other=0.0)
        tl.store(y_ptr + o_rows, tl.sum(b_x, 1), mask=o_rows < n)


@triton.jit
def sum_atomically(x_ptr, y_ptr, D: tl.constexpr):
    o_cols = tl.arange(0, D)
    tl.atomic_add(y_ptr + o_cols, tl.load(x_ptr + tl.program_id(0) * D + o_cols))


@triton.jit
def count_atomically(x_ptr, y_ptr, D: tl.constexpr):
    o_cols = tl.arange(0, D)
    tl.atomic_add(y_ptr + o_cols, tl.load(x_ptr + tl.program_id(0) * D + o_cols))


@triton.jit
def take_by_exchange(lock_ptr, y_ptr):
    tl.store(y_ptr, tl.atomic_xchg(lock_ptr, 1))


@triton.jit
def take_by_or(lock_ptr, y_ptr):
    tl.store(y_ptr, tl.atomic_or(lock_ptr, 1))


@triton.jit
def wait_for_turn(turn_ptr, y_ptr):
    while tl.load(turn_ptr, volatile=True) != tl.program_id(0):
        pass
    tl.atomic_add(y_ptr, 1)


@triton.jit
def halve_until_small(x_ptr, y_ptr):
    b_x = tl.load(x_ptr)
    while b_x > 1:
        b_x = b_x // 2
    tl.store(y_ptr, b_x)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr, BK: tl.constexpr):
    o, o_k = tl.arange(0, B), tl.arange(0, BK)
    acc = tl.zeros([B, B], tl.float32)
    for i_k in range(0, K, BK):
        a = tl.load(a_ptr + o[:, None] * K + i_k + o_k[None, :])
        acc = tl.dot(a, tl.load(b_ptr + (i_k + o_k)[:, None] * B + o[None, :]), acc)
    tl.store(c_ptr + o[:, None] * B + o[None, :], acc)


@triton.jit
def square_suppressed(x_ptr, y_ptr, BN: tl.constexpr):
    # lint: allow bf16-arithmetic: a test of suppressions
    b_x = tl.load(x_ptr + tl.arange(0, BN))
    tl.store(y_ptr + tl.arange(0, BN), b_x * b_x)


@triton.jit
def suppressed_without_reason(x_ptr, y_ptr, BN: tl.constexpr):
    # lint: allow bf16-arithmetic
    tl.store(y_ptr + tl.arange(0, BN), tl.load(x_ptr + tl.arange(0, BN)))


@triton.jit
def suppressed_without_rule(x_ptr, y_ptr, BN: tl.constexpr):
    # lint: allow everything: because
    tl.store(y_ptr + tl.arange(0, BN), tl.load(x_ptr + tl.arange(0, BN)))


@triton.jit
def take_upper_half(x_ptr, y_ptr, BN: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BN), (tl.load(x_ptr + tl.arange(0, BN)) >> 32).to(tl.int32))
