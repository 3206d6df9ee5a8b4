"""Small kernels that tests emulate and compile."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(x_ptr, w_ptr, y_ptr, n_rows, eps, D: tl.constexpr, BM: tl.constexpr):
    o_cols = tl.arange(0, D)
    b_w = tl.load(w_ptr + o_cols).to(tl.float32)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BM), tl.num_programs(0)):
        o_rows = i_tile * BM + tl.arange(0, BM)
        o = o_rows[:, None] * D + o_cols[None, :]
        b_x = tl.load(x_ptr + o, mask=o_rows[:, None] < n_rows, other=0.0).to(tl.float32)
        b_rstd = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) * (1.0 / D) + eps)
        b_y = b_x * b_rstd[:, None] * b_w[None, :]
        tl.store(y_ptr + o, b_y.to(y_ptr.dtype.element_ty), mask=o_rows[:, None] < n_rows)


@triton.jit
def cast(x_ptr, y_ptr, BN: tl.constexpr):
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(y_ptr + o, tl.load(x_ptr + o).to(y_ptr.dtype.element_ty))


@triton.jit
def add_narrow(x_ptr, y_ptr, z_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.store(z_ptr + o, tl.load(x_ptr + o) + tl.load(y_ptr + o))


@triton.jit
def fill_scalar(y_ptr, value, BN: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BN), tl.zeros([BN], y_ptr.dtype.element_ty) + value)


@triton.jit
def typed_scalars(y_ptr, a: tl.int64, b: tl.int16, c: tl.uint8, d: tl.uint32, flag, nothing, one):
    total = a + b + c + d + one
    if flag:
        total += 1000
    if nothing is not None:
        total += 1_000_000
    tl.store(y_ptr, total)


@triton.jit
def expf(x_ptr, y_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.store(y_ptr + o, tl.exp(tl.load(x_ptr + o)))


@triton.jit
def order(log_ptr, counter_ptr):
    i = tl.load(counter_ptr)
    tl.store(log_ptr + i, tl.program_id(0))
    tl.store(counter_ptr, i + 1)


@triton.jit
def ids(y_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    nx, ny = tl.num_programs(0), tl.num_programs(1)
    tl.store(y_ptr + (z * ny + y) * nx + x, x + 10 * y + 100 * z)


@triton.jit
def long_loop(x_ptr, y_ptr, n, BN: tl.constexpr):
    o = tl.arange(0, BN)
    b_max = tl.full([BN], float("-inf"), tl.float32)
    b_sum = tl.zeros([BN], tl.float32)
    for _ in range(n):
        b_x = tl.load(x_ptr + o)
        b_new = tl.maximum(b_max, b_x)
        b_sum = b_sum * tl.exp(b_max - b_new) + tl.exp(b_x - b_new)
        b_max = b_new
    tl.store(y_ptr + o, b_sum)


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_a, m_b = (o_m[:, None] < M) & (o_k[None, :] < K), (o_k[:, None] < K) & (o_n[None, :] < N)
        a = tl.load(a_ptr + o_m[:, None] * K + o_k[None, :], mask=m_a, other=0.0)
        b = tl.load(b_ptr + o_k[:, None] * N + o_n[None, :], mask=m_b, other=0.0)
        acc = tl.dot(a, b, acc)
    m_c = (o_m[:, None] < M) & (o_n[None, :] < N)
    tl.store(c_ptr + o_m[:, None] * N + o_n[None, :], acc, mask=m_c)


@triton.jit
def functions(x_ptr, y_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    x = tl.load(x_ptr + o)
    y = tl.exp(x) + tl.log(tl.abs(x) + 1.0) + tl.rsqrt(x * x + 1.0) + tl.sigmoid(x) + tl.erf(x) + tl.math.tanh(x)
    tl.store(y_ptr + o, y + tl.argmax(x, 0))


@triton.jit
def transpose(x_ptr, y_ptr, BM: tl.constexpr, BN: tl.constexpr):
    o_m, o_n = tl.arange(0, BM), tl.arange(0, BN)
    b_x = tl.load(x_ptr + o_m[:, None] * BN + o_n[None, :])
    tl.store(y_ptr + o_n[:, None] * BM + o_m[None, :], tl.trans(b_x))


@triton.jit
def integer_arithmetic(x_ptr, y_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    x = tl.load(x_ptr + o)
    tl.store(y_ptr + o, (x // 3) * 2 + x % 5 + tl.minimum(x, 7))


@triton.jit
def maximum(x_ptr, y_ptr, n):
    i = tl.program_id(0)
    while i < n:
        tl.atomic_max(y_ptr, tl.load(x_ptr + i))
        i += tl.num_programs(0)


@triton.jit
def running_sum(x_ptr, y_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.store(y_ptr + o, tl.cumsum(tl.load(x_ptr + o), 0))


@triton.jit
def row_sums(x_ptr, y_ptr, n_rows, BM: tl.constexpr, D: tl.constexpr):
    o_rows = tl.program_id(0) * BM + tl.arange(0, BM)
    o = o_rows[:, None] * D + tl.arange(0, D)[None, :]
    b_x = tl.load(x_ptr + o, mask=o_rows[:, None] < n_rows, other=0.0)
    tl.store(y_ptr + o_rows, tl.sum(b_x, axis=1), mask=o_rows < n_rows)


@triton.jit
def every_second(x_ptr, y_ptr, BM: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr):
    rows = tl.arange(0, BM)[:, None]
    columns = tl.arange(0, D)[None, :]
    b_x = tl.load(x_ptr + rows * 2 * D + 2 * columns + FIRST)  # [BM, D]
    tl.compile_hint(b_x, "a_hint_that_changes_nothing")
    tl.store(y_ptr + rows * D + columns, b_x)


@triton.jit
def products_of_sums(a_ptr, b_ptr, c_ptr, N: tl.constexpr, D: tl.constexpr):
    o = tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]
    acc = tl.zeros((D, D), tl.float32)
    for k in tl.static_range(N):
        b_a = tl.load(a_ptr + k * D * D + o) + 1.0  # on a vector core, which hands it to the cube core
        acc = tl.dot(b_a, tl.load(b_ptr + k * D * D + o), acc)
    tl.store(c_ptr + o, acc)


@triton.jit
def product_in(a_ptr, b_ptr, c_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr):
    b_a = tl.load(a_ptr + tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :])
    b_b = tl.load(b_ptr + tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None, :])
    b_c = tl.dot(b_a, b_b, out_dtype=DTYPE)  # [M, N]
    tl.store(c_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], b_c)


@triton.jit
def exp_and_next(x_ptr, y_ptr, z_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    b_x = tl.load(x_ptr + o)
    tl.store(y_ptr + o, tl.exp(b_x))
    tl.store(z_ptr + o, b_x + 1.0)  # in place of b_x


@triton.jit
def narrow_row_sums(x_ptr, y_ptr, width, BM: tl.constexpr, D: tl.constexpr):
    o_rows, o_cols = tl.arange(0, BM), tl.arange(0, D)
    b_x = tl.load(x_ptr + o_rows[:, None] * width + o_cols[None, :], mask=o_cols[None, :] < width, other=0.0)
    tl.store(y_ptr + o_rows, tl.sum(b_x, axis=1))


@triton.jit
def scale_by_rounded(x_ptr, y_ptr, n, factor, BN: tl.constexpr):
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    b_y = tl.load(x_ptr + o, mask=o < n) * factor.to(x_ptr.dtype.element_ty)
    tl.store(y_ptr + o, b_y, mask=o < n)


@triton.jit
def store_every_third(x_ptr, y_ptr, n, BN: tl.constexpr):
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(y_ptr + o * 3, tl.load(x_ptr + o, mask=o < n), mask=o * 3 + 1 < 3 * n)


@triton.jit
def copy_strided(x_ptr, y_ptr, rows, columns, stride, BM: tl.constexpr, BN: tl.constexpr):
    o_row, o_col = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    inside = (o_row < rows) & (o_col < columns)
    b_x = tl.load(x_ptr + o_row * stride + o_col, mask=inside)
    tl.store(y_ptr + o_row * columns + o_col, b_x, mask=inside)


@triton.jit
def store_at_ticket(counter_ptr, y_ptr):
    tl.store(y_ptr, 7)
    ticket = tl.atomic_add(counter_ptr, 1)
    tl.store(y_ptr + ticket, tl.program_id(0))


@triton.jit
def store_addresses(x_ptr, y_ptr, n, BN: tl.constexpr):
    o = tl.arange(0, BN)
    tl.store(y_ptr + o, x_ptr + o)


@triton.jit
def method_of_a_tensor(x_ptr, y_ptr, n, BN: tl.constexpr):
    tl.store(y_ptr, tl.load(x_ptr + tl.arange(0, BN)).sum(0))


@triton.jit
def reshape_in_a_loop(x_ptr, y_ptr, n, BN: tl.constexpr):
    o = tl.arange(0, BN)
    b = tl.load(x_ptr + o)
    for _ in range(n):
        b = tl.reshape(b, (1, BN))
    tl.store(y_ptr + o, b)


@triton.jit
def polynomial(x_ptr, y_ptr, BN: tl.constexpr):
    o = tl.arange(0, BN)
    b = tl.load(x_ptr + o)
    tl.store(y_ptr + o, (b * b + b) * b - b)
