"""The smallest kernels that show what a compiler does wrong. What each one is to show: COMPILER_FAULTS.md."""

import fault_helpers
import triton
import triton.language as tl


@triton.jit
def shared_buffer_kernel(p_x, p_y, n_rows, n_blocks, BLOCK: tl.constexpr):
    """Row i of y is the sum of rows i * n_blocks to (i + 1) * n_blocks - 1 of x, which is loaded one row ahead."""
    o_col = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_col).to(tl.float32)
    for i_row in tl.range(0, n_rows):
        p_next = p_x + (i_row * n_blocks + 1) * BLOCK
        b_sum = b_x  # begins as what is carried; a product with a computed 1.0 keeps them apart
        b_x = tl.load(p_next + o_col).to(tl.float32)
        for _ in tl.range(1, n_blocks):
            p_next += BLOCK
            b_next = tl.load(p_next + o_col)
            b_sum += b_x * b_x
            b_x = b_next.to(tl.float32)
        tl.store(p_y + i_row * BLOCK + o_col, b_sum)


@triton.jit
def dropped_rounding_kernel(p_x, p_y, BLOCK: tl.constexpr, APART: tl.constexpr):
    """y = 3 round(x / 3), x and y fp32, rounded to bf16. APART: a change of shape stands between the casts."""
    o_col = tl.arange(0, BLOCK)
    b_x = (tl.load(p_x + o_col) * (1.0 / 3.0)).to(tl.bfloat16)
    if APART:
        b_x = tl.reshape(tl.expand_dims(b_x, 0).to(tl.float32), (BLOCK,))
    else:
        b_x = b_x.to(tl.float32)
    tl.store(p_y + o_col, b_x * 3.0)


@triton.jit
def unrounded_arithmetic_kernel(p_x, p_w, p_y, BLOCK: tl.constexpr, OPERATION: tl.constexpr):
    """y, fp32, is the sum, difference or product of x and w, rounded to their dtype."""
    o_col = tl.arange(0, BLOCK)
    b_x, b_w = tl.load(p_x + o_col), tl.load(p_w + o_col)
    if OPERATION == "+":
        b_y = b_x + b_w
    elif OPERATION == "-":
        b_y = b_x - b_w
    else:
        b_y = b_x * b_w
    tl.store(p_y + o_col, b_y.to(tl.float32))


@triton.jit
def unordered_sum_kernel(p_x, p_y, n_blocks, n_rows, n_cols, BLOCK: tl.constexpr):
    """y[j] = the sum of x[i, j] over rows i; x fp32 [n_rows, n_cols], n_cols = n_blocks * BLOCK."""
    o_col = tl.arange(0, BLOCK)
    for i_block in tl.range(0, n_blocks):
        b_sum = tl.zeros([BLOCK], tl.float32)  # in one of two buffers, in turns
        for i_row in tl.range(0, n_rows):
            b_sum += tl.load(p_x + i_row * n_cols + i_block * BLOCK + o_col)  # no barrier between these sums
        tl.store(p_y + i_block * BLOCK + o_col, b_sum)


@triton.jit
def lost_in_branch_kernel(p_x, p_y, n_tiles, n_blocks, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BRANCH: tl.constexpr):
    """y[t] = the sum of x[t, i] exp(m[t, i] - the largest m[t, :]) over i > 0, m[t, i] the largest number of each row.

    x[t, i] and y[t] are fp32 [BLOCK_M, BLOCK_D]. In the first tile m[t, 0] stands for the largest. BRANCH: later tiles look
    for the largest in a branch; without it, by a selection.
    """
    o_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    is_careful = False  # carried by the outer loop
    for i_tile in tl.range(0, n_tiles):
        p_block = p_x + i_tile * n_blocks * BLOCK_M * BLOCK_D
        b_largest = tl.max(tl.load(p_block + o_tile), 1)  # [BLOCK_M]
        b_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i_block in tl.range(1, n_blocks):
            b_x = tl.load(p_block + i_block * BLOCK_M * BLOCK_D + o_tile)  # [BLOCK_M, BLOCK_D]
            b_score = tl.max(b_x, 1)
            if BRANCH:
                if is_careful:
                    b_higher = tl.where(b_score > b_largest, b_score, b_largest)
                    b_sum, b_largest = b_sum * tl.exp(b_largest - b_higher)[:, None], b_higher
            else:
                b_higher = tl.where(is_careful & (b_score > b_largest), b_score, b_largest)
                b_sum, b_largest = b_sum * tl.exp(b_largest - b_higher)[:, None], b_higher
            b_sum += b_x * tl.exp(b_score - b_largest)[:, None]
        is_careful = True
        tl.store(p_y + i_tile * BLOCK_M * BLOCK_D + o_tile, b_sum)


@triton.jit
def reused_flag_kernel(p_x, p_y, n_tiles, n_blocks, BLOCK: tl.constexpr, EXCHANGES: tl.constexpr):
    """y[t] = log(sum(exp(s[t, i]))) over i, + e; s[t, i] is the sum of x[t, i], fp32 [BLOCK].

    e is x[0, 0, 0] halved and exponentiated EXCHANGES times: the scalar unit multiplies, the vector unit exponentiates, and
    each time there are two flags between them.
    """
    o_row, o_col = tl.arange(0, 1), tl.arange(0, BLOCK)[None, :]
    b_extra = tl.load(p_x + o_row)  # [1]
    for _ in tl.static_range(EXCHANGES):
        b_extra = tl.exp(b_extra * 0.5)
    for i_tile in tl.range(0, n_tiles):
        b_sum = tl.zeros([1], tl.float32)
        b_largest = tl.full([1], float("-inf"), tl.float32)
        for i_block in tl.range(0, n_blocks):
            b_score = tl.sum(tl.load(p_x + (i_tile * n_blocks + i_block) * BLOCK + o_col), 1)  # [1]
            b_higher = tl.where(b_score > b_largest, b_score, b_largest)
            b_sum = b_sum * tl.exp(b_largest - b_higher) + tl.exp(b_score - b_higher)
            b_largest = b_higher
        tl.store(p_y + i_tile + o_row, b_largest + tl.log(b_sum) + b_extra)  # a flag of this one is set too early


@triton.jit
def dropped_scalar_rounding_kernel(p_x, p_y, BLOCK: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr):
    """y[i] = 3 round(sum(x[i])), x and y fp32, rounded to DTYPE. TILE: the sum is a tile of one number."""
    i_row = tl.program_id(0)
    b_x = tl.load(p_x + i_row * BLOCK + tl.arange(0, BLOCK))
    if TILE:
        b_sum = tl.sum(b_x[None, :], 1).to(DTYPE)  # [1]
        b_sum = tl.reshape(tl.expand_dims(b_sum, 0).to(tl.float32), (1,))
        tl.store(p_y + i_row + tl.arange(0, 1), b_sum * 3.0)
    else:
        tl.store(p_y + i_row, tl.sum(b_x).to(DTYPE).to(tl.float32) * 3.0)


@triton.jit
def dropped_truncation_kernel(p_x, p_y, BLOCK: tl.constexpr, DTYPE: tl.constexpr, THROUGH: tl.constexpr):
    """y = x without its digits, x and y fp32. THROUGH: int32 stands between the casts to and from DTYPE."""
    o_col = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_col).to(DTYPE)
    if THROUGH:
        b_x = b_x.to(tl.int32)
    tl.store(p_y + o_col, b_x.to(tl.float32))


@triton.jit
def unordered_while_kernel(p_x, p_y, n_rows, BLOCK: tl.constexpr, WHILE: tl.constexpr):
    """y[j] = the sum of x[i, j] over rows i; x and y fp32. WHILE: a `while` carries the sum, not a `for`."""
    o_col = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    if WHILE:
        i_row = 0
        while i_row < n_rows:
            b_sum += tl.load(p_x + i_row * BLOCK + o_col)
            i_row += 1
    else:
        for i_row in tl.range(0, n_rows):
            b_sum += tl.load(p_x + i_row * BLOCK + o_col)
    tl.store(p_y + o_col, b_sum)


@triton.jit
def ragged_mask_kernel(p_x, p_y, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, AXES: tl.constexpr):
    """y = x where there is any, n numbers, and 0 behind; y has ROWS * BLOCK. AXES: of the tile, 1 or 2."""
    if AXES == 2:
        o = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    else:
        o = tl.arange(0, ROWS * BLOCK)
    tl.store(p_y + o, tl.load(p_x + o, mask=o < n, other=0.0))


@triton.jit
def changed(b_x):
    return b_x * 10.0


@triton.jit
def helpers_of_one_name_kernel(p_x, p_y, BLOCK: tl.constexpr):
    """y = 10 x + 1; both helpers are called `changed`."""
    o_col = tl.arange(0, BLOCK)
    tl.store(p_y + o_col, fault_helpers.changed(changed(tl.load(p_x + o_col))))


@triton.jit
def unlocked_exchange_kernel(p_x, p_y, BLOCK: tl.constexpr, ONE: tl.constexpr):
    """x and row i of y change places, one program i after another; x and y fp32. ONE: numbers, and they are added up."""
    i_row = tl.program_id(0)
    if ONE:
        tl.store(p_y + i_row, tl.atomic_add(p_x, tl.load(p_y + i_row)))
    else:
        p_row = p_y + i_row * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_row, tl.atomic_xchg(p_x + tl.arange(0, BLOCK), tl.load(p_row)))


@triton.jit
def unsigned_product_kernel(p_x, p_y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o).to(tl.uint32, bitcast=True)
    tl.store(p_y + o, tl.umulhi(b_x, b_x).to(tl.int32, bitcast=True))


@triton.jit
def lost_product_kernel(p_a, p_b, p_sum, BLOCK: tl.constexpr):
    """Adds a b to a sum [BLOCK, BLOCK]; all fp32."""
    o = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.atomic_add(p_sum + o, tl.dot(tl.load(p_a + o), tl.load(p_b + o)))


@triton.jit
def doubled_sum_kernel(p_a, p_b, p_sum, factor, BLOCK: tl.constexpr):
    """Adds factor a b to a sum [BLOCK, BLOCK]; all fp32."""
    o = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.atomic_add(p_sum + o, tl.dot(tl.load(p_a + o), tl.load(p_b + o)) * factor)


@triton.jit
def swapped_value_kernel(p_lock, p_old):
    """Takes a free lock, and stores what it was."""
    tl.store(p_old, tl.atomic_cas(p_lock, 0, 1))


@triton.jit
def ragged_product_kernel(p_a, p_b, p_y, n, BLOCK: tl.constexpr, CHOSEN: tl.constexpr):
    """y = a b, rows of a from n on taken as zeros; all fp32 [BLOCK, BLOCK]. CHOSEN: rows of y too."""
    o_row = tl.arange(0, BLOCK)[:, None]
    o = o_row * BLOCK + tl.arange(0, BLOCK)[None, :]
    b_y = tl.dot(tl.load(p_a + o, mask=o_row < n, other=0.0), tl.load(p_b + o))
    tl.store(p_y + o, tl.where(o_row < n, b_y, 0.0) if CHOSEN else b_y)


@triton.jit
def shifted_mask_kernel(p_x, p_y, n, BLOCK: tl.constexpr, PLAIN: tl.constexpr):
    """y[i] = x[i - 3], zeros before. PLAIN: the mask compares the range itself, and not what is 3 less."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = o - 3
    inside = (o >= 3) & (o < n + 3) if PLAIN else (i >= 0) & (i < n)
    tl.store(p_y + o, tl.load(p_x + i, mask=inside, other=0.0), mask=o < n)


@triton.jit
def partly_checked_kernel(p_x, p_y, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BOTH: tl.constexpr):
    """y = x [n_rows, n_cols] by block pointers, whose columns alone are checked, or BOTH."""
    o_row = tl.program_id(0) * BLOCK_M
    p_x = tl.make_block_ptr(p_x, (n_rows, n_cols), (n_cols, 1), (o_row, 0), (BLOCK_M, BLOCK_N), (1, 0))
    p_y = tl.make_block_ptr(p_y, (n_rows, n_cols), (n_cols, 1), (o_row, 0), (BLOCK_M, BLOCK_N), (1, 0))
    if BOTH:
        tl.store(p_y, tl.load(p_x, boundary_check=(0, 1)), boundary_check=(0, 1))
    else:
        tl.store(p_y, tl.load(p_x, boundary_check=(1,)), boundary_check=(1,))


@triton.jit
def lost_exchange_kernel(p_x, p_new, p_old, n, BLOCK: tl.constexpr, LOADED: tl.constexpr):
    """old = x, x = n. LOADED: x = new, a tile that was loaded."""
    o = tl.arange(0, BLOCK)
    if LOADED:
        tl.store(p_old + o, tl.atomic_xchg(p_x + o, tl.load(p_new + o)))
    else:
        tl.store(p_old, tl.atomic_xchg(p_x, n))


@triton.jit
def taken_lock_kernel(p_lock, p_y):
    """Each program adds 1 to y behind a lock."""
    while tl.atomic_or(p_lock, 1) == 1:
        pass
    tl.store(p_y, tl.load(p_y) + 1)
    tl.atomic_and(p_lock, 0)


@triton.jit
def two_updates_kernel(p_x, ONE: tl.constexpr):
    """Sets the lowest two bits of x. ONE: at one place, in a loop."""
    if ONE:
        for i in tl.range(0, 2):
            tl.atomic_or(p_x, 1 << i)
    else:
        tl.atomic_or(p_x, 1)
        tl.atomic_or(p_x, 2)


@triton.jit
def lost_wait_kernel(p_turn, p_y):
    """y = 1 after a program that never comes has set turn to 1."""
    while tl.load(p_turn, volatile=True) != 1:
        pass
    tl.store(p_y, 1)


@triton.jit
def remainder_rows_kernel(p_x, p_y, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CUT: tl.constexpr):
    """Row i of y is row i % n_rows of x [n_rows, n_cols], and zeros behind. CUT: rows from n_rows on are zeros."""
    o_row, o_col = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if CUT:
        inside = (o_row < n_rows)[:, None] & (o_col < n_cols)[None, :]
        b_x = tl.load(p_x + o_row[:, None] * n_cols + o_col[None, :], mask=inside, other=0.0)
    else:
        b_x = tl.load(p_x + (o_row % n_rows)[:, None] * n_cols + o_col[None, :], mask=o_col[None, :] < n_cols, other=0.0)
    tl.store(p_y + o_row[:, None] * BLOCK_N + o_col[None, :], b_x)


@triton.jit
def compared_mask_kernel(p_x, p_number, p_y, BLOCK: tl.constexpr, OPERATION: tl.constexpr):
    """y is how x > 0 compares with number > 0, or with True."""
    o = tl.arange(0, BLOCK)
    b_m, is_set = tl.load(p_x + o) > 0, tl.load(p_number) > 0
    if OPERATION == "== True":
        b_m = b_m == True  # noqa: E712
    elif OPERATION == "!=":
        b_m = b_m != is_set
    else:
        b_m = b_m ^ is_set
    tl.store(p_y + o, b_m.to(tl.int32))


@triton.jit
def unsigned_kernel(p_x, p_y, BLOCK: tl.constexpr, DTYPE: tl.constexpr, OPERATION: tl.constexpr):
    """Of x, whose bits are those of DTYPE: shifted by one, as int64 or fp16, or the larger or smaller one of x and 1."""
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o).to(DTYPE, bitcast=True)
    b_one = tl.full([BLOCK], 1, DTYPE)
    if OPERATION == ">>":
        b_y = b_x >> 1
    elif OPERATION == "masked >>":
        b_y = (tl.load(p_x + o) >> 1) & 0x7FFFFFFF
    elif OPERATION == "wider":
        b_y = b_x.to(tl.int64)
    elif OPERATION == "masked wider":
        b_y = tl.load(p_x + o).to(tl.int64) & 0xFFFFFFFF
    elif OPERATION == "float16":
        b_y = b_x.to(tl.float16)
    elif OPERATION == "maximum":
        b_y = tl.maximum(b_x, b_one)
    else:
        b_y = tl.minimum(b_x, b_one)
    tl.store(p_y + o, b_y.to(p_y.dtype.element_ty, bitcast=True))


@triton.jit
def byte_sum_kernel(p_x, p_y, BLOCK: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """y is twice x, in DTYPE of 8 bits, as int64. WIDE: in int32, of which 8 bits are taken."""
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o).to(DTYPE, bitcast=True)
    if WIDE:
        b_x = b_x.to(tl.int32)
        tl.store(p_y + o, (b_x + b_x) & 0xFF)
    else:
        tl.store(p_y + o, (b_x + b_x).to(tl.int64))


@triton.jit
def rounded_division_kernel(p_x, p_y, n, BLOCK: tl.constexpr, OPERATION: tl.constexpr):
    """y is the quotient of x and n, or the remainder. "wide //" divides in int64, "range //" a range."""
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o)
    if OPERATION == "//":
        b_y = b_x // n
    elif OPERATION == "wide //":
        b_y = (b_x.to(tl.int64) // n).to(tl.int32)
    elif OPERATION == "range //":
        b_y = o // n
    else:
        b_y = b_x % n
    tl.store(p_y + o, b_y)


@triton.jit
def summed_mask_kernel(p_x, p_y, BLOCK: tl.constexpr, DTYPE: tl.constexpr, RUNNING: tl.constexpr):
    """y is how many of x are positive, counted in DTYPE. RUNNING: up to each."""
    o = tl.arange(0, BLOCK)
    b_m = (tl.load(p_x + o) > 0).to(DTYPE)
    if RUNNING:
        tl.store(p_y + o, tl.cumsum(b_m, 0).to(tl.int32))
    else:
        tl.store(p_y, tl.sum(b_m, 0).to(tl.int32))


@triton.jit
def larger_number_kernel(p_x, p_y, p_largest, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """y is the larger one of x and 0, and `largest` the largest of x. ALL: NaN stays NaN in y."""
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o)
    tl.store(p_largest, tl.max(b_x, 0))
    if ALL:
        tl.store(p_y + o, tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL))
    else:
        tl.store(p_y + o, tl.maximum(b_x, 0.0))


@triton.jit
def one_erf_kernel(p_x, p_y):
    """y is erf(x), one number."""
    tl.store(p_y, tl.erf(tl.load(p_x)))


@triton.jit
def composed_operation_kernel(p_x, p_y, BLOCK: tl.constexpr, OPERATION: tl.constexpr):
    """What is lost in the square of x where it is rounded, 2 to the power of x, or e to the power of x."""
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o)
    if OPERATION == "fma":
        b_y = tl.fma(b_x, b_x, -(b_x * b_x))
    elif OPERATION == "exp2":
        b_y = tl.exp2(b_x)
    else:
        b_y = tl.exp(b_x)
    tl.store(p_y + o, b_y)


@triton.jit
def lost_start_kernel(p_index, p_x, p_y, START: tl.constexpr, BLOCK: tl.constexpr, APART: tl.constexpr):
    """y[j] = x[index[j] + START + j]. APART: START is added to a range from 0."""
    o = tl.arange(0, BLOCK)
    o_from = START + o if APART else tl.arange(START, START + BLOCK)
    tl.store(p_y + o, tl.load(p_x + tl.load(p_index + o) + o_from))


@triton.jit
def summed_products_kernel(p_x, p_y, p_sum, n, BLOCK: tl.constexpr):
    """The sum of products of rows of x and y, fp32 [n, BLOCK]."""
    o = tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, n):
        b_sum += tl.load(p_x + i * BLOCK + o) * tl.load(p_y + i * BLOCK + o)
    tl.store(p_sum + o, b_sum)


@triton.jit
def with_tile_added(b_largest, b_sum, p_x):
    b_x = tl.load(p_x).to(tl.float32)
    b_higher = tl.maximum(b_largest, tl.max(b_x, 0))
    return b_higher, b_sum * tl.exp(b_largest - b_higher) + tl.sum(tl.exp(b_x - b_higher), 0)


@triton.jit
def unrolled_logsumexp_kernel(p_x, p_y, BLOCK: tl.constexpr, TURNS: tl.constexpr, UNROLLED: tl.constexpr):
    """log(sum(exp(x))), x bf16 [TURNS * BLOCK]. UNROLLED: `tl.static_range`, not `tl.range`."""
    o = tl.arange(0, BLOCK)
    b_largest, b_sum = -float("inf"), 0.0
    if UNROLLED:
        for i in tl.static_range(TURNS):
            b_largest, b_sum = with_tile_added(b_largest, b_sum, p_x + i * BLOCK + o)
    else:
        for i in tl.range(TURNS):
            b_largest, b_sum = with_tile_added(b_largest, b_sum, p_x + i * BLOCK + o)
    tl.store(p_y, b_largest + tl.log(b_sum))


@triton.jit
def every_second_kernel(p_x, p_y, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """y is every second element of x, n in all. MASKED: with a mask of all."""
    o = tl.arange(0, BLOCK)
    if MASKED:
        tl.store(p_y + o, tl.load(p_x + 2 * o, mask=o < n))
    else:
        tl.store(p_y + o, tl.load(p_x + 2 * o))


@triton.jit
def carried_range_kernel(p_x, p_y, N: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr):
    """y is x, N elements. COUNTED: the loop counts blocks; else it carries their range."""
    o = tl.arange(0, BLOCK)
    for i in range(tl.cdiv(N, BLOCK)):
        if COUNTED:
            o = i * BLOCK + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o, mask=o < N)
        tl.store(p_y + o, b_x, mask=o < N)
        if not COUNTED:
            o += BLOCK


@triton.jit
def gathered_operand_kernel(p_a, p_b, p_y, k, n, B: tl.constexpr, REMAINDER: tl.constexpr):
    """y is a @ b, a fp16 [B, k], b fp16 [k, n]. REMAINDER: of columns behind n the first are read; else they are masked."""
    o = tl.arange(0, B)
    o_col = tl.program_id(0) * B + o
    o_from = o_col % n if REMAINDER else o_col
    p_a += o[:, None] * k + o[None, :]
    p_b += o[:, None] * n + o_from[None, :]
    b_y = tl.zeros([B, B], tl.float32)
    for i in range(tl.cdiv(k, B)):
        b_a = tl.load(p_a, mask=o[None, :] < k - i * B, other=0.0)
        b_b = tl.load(p_b, mask=o[:, None] < k - i * B, other=0.0)
        b_y = tl.dot(b_a, b_b, b_y)
        p_a += B
        p_b += B * n
    tl.store(p_y + o[:, None] * n + o_col[None, :], b_y, mask=(o_col < n)[None, :])


@triton.jit
def lost_rest_kernel(p_flag, p_x, p_y, n, BLOCK: tl.constexpr, NESTED: tl.constexpr):
    """y is 2 * x where the flag is 0. NESTED: a return in a branch of a branch; else two returns that do the same."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    flag = tl.load(p_flag)
    if NESTED:
        if flag > 0:
            if flag > 1:
                return
    else:
        if flag > 1:
            tl.store(p_y + o, tl.zeros([BLOCK], tl.float32), mask=o < n)
            return
        if flag > 0:
            tl.store(p_y + o, tl.zeros([BLOCK], tl.float32), mask=o < n)
            return
    b_x = tl.load(p_x + o, mask=o < n)
    tl.store(p_y + o, b_x * 2, mask=o < n)


@triton.jit
def plain_return_kernel(p_flag, p_x, p_y, n, BLOCK: tl.constexpr):
    """y is 2 * x where the flag is at most 1."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    flag = tl.load(p_flag)
    if (flag > 0) & (flag > 1):
        return
    tl.store(p_y + o, tl.load(p_x + o, mask=o < n) * 2, mask=o < n)


@triton.jit
def ordered_masks_kernel(p_x, p_z, p_y, BLOCK: tl.constexpr, OPERATION: tl.constexpr):
    """y is how the masks x > 0 and z > 0 compare, as int32."""
    o = tl.arange(0, BLOCK)
    b_m, b_other = tl.load(p_x + o) > 0, tl.load(p_z + o) > 0
    if OPERATION == "<":
        b_y = b_m < b_other
    elif OPERATION == "<=":
        b_y = b_m <= b_other
    elif OPERATION == ">":
        b_y = b_m > b_other
    elif OPERATION == ">=":
        b_y = b_m >= b_other
    else:
        b_y = ~b_m & b_other
    tl.store(p_y + o, b_y.to(tl.int32))


@triton.jit
def unbounded_descriptor_kernel(p_x, p_y, n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """y is |x|, n_rows of n_cols."""
    x = tl.make_tensor_descriptor(p_x, shape=[n_rows, n_cols], strides=[n_cols, 1], block_shape=[BLOCK_M, BLOCK_N])
    y = tl.make_tensor_descriptor(p_y, shape=[n_rows, n_cols], strides=[n_cols, 1], block_shape=[BLOCK_M, BLOCK_N])
    y.store([0, 0], tl.abs(x.load([0, 0])))


@triton.jit
def pairs_kernel(p_x, p_largest, p_y, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """The largest number of each row of x, and the sums of its pairs. MASKED: elements from n on count as 0."""
    o = tl.arange(0, ROWS * COLUMNS)
    b_x = tl.load(p_x + o, mask=o < n, other=0.0) if MASKED else tl.load(p_x + o)
    b_x = tl.reshape(b_x, (ROWS, COLUMNS))
    tl.store(p_largest + tl.arange(0, ROWS), tl.max(b_x, 1))
    b_even, b_odd = tl.reshape(b_x, (ROWS, COLUMNS // 2, 2)).split()
    tl.store(p_y + tl.arange(0, ROWS * COLUMNS // 2), tl.reshape(b_even + b_odd, (ROWS * COLUMNS // 2,)))


@triton.jit
def rounded_numbers_kernel(p_x, p_y, n):
    """y is x in bf16, one number after another."""
    for i in tl.range(0, n):
        tl.store(p_y + i, tl.load(p_x + i).to(tl.bfloat16))
