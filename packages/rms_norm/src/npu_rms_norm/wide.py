"""Kernels that read a row in blocks of columns, more than once; they are the same on every chip.

On Ascend rows take them that are too wide for one program to hold. On CUDA forwards of many widths do: the second read comes
from a cache.

On CUDA several programs can hold a row together: `backward_shared_kernel`, at the end.

Forward: a program reads a row once for its statistics, and again for y. Where y is quantised, it reads the row a third time
between the two, for the largest element. Backward: one kernel computes mean(g n) of each row. A second one computes the
gradients: a program goes through many rows with one block of columns, and keeps its sums for dw and db on chip. Formulas:
formula.py.

Rows lie on two levels, n_outer groups of n_inner rows, and every tensor has a stride for each level: a slice of a wider
tensor is read in place. ORDER says which rows a program takes:

    "one"      there is one group
    "groups"   the rows of all groups, group after group
    "heads"    a group is a head with parameters of its own: a program takes rows of one head
"""

from npu_tiling.device import collect, gradient_of_rows, publish, round_to, tl, triton
from npu_tiling.partials import store_partial

from .formula import activate, add_residual, amax_of_rows, inverse_rms, load_factor, normalise, quantise, weigh


@triton.jit
def rows_of_program(i_program, n_programs, n_outer, n_inner, ORDER: tl.constexpr):
    """A program's first row, the row it stops before, the step between rows, and its head. Each head has rows from 0."""
    if ORDER == "heads":
        return i_program // n_outer, n_inner, n_programs // n_outer, i_program % n_outer
    elif ORDER == "groups":
        return i_program, n_outer * n_inner, n_programs, 0
    else:
        return i_program, n_inner, n_programs, 0


@triton.jit
def row_position(i_row, i_head, n_inner, ORDER: tl.constexpr):
    """The group of row i_row, its row in that group, and its number among all rows, which is its place in rstd."""
    if ORDER == "heads":
        return i_head, i_row, tl.cast(i_head, tl.int64) * n_inner + i_row
    elif ORDER == "groups":
        i_outer = i_row // n_inner
        return i_outer, i_row - i_outer * n_inner, i_row
    else:
        return 0, i_row, i_row


@triton.jit
def result_strides(n_outer, n_inner, N: tl.constexpr, BY_HEAD: tl.constexpr):
    """Strides of a contiguous tensor, from group to group and from row to row; BY_HEAD: groups are heads, [..., H, D]."""
    if BY_HEAD:
        return N, tl.cast(n_outer, tl.int64) * N
    else:
        return tl.cast(n_inner, tl.int64) * N, N


@triton.jit
def row_at(p_rows, s_outer, s_inner, i_outer, i_inner):
    """The first element of a row; None for None."""
    if p_rows is not None:
        return p_rows + tl.cast(i_outer, tl.int64) * s_outer + tl.cast(i_inner, tl.int64) * s_inner


@triton.jit
def load_columns(p_row, i_col, N: tl.constexpr, BLOCK_N: tl.constexpr, EVICTION: tl.constexpr):
    """fp32 [1, BLOCK_N], zero past the row's end."""
    p_block = p_row + i_col + tl.arange(0, BLOCK_N)[None, :]
    if N % BLOCK_N == 0:
        return tl.load(p_block, eviction_policy=EVICTION).to(tl.float32)
    else:
        m_block = (tl.arange(0, BLOCK_N) < N - i_col)[None, :]
        return tl.load(p_block, mask=m_block, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def store_columns(p_row, b_block, i_col, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rounds [1, BLOCK_N] to the tensor's dtype (of y, dx and dgate the last rounding), and stores it."""
    p_block = p_row + i_col + tl.arange(0, BLOCK_N)[None, :]
    b_block = b_block.to(p_row.dtype.element_ty)
    if N % BLOCK_N == 0:
        tl.store(p_block, b_block)
    else:
        tl.store(p_block, b_block, mask=(tl.arange(0, BLOCK_N) < N - i_col)[None, :])


@triton.jit
def load_input(
    p_x, p_residual, p_gate, p_sum, i_col, N: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr, EVICTION: tl.constexpr
):  # fmt: skip
    """What is normalised, x + residual as it is stored, and act(gate), at a block of columns; x stands for a missing one."""
    b_x = load_columns(p_x, i_col, N, BLOCK_N, EVICTION)
    b_sum, b_act = b_x, b_x
    if p_residual is not None:
        b_sum, b_x = add_residual(b_x, load_columns(p_residual, i_col, N, BLOCK_N, EVICTION), p_sum)
    if p_gate is not None:
        b_act, _ = activate(load_columns(p_gate, i_col, N, BLOCK_N, EVICTION), ACTIVATION)
        if GATE_FIRST:
            b_x *= b_act
    return b_x, b_sum, b_act


@triton.jit
def result_of(
    b_x, b_act, b_rstd, p_weight, p_bias, i_col, offset, N: tl.constexpr, BLOCK_N: tl.constexpr, NORMALISED: tl.constexpr,
    FACTORS: tl.constexpr, WEIGHTED: tl.constexpr, GATE_RESULT: tl.constexpr
):  # fmt: skip
    """y at a block of columns, in fp32."""
    o_col = i_col + tl.arange(0, BLOCK_N)
    b_n = normalise(b_x, b_rstd, NORMALISED, FACTORS)
    b_scale = load_factor(p_weight, o_col, offset, N, N % BLOCK_N == 0, FACTORS)
    b_bias = load_factor(p_bias, o_col, None, N, N % BLOCK_N == 0, FACTORS)
    b_y = weigh(b_n, b_scale, b_bias, WEIGHTED)
    if GATE_RESULT:
        b_y = round_to(b_y, WEIGHTED) * b_act
    return b_y


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def forward_wide_kernel(
    # Read; None: the call has no such input.
    p_x, p_residual, p_gate, p_weight, p_bias,
    # Written; None: not asked for. p_scale: the scales of a quantised y, fp32 [rows], in the order of rstd.
    p_y, p_sum, p_fp32, p_rstd, p_scale,
    n_outer, n_inner,
    s_x_outer, s_x_inner, s_extra_outer, s_extra_inner,  # extra: the residual or the gate; no call has both
    eps, offset,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """y of wide rows. A row is read once for rstd, once for its largest element if y is quantised, and once for y."""
    # lint: allow short-transfer: a piece of y in int8 has one byte for each number of the piece of x
    # lint: allow nan-maximum: NaN comes from a sum beside it, on chips that keep it in a maximum and on those that drop it
    # lint: allow scalar-reduction: a row that does not fit is summed piece by piece, one number for each long piece
    GATE_RESULT: tl.constexpr = p_gate is not None and not GATE_FIRST
    o_one = tl.arange(0, 1)
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, ORDER == "heads")
    i_first, i_stop, n_step, i_head = rows_of_program(tl.program_id(0), tl.num_programs(0), n_outer, n_inner, ORDER)
    if p_weight is not None:
        p_weight += i_head * N
    if p_bias is not None:
        p_bias += i_head * N
    for i in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, i_row = row_position(i, i_head, n_inner, ORDER)
        p_x_row = row_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner)
        p_residual_row = row_at(p_residual, s_extra_outer, s_extra_inner, i_outer, i_inner)
        p_gate_row = row_at(p_gate, s_extra_outer, s_extra_inner, i_outer, i_inner)
        p_y_row = row_at(p_y, s_y_outer, s_y_inner, i_outer, i_inner)
        p_sum_row = row_at(p_sum, s_y_outer, s_y_inner, i_outer, i_inner)
        p_fp32_row = row_at(p_fp32, s_y_outer, s_y_inner, i_outer, i_inner)

        b_square = tl.zeros([1, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N, BLOCK_N):
            b_x, _, _ = load_input(
                p_x_row, p_residual_row, p_gate_row if GATE_FIRST else None, p_sum, i_col, N, BLOCK_N, ACTIVATION,
                GATE_FIRST, "evict_last"
            )  # fmt: skip
            b_square += b_x * b_x
        b_rstd = inverse_rms(b_square, eps, N)  # [1]
        if p_rstd is not None:
            tl.store(p_rstd + i_row + o_one, b_rstd)

        if p_scale is not None:
            b_columns_amax, b_zero = tl.zeros([1, BLOCK_N], tl.float32), tl.zeros([1, BLOCK_N], tl.float32)
            for i_col in tl.range(0, N, BLOCK_N):
                b_x, _, b_act = load_input(
                    p_x_row, p_residual_row, p_gate_row, p_sum, i_col, N, BLOCK_N, ACTIVATION, GATE_FIRST, "evict_last"
                )
                b_y = result_of(
                    b_x, b_act, b_rstd, p_weight, p_bias, i_col, offset, N, BLOCK_N, NORMALISED, FACTORS, WEIGHTED,
                    GATE_RESULT
                )  # fmt: skip
                b_columns_amax = tl.maximum(b_columns_amax, tl.abs(b_y))
                b_zero += b_y * 0.0
            b_amax = amax_of_rows(b_columns_amax, b_zero)  # [1]

        for i_col in tl.range(0, N, BLOCK_N):
            b_x, b_sum, b_act = load_input(
                p_x_row, p_residual_row, p_gate_row, p_sum, i_col, N, BLOCK_N, ACTIVATION, GATE_FIRST, "evict_first"
            )
            if p_sum is not None:
                store_columns(p_sum_row, b_sum, i_col, N, BLOCK_N)
            b_y = result_of(
                b_x, b_act, b_rstd, p_weight, p_bias, i_col, offset, N, BLOCK_N, NORMALISED, FACTORS, WEIGHTED, GATE_RESULT
            )
            if p_fp32 is not None:
                store_columns(p_fp32_row, b_y, i_col, N, BLOCK_N)
            if p_scale is not None:
                b_y, b_steps = quantise(b_y, b_amax, p_y.dtype.element_ty == tl.int8)
                if i_col == 0:
                    tl.store(p_scale + i_row + o_one, b_steps)
            store_columns(p_y_row, b_y, i_col, N, BLOCK_N)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_wide_mean_kernel(
    p_dy, p_x, p_gate, p_weight, p_rstd,  # read; None: the call has no such input
    p_mean,  # written, fp32 [rows]: mean(g n)
    n_outer, n_inner, s_dy_outer, s_dy_inner, s_x_outer, s_x_inner, s_gate_outer, s_gate_inner, offset,
    N: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """mean(g n) of each row, for `backward_wide_kernel`, a block of columns at a time."""
    # lint: allow short-transfer: on an Ascend950 a row that does not fit beside another comes in equal pieces
    # lint: allow scalar-reduction: a row that does not fit is summed piece by piece, one number for each long piece
    o_one = tl.arange(0, 1)
    i_first, i_stop, n_step, i_head = rows_of_program(tl.program_id(0), tl.num_programs(0), n_outer, n_inner, ORDER)
    if p_weight is not None:
        p_weight += i_head * N
    for i in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, i_row = row_position(i, i_head, n_inner, ORDER)
        p_x_row = row_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner)
        p_dy_row = row_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner)
        p_gate_row = row_at(p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner)
        b_rstd = tl.load(p_rstd + i_row + o_one)  # [1]
        b_product = tl.zeros([1, BLOCK_N], tl.float32)
        for i_col in tl.range(0, N, BLOCK_N):
            b_x = load_columns(p_x_row, i_col, N, BLOCK_N, "")
            b_g = load_columns(p_dy_row, i_col, N, BLOCK_N, "")
            if p_weight is not None:
                o_col = i_col + tl.arange(0, BLOCK_N)
                b_g *= load_factor(p_weight, o_col, offset, N, N % BLOCK_N == 0, FACTORS)
            if p_gate is not None:
                b_act, _ = activate(load_columns(p_gate_row, i_col, N, BLOCK_N, ""), ACTIVATION)
                if GATE_FIRST:
                    b_x *= b_act
                else:
                    b_g *= b_act
            b_product += b_g * normalise(b_x, b_rstd, NORMALISED, FACTORS)
        tl.store(p_mean + i_row + o_one, tl.sum(b_product, axis=1) * (1.0 / N))


@triton.jit(do_not_specialize=["n_outer", "n_inner", "n_splits"])
def backward_wide_kernel(
    # Read; None: the call has no such input. p_mean: None where p_dx is.
    p_dy, p_dsum, p_x, p_gate, p_weight, p_bias, p_rstd, p_mean,
    # Written; None: not needed. p_dw, p_db: fp32 [n_splits, N], partial sums; on CUDA, where one split takes all rows (of a
    # head), the gradients.
    p_dx, p_dgate, p_dw, p_db,
    n_outer, n_inner, n_splits,
    s_dy_outer, s_dy_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner,
    s_extra_outer, s_extra_inner, offset,  # extra: dsum or the gate; no call has both
    N: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr,
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr, WEIGHTED: tl.constexpr,
    ACTIVATION: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """The gradients of blocks of columns of many rows, and partial sums of the parameters' gradients."""
    # lint: allow short-transfer: on an Ascend950 a row that does not fit beside another comes in equal pieces
    EXACT: tl.constexpr = N % BLOCK_N == 0
    o_one = tl.arange(0, 1)
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, ORDER == "heads")
    for i_task in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N) * n_splits, tl.num_programs(0)):
        i_split, i_col = i_task % n_splits, i_task // n_splits * BLOCK_N
        o_col = i_col + tl.arange(0, BLOCK_N)
        i_first, i_stop, n_step, i_head = rows_of_program(i_split, n_splits, n_outer, n_inner, ORDER)
        b_scale, b_bias = None, None
        if p_weight is not None:
            b_scale = load_factor(p_weight + i_head * N, o_col, offset, N, EXACT, FACTORS)
        if (p_bias is not None) and (p_dgate is not None):  # nothing else needs the bias
            b_bias = load_factor(p_bias + i_head * N, o_col, None, N, EXACT, FACTORS)
        if p_dw is not None:
            b_dw = tl.zeros([1, BLOCK_N], tl.float32)
        if p_db is not None:
            b_db = tl.zeros([1, BLOCK_N], tl.float32)
        for i in tl.range(i_first, i_stop, n_step):
            i_outer, i_inner, i_row = row_position(i, i_head, n_inner, ORDER)
            p_dgate_row = row_at(p_dgate, s_y_outer, s_y_inner, i_outer, i_inner)
            b_x = load_columns(row_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
            b_dy = load_columns(row_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
            b_rstd = tl.load(p_rstd + i_row + o_one)  # [1]
            b_u = b_x
            if p_gate is not None:
                p_gate_row = row_at(p_gate, s_extra_outer, s_extra_inner, i_outer, i_inner)
                b_act, b_slope = activate(load_columns(p_gate_row, i_col, N, BLOCK_N, ""), ACTIVATION)
                if GATE_FIRST:
                    b_u = b_x * b_act
            b_n = normalise(b_u, b_rstd, NORMALISED, FACTORS)
            if p_gate is not None:
                if not GATE_FIRST:
                    if p_dgate is not None:
                        b_z = round_to(weigh(b_n, b_scale, b_bias, WEIGHTED), WEIGHTED)
                        store_columns(p_dgate_row, b_dy * b_z * b_slope, i_col, N, BLOCK_N)
                    b_dy *= b_act

            if p_dw is not None:
                b_dw += b_dy * b_n
            if p_db is not None:
                b_db += b_dy
            if p_dx is not None:
                b_mean = tl.load(p_mean + i_row + o_one)  # [1]
                b_g = b_dy
                if p_weight is not None:
                    b_g = b_dy * b_scale
                b_dx = gradient_of_rows(b_g, b_n, b_rstd, b_mean)
                if GATE_FIRST:
                    if p_dgate is not None:
                        store_columns(p_dgate_row, b_dx * b_x * b_slope, i_col, N, BLOCK_N)
                    b_dx *= b_act
                if p_dsum is not None:
                    p_dsum_row = row_at(p_dsum, s_extra_outer, s_extra_inner, i_outer, i_inner)
                    b_dx += load_columns(p_dsum_row, i_col, N, BLOCK_N, "")
                store_columns(row_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner), b_dx, i_col, N, BLOCK_N)
        if p_dw is not None:
            store_partial(p_dw, b_dw, i_split, o_col, N, EXACT)
        if p_db is not None:
            store_partial(p_db, b_db, i_split, o_col, N, EXACT)


# Rows that are too wide for one program: a group of SHARE programs holds each row. A program keeps its columns of x, dy and
# dw in registers. The programs of a group exchange their parts of mean(g n) through memory. A program finishes a row after
# it has read the next one, so it seldom has to wait for the parts. npu_tiling/device.py says why no program waits
# for one that cannot start. The call has neither a gate nor a bias nor parameters for each head.


@triton.jit
def finish_row(
    p_dx, p_dsum, p_words, b_n, b_g, rstd, i_row, n_inner, s_dx_outer, s_dx_inner, s_dsum_outer, s_dsum_inner, i_col,
    N: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, ORDER: tl.constexpr
):  # fmt: skip
    """Stores dx of a row, once all programs of the group have published their parts of mean(g n)."""
    SHARE: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_outer, i_inner, _ = row_position(i_row, 0, n_inner, ORDER)
    o_part = tl.arange(0, PARTS)
    b_part = collect(p_words + tl.cast(i_row, tl.int64) * SHARE + tl.minimum(o_part, SHARE - 1), 1)  # [PARTS]
    mean = tl.sum(tl.where(o_part < SHARE, b_part, 0.0), axis=0) * (1.0 / N)
    b_dx = gradient_of_rows(b_g, b_n, tl.full([1], rstd, tl.float32), tl.full([1], mean, tl.float32))
    if p_dsum is not None:
        b_dx += load_columns(row_at(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
    store_columns(row_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner), b_dx, i_col, N, BLOCK_N)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_shared_kernel(
    p_dy, p_dsum, p_x, p_weight, p_rstd,  # read; no p_dsum or p_weight: None
    p_dx,
    p_dw,  # fp32 [programs / SHARE, N], partial sums; where one group runs, the gradient; None: not needed
    p_words,  # int64 [rows * SHARE], zeros: the parts of mean(g n) of each row
    n_outer, n_inner,
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,  # PARTS: a power of two, >= SHARE
    ORDER: tl.constexpr, NORMALISED: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """dx of rows that SHARE programs hold together, and partial sums of dw."""
    SHARE: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n_rows = n_inner
    if ORDER == "groups":
        n_rows = n_outer * n_inner
    i_group = tl.program_id(0) // SHARE
    i_part = tl.program_id(0) - i_group * SHARE
    n_groups = tl.num_programs(0) // SHARE
    i_col = i_part * BLOCK_N
    o_col = i_col + tl.arange(0, BLOCK_N)
    b_dw = tl.zeros([1, BLOCK_N], tl.float32)
    # n, g and rstd of the previous row: its dx waits for the parts of the other programs.
    b_last_n, b_last_g = tl.zeros([1, BLOCK_N], tl.float32), tl.zeros([1, BLOCK_N], tl.float32)
    last_rstd = 0.0
    for i_row in tl.range(i_group, n_rows, n_groups, num_stages=2):
        i_outer, i_inner, _ = row_position(i_row, 0, n_inner, ORDER)
        b_x = load_columns(row_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
        b_g = load_columns(row_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
        rstd = tl.load(p_rstd + i_row)  # a scalar: the compiler loads a block twice, the second time late
        b_n = normalise(b_x, tl.full([1], rstd, tl.float32), NORMALISED, FACTORS)
        if p_dw is not None:
            b_dw += b_g * b_n
        if p_weight is not None:
            b_g *= load_factor(p_weight, o_col, offset, N, N % BLOCK_N == 0, FACTORS)
        part = tl.sum(tl.sum(b_g * b_n, axis=1), axis=0)
        publish(p_words + tl.cast(i_row, tl.int64) * SHARE + i_part, part, 1)
        if i_row >= n_groups:
            finish_row(
                p_dx, p_dsum, p_words, b_last_n, b_last_g, last_rstd, i_row - n_groups, n_inner, s_dx_outer, s_dx_inner,
                s_dsum_outer, s_dsum_inner, i_col, N, BLOCK_N, PARTS, ORDER
            )  # fmt: skip
        b_last_n, b_last_g, last_rstd = b_n, b_g, rstd
    i_last = i_group + (n_rows - 1 - i_group) // n_groups * n_groups  # tiling makes no more groups than rows
    finish_row(
        p_dx, p_dsum, p_words, b_last_n, b_last_g, last_rstd, i_last, n_inner, s_dx_outer, s_dx_inner, s_dsum_outer,
        s_dsum_inner, i_col, N, BLOCK_N, PARTS, ORDER
    )  # fmt: skip
    if p_dw is not None:
        store_partial(p_dw, b_dw, i_group, o_col, N, N % BLOCK_N == 0)
