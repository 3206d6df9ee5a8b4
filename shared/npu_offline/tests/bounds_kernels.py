"""Kernels for tests of bounds: right ones, and ones that go wrong for some sizes."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    tl.store(out + o, tl.load(x + o, mask=m) + tl.load(y + o, mask=m), mask=m)


@triton.jit
def no_mask(x, y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n))


@triton.jit
def one_too_many(x, y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n + 1), mask=o < n)


@triton.jit
def less_or_equal(x, y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n), mask=o <= n)


@triton.jit
def rows(x, y, n_rows, n_cols, s_x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr):
    """y = x, whose rows are s_x apart. WIDE: offsets of x are 64-bit."""
    o_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (o_row < n_rows)[:, None] & (o_col < n_cols)[None, :]
    o_x = o_row.to(tl.int64) * s_x if WIDE else o_row * s_x
    b_x = tl.load(x + o_x[:, None] + o_col[None, :], mask=m)
    tl.store(y + o_row.to(tl.int64)[:, None] * n_cols + o_col[None, :], b_x, mask=m)


@triton.jit
def columns(x, y, n_cols, BLOCK: tl.constexpr, STOP: tl.constexpr):
    """y = the sums of x's rows; x moves along, masked where the loop's column is below n_cols + STOP."""
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.arange(0, BLOCK)
    p_x = x + i_row * n_cols + o_col
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_col in range(0, n_cols, BLOCK):
        b_sum += tl.load(p_x, mask=i_col + o_col < n_cols + STOP, other=0.0)
        p_x += BLOCK
    tl.store(y + i_row, tl.sum(b_sum))


@triton.jit
def strided(x, y, n, BLOCK: tl.constexpr):
    """y = 2 x; program i of n takes tiles i, i + n, i + 2 n and so on."""
    for i in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        o = i * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + o, tl.load(x + o, mask=o < n) * 2, mask=o < n)


@triton.jit
def long_loop(x, y, n, BLOCK: tl.constexpr):
    """y = the sum of x, by one program: the number behind the loop's last may be too large for 32 bits."""
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_sum += tl.load(x + o, mask=o < n, other=0.0)
    tl.store(y, tl.sum(b_sum))


@triton.jit
def after_loop(x, y, n, BLOCK: tl.constexpr):
    """y = the last tile of x, which is a tile before the number that the loop ends with."""
    o, i_stop = tl.arange(0, BLOCK), 0
    for _ in range(0, n, BLOCK):
        i_stop += BLOCK
    tl.store(y + o, tl.load(x + i_stop - BLOCK + o))


@triton.jit
def grouped(y, n_rows, n_cols, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """y = 1; programs take tiles in the order of a grouped matrix product."""
    n_m, n_n = tl.cdiv(n_rows, BLOCK), tl.cdiv(n_cols, BLOCK)
    i_group = tl.program_id(0) // (GROUP * n_n)
    n_group = tl.minimum(n_m - i_group * GROUP, GROUP)
    i_in_group = tl.program_id(0) % (GROUP * n_n)
    o_row = (i_group * GROUP + i_in_group % n_group) * BLOCK + tl.arange(0, BLOCK)
    o_col = (i_in_group // n_group) * BLOCK + tl.arange(0, BLOCK)
    m = (o_row < n_rows)[:, None] & (o_col < n_cols)[None, :]
    tl.store(y + o_row[:, None] * n_cols + o_col[None, :], 1.0, mask=m)


@triton.jit
def gather(table, ids, out, n_cols, BLOCK: tl.constexpr):
    i_token = tl.program_id(0).to(tl.int64)
    i_row = tl.load(ids + i_token)
    o_col = tl.arange(0, BLOCK)
    m = o_col < n_cols
    tl.store(out + i_token * n_cols + o_col, tl.load(table + i_row * n_cols + o_col, mask=m), mask=m)


@triton.jit
def branch(y, n, BLOCK: tl.constexpr):
    """The first number of a tile is too large for 32 bits in the last programs, and negative: the branch is taken."""
    i_first = tl.program_id(0) * BLOCK
    if i_first < n:
        tl.store(y + i_first, 1.0)


@triton.jit
def doubled_while(y, n):
    """A loop whose next number is no sum."""
    i = 1
    while i < n:
        tl.store(y + i, 1.0)
        i *= 2


@triton.jit
def positive(x, y, n, BLOCK: tl.constexpr):
    """A mask that depends on data as well."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + o, mask=o < n, other=0.0)
    tl.store(y + o, b_x, mask=(o < n) & (b_x > 0))


@triton.jit
def blocks(x, y, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BOTH: tl.constexpr):
    """y = the sums of x's rows, by block pointers. BOTH: x is checked along both axes."""
    p_x = tl.make_block_ptr(x, (n_rows, n_cols), (n_cols, 1), (tl.program_id(0) * BLOCK_M, 0), (BLOCK_M, BLOCK_N), (1, 0))
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    for _ in range(0, n_cols, BLOCK_N):
        b_sum += tl.sum(tl.load(p_x, boundary_check=(0, 1) if BOTH else (0,)), 1)
        p_x = tl.advance(p_x, (0, BLOCK_N))
    p_y = tl.make_block_ptr(y, (n_rows,), (1,), (tl.program_id(0) * BLOCK_M,), (BLOCK_M,), (0,))
    tl.store(p_y, b_sum, boundary_check=(0,))


@triton.jit
def transposed(x, y, n_rows, n_cols, BLOCK: tl.constexpr):
    """y = x^T of one tile, through a reshaped range."""
    o = tl.arange(0, BLOCK * BLOCK)
    o_row, o_col = tl.reshape(o // BLOCK, (BLOCK, BLOCK)), tl.reshape(o % BLOCK, (BLOCK, BLOCK))
    m = (o_row < n_rows) & (o_col < n_cols)
    b_x = tl.load(x + o_row * n_cols + o_col, mask=m)
    tl.store(y + tl.trans(o_col * n_rows + o_row), tl.trans(b_x), mask=tl.trans(m))


@triton.jit
def returns(x, y, n, limit, BLOCK: tl.constexpr):
    """y = x in programs that do not return early; the last of them that gets so far stores places."""
    if tl.program_id(0) >= limit:
        return
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) == limit - 1:
        tl.store(y + o, o.to(tl.float32), mask=o < n)
        return
    tl.store(y + o, tl.load(x + o))
