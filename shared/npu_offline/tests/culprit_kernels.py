"""Kernels that are right and come out wrong, kernels that are wrong, and kernels that are right."""

import triton
import triton.language as tl


@triton.jit
def not_true(x, y, N: tl.constexpr):
    """y is x < 0."""
    o = tl.arange(0, N)
    tl.store(y + o, ((tl.load(x + o) >= 0) != True).to(tl.int32))  # noqa: E712


@triton.jit
def is_true(x, y, N: tl.constexpr):
    """y is x >= 0."""
    o = tl.arange(0, N)
    tl.store(y + o, ((tl.load(x + o) >= 0) == True).to(tl.int32))  # noqa: E712


@triton.jit
def not_it(x, y, N: tl.constexpr):
    """y is x < 0."""
    o = tl.arange(0, N)
    tl.store(y + o, (~(tl.load(x + o) >= 0)).to(tl.int32))


@triton.jit
def shifted(x, y, N: tl.constexpr):
    """y is the upper 31 bits of x, whose sign bit may be set."""
    o = tl.arange(0, N)
    tl.store(y + o, (tl.load(x + o).to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True))


@triton.jit
def quotient(x, y, n, N: tl.constexpr):
    """y is x // n."""
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o) // n)


@triton.jit
def gathered(x, ids, y, stride, C: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """y is columns C to C + D of rows of x."""
    rows = tl.load(ids + tl.arange(0, N))
    d = tl.arange(C, C + D)
    tile = tl.load(x + rows[None, :] * stride + d[:, None])
    tl.store(y + tl.arange(0, N)[None, :] * D + tl.arange(0, D)[:, None], tile)


@triton.jit
def gathered_straight(x, ids, y, stride, C: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """y is columns C to C + D of rows of x."""
    rows = tl.load(ids + tl.arange(0, N))
    d = C + tl.arange(0, D)
    tile = tl.load(x + rows[None, :] * stride + d[:, None])
    tl.store(y + tl.arange(0, N)[None, :] * D + tl.arange(0, D)[:, None], tile)


@triton.jit
def every_third(x, y, n, N: tl.constexpr):
    """Every third element of y is one of x; its mask is one that triton-ascend drops."""
    o = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + o * 3, tl.load(x + o, mask=o < n), mask=o * 3 + 1 < 3 * n)


@triton.jit
def exchanged(x, y):
    """x becomes 1, y what it was."""
    tl.store(y, tl.atomic_xchg(x, 1))


@triton.jit
def high_half(x, y, N: tl.constexpr):
    """y is the high half of the square of x, which has no sign."""
    o = tl.arange(0, N)
    b_x = tl.load(x + o).to(tl.uint32, bitcast=True)
    tl.store(y + o, tl.umulhi(b_x, b_x).to(tl.int32, bitcast=True))


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    """y is softmax(x) if OTHER is -inf; with 0 it is wrong where all of a row is negative."""
    row = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    b_x = tl.load(x + row * columns + o, mask=o < columns, other=OTHER)
    e = tl.exp(b_x - tl.max(b_x, 0))
    tl.store(y + row * columns + o, e / tl.sum(e, 0), mask=o < columns)


@triton.jit
def unmasked(x, y, n, N: tl.constexpr):
    """y is 2 x, with bytes behind x."""
    o = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + o, tl.load(x + o) * 2, mask=o < n)


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c is a @ b."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    p_a = tl.make_block_ptr(a, (M, K), (K, 1), (tl.program_id(0) * BM, 0), (BM, BK), (1, 0))
    for k in range(0, K, BK):
        o_k = k + tl.arange(0, BK)
        b_a = tl.load(p_a, boundary_check=(0, 1), padding_option="zero")
        b_b = tl.load(b + o_k[:, None] * N + n[None, :], mask=(o_k < K)[:, None] & (n < N)[None, :], other=0)
        total += tl.dot(b_a, b_b)
        p_a = tl.advance(p_a, (0, BK))
    tl.store(c + m[:, None] * N + n[None, :], total.to(c.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def narrow_sum(x, y, columns, BLOCK: tl.constexpr):
    """y is the sum of each row of x, added in fp16 in whatever order."""
    row = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    tl.store(y + row, tl.sum(tl.load(x + row * columns + o, mask=o < columns, other=0), 0))


@triton.jit
def online(x, y, n_tiles, BLOCK: tl.constexpr):
    """y is logsumexp of each row of x; a loop carries two numbers."""
    row = tl.program_id(0)
    largest, total = -float("inf"), 0.0
    for i in range(n_tiles):
        b_x = tl.load(x + (row * n_tiles + i) * BLOCK + tl.arange(0, BLOCK))
        higher = tl.maximum(largest, tl.max(b_x, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(b_x - higher), 0)
        largest = higher
    tl.store(y + row, largest + tl.log(total))


@triton.jit
def doubled(x, y, n, N: tl.constexpr):
    """y is 2 x."""
    o = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)


@triton.jit
def raced(x, y, N: tl.constexpr):
    """Every program writes all of y."""
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(x + o) + tl.program_id(0))


@triton.jit
def accumulated(x, y, N: tl.constexpr):
    """y is the sum of x; its programs race."""
    o = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y, tl.load(y) + tl.sum(tl.load(x + o)))


@triton.jit
def summed_bytes(x, y, N: tl.constexpr):
    """y is the sum of x, which Triton 3.2 takes in int8."""
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, N)), 0).to(tl.int32))


@triton.jit
def bare_softmax(x, y, columns, BLOCK: tl.constexpr):
    """y is softmax(x), whose exponentials overflow."""
    row = tl.program_id(0)
    o = tl.arange(0, BLOCK)
    e = tl.exp(tl.load(x + row * columns + o, mask=o < columns, other=-float("inf")))
    tl.store(y + row * columns + o, e / tl.sum(e, 0), mask=o < columns)


@triton.jit
def weighted(x, v, y, N: tl.constexpr, D: tl.constexpr):
    """y is softmax(x) @ v, whose weights are rounded to fp16 as in attention."""
    row = tl.program_id(0)
    b_x = tl.load(x + row * N + tl.arange(0, N)).to(tl.float32)
    e = tl.exp(b_x - tl.max(b_x, 0))
    b_p = (e / tl.sum(e, 0)).to(tl.float16).to(tl.float32)
    b_v = tl.load(v + tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]).to(tl.float32)
    tl.store(y + row * D + tl.arange(0, D), tl.sum(b_p[:, None] * b_v, 0).to(tl.float16))


@triton.jit
def squares(x, y, N: tl.constexpr, NARROW: tl.constexpr):
    """y is the square of x, and with NARROW half of it, in fp16."""
    o = tl.arange(0, N)
    b_x = tl.load(x + o)
    tl.store(y + o, b_x * b_x * 0.0625 if NARROW else b_x * b_x)


@triton.jit
def normalised(x, y, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y is x without the mean of its row and divided by its deviation."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    o = tl.arange(0, COLUMNS)[None, :]
    inside = (i < rows) & (o < columns)
    b_x = tl.load(x + i * columns + o, mask=inside, other=0.0)
    b_x = b_x - tl.sum(b_x, 1)[:, None] / columns
    b_square = tl.where(inside, b_x * b_x, 0.0)
    tl.store(y + i * columns + o, b_x * tl.rsqrt(tl.sum(b_square, 1)[:, None] / columns + 1e-5), mask=inside)


@triton.jit
def joined(x, w, y, n, N: tl.constexpr):
    """Rows of y, of 24, are rows of x, of 8, and rows of w, of 16."""
    o = tl.program_id(0) * N + tl.arange(0, N)
    column, row = o % 24, o // 24
    b_x = tl.load(x + column + 8 * row, mask=(column < 8) & (o < n), other=0.0)
    b_w = tl.load(w + column - 8 + 16 * row, mask=(column >= 8) & (o < n), other=0.0)
    tl.store(y + o, tl.where(column < 8, b_x, b_w), mask=o < n)


@triton.jit
def late_blocks(x, y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """y is half of x; two block pointers in one loop are refused, and y is to be 2 x."""
    i = tl.program_id(0) * BM
    p_x = tl.make_block_ptr(x, (M, N), (N, 1), (i, 0), (BM, BN), (1, 0))
    p_y = tl.make_block_ptr(y, (M, N), (N, 1), (i, 0), (BM, BN), (1, 0))
    for _ in range(tl.cdiv(N, BN)):
        p_x = tl.advance(p_x, (0, BN))
        tl.store(p_y, tl.load(p_x, boundary_check=(0, 1), padding_option="zero") / 2, boundary_check=(0, 1))
        p_y = tl.advance(p_y, (0, BN))


@triton.jit
def last_product(a, b, c, K, B: tl.constexpr):
    """c is the product of the last columns of a and rows of b, which 1.0.0 refuses; to be a @ b."""
    o = tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        total = tl.dot(tl.load(a + o[:, None] * K + k + o[None, :]), tl.load(b + (k + o)[:, None] * B + o[None, :]))
    tl.store(c + o[:, None] * B + o[None, :], total.to(tl.float16))


@triton.jit
def products_of_a_group(a, b, c, G: tl.constexpr, M: tl.constexpr):
    g, i, j = tl.arange(0, G)[:, None, None], tl.arange(0, M)[None, :, None], tl.arange(0, M)[None, None, :]
    o = g * M * M + i * M + j
    tl.store(c + o, tl.dot(tl.load(a + o), tl.load(b + o)))


@triton.jit
def unlike_products(a, b, y, N: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.arange(0, N), tl.arange(0, N), tl.arange(0, K)
    b_a, b_b = tl.load(a + i[:, None] * K + k), tl.load(b + j[:, None] * K + k)
    tl.store(y + i[:, None] * N + j, tl.dot(b_a, b_b))


@triton.jit
def helper_of_another_shape(x, N: tl.constexpr):
    return x + tl.arange(0, N + N)


@triton.jit
def calls_a_wrong_helper(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, helper_of_another_shape(tl.load(x + o), N))


@triton.jit
def for_cuda(y):
    tl.store(y, tl.extra.cuda.smid())


@triton.jit
def with_assembly(x, y, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x = tl.load(x + o)
    b_y = tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y + o, b_y)


@triton.jit
def nested_return(flag, x, y, n, N: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    b_flag = tl.load(flag)
    if b_flag > 0:
        if b_flag > 1:
            return
    tl.store(y + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)


@triton.jit
def two_returns(flag, x, y, n, N: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    b_flag = tl.load(flag)
    if b_flag > 1:
        return
    if b_flag < -1:
        return
    tl.store(y + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)


@triton.jit
def below(x, z, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, ((tl.load(x + o) > 0) < (tl.load(z + o) > 0)).to(tl.int32))


@triton.jit
def summed(x, y, N: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, N)), 0))


@triton.jit
def states(k, v, h, T, BT: tl.constexpr, D: tl.constexpr):
    """h is k.T @ v after each tile of BT rows."""
    t, d = tl.arange(0, BT), tl.arange(0, D)
    b_h = tl.zeros([D, D], tl.float32)
    for i in range(0, T, BT):
        b_k = tl.load(k + (i + t)[None, :] * D + d[:, None])
        b_h += tl.dot(b_k, tl.load(v + (i + t)[:, None] * D + d[None, :]), allow_tf32=False)
        tl.store(h + i // BT * D * D + d[:, None] * D + d[None, :], b_h)


@triton.jit
def product_in_half(a, b, c, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c + o, tl.dot(tl.load(a + o), tl.load(b + o), out_dtype=tl.float16))


@triton.jit
def divided(x, by, y, z, N: tl.constexpr):
    o = tl.arange(0, N)
    b_x, b_by = tl.load(x + o), tl.load(by + o)
    tl.store(y + o, b_x // b_by)
    tl.store(z + o, b_x % b_by)


@triton.jit
def described(x, M, N, BM: tl.constexpr, BN: tl.constexpr):
    tile = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    tile.store([row, column], tl.abs(tile.load([row, column])))


@triton.jit
def looked_up(x, table, y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(y + o, tl.load(table + tl.load(x + o).to(tl.uint8), mask=o < N))


@triton.jit
def to_bytes(x, y, n, scale, CLAMPS: tl.constexpr, N: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    b = tl.load(x + o, mask=o < n, other=0.0) * scale
    if CLAMPS:
        b = tl.minimum(tl.maximum(b, -128.0), 127.0)
    tl.store(y + o, b.to(tl.int8), mask=o < n)


@triton.jit
def root(x, y):
    b_x = tl.load(x + tl.program_id(0))
    low = 0
    high = b_x + 1
    while low < high:  # high = low + 1 stays so
        middle = (low + high) // 2
        if middle * middle <= b_x:
            low = middle
        else:
            high = middle
    tl.store(y + tl.program_id(0), low)


@triton.jit
def add_to_each(table, lengths, y, N: tl.constexpr):
    i = tl.program_id(0)
    p = tl.load(table + i).to(tl.pointer_type(tl.float32))
    o = tl.arange(0, N)
    tl.store(y + i * N + o, tl.load(p + o, mask=o < tl.load(lengths + i), other=0.0) + 1.0)
