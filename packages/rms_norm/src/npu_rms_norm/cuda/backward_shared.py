"""The backward on CUDA of rows that fit no program: a group of programs shares each row.

A program holds its columns of x, dy and dw in registers. Programs of a group exchange their parts of mean(g n) through
memory, and finish a row after they have read the next one: the parts have arrived by then. exchange.py says why no program
waits for one that cannot start. The call has neither a gate nor a bias. Formulas: formula.py.
"""

import triton
import triton.language as tl
from npu_tiling.device.exchange import collect, publish
from npu_tiling.device.partials import store_partial

from ..both.columns import load_columns, row_at, row_position, store_columns
from ..formula import gradient_of_rows, load_factor, normalise


@triton.jit
def finish_row(
    p_dx, p_dsum, p_words, b_n, b_g, rstd, i_row, n_inner, s_dx_outer, s_dx_inner, s_dsum_outer, s_dsum_inner, i_col,
    N: tl.constexpr, SHARE: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, ORDER: tl.constexpr
):  # fmt: skip
    """Stores dx of a row, once all programs of the group have published their parts of mean(g n)."""
    i_outer, i_inner, _ = row_position(i_row, 0, n_inner, ORDER)
    o_slot = tl.arange(0, SLOTS)
    b_part = collect(p_words + tl.cast(i_row, tl.int64) * SHARE + tl.minimum(o_slot, SHARE - 1), 1)  # [SLOTS]
    mean = tl.sum(tl.where(o_slot < SHARE, b_part, 0.0), axis=0) * (1.0 / N)
    b_dx = gradient_of_rows(b_g, b_n, tl.full([1], rstd, tl.float32), tl.full([1], mean, tl.float32))
    if p_dsum is not None:
        b_dx += load_columns(row_at(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner), i_col, N, BLOCK_N, "")
    store_columns(row_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner), b_dx, i_col, N, BLOCK_N)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_shared_kernel(
    p_dy, p_dsum, p_x, p_weight, p_rstd,  # read; no p_dsum or p_weight: None
    p_dx,
    p_dw,  # fp32 [programs / SHARE, N]; None: not needed
    p_words,  # int64 [rows * SHARE], zeros: the parts of mean(g n) of each row
    n_outer, n_inner,
    s_dy_outer, s_dy_inner, s_dsum_outer, s_dsum_inner, s_x_outer, s_x_inner, s_dx_outer, s_dx_inner,
    offset,
    N: tl.constexpr, SHARE: tl.constexpr, SLOTS: tl.constexpr,  # SLOTS: a power of two, >= SHARE
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, ORDER: tl.constexpr,  # SHARE * BLOCK_N >= N
    NORMALISED: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """dx of rows that SHARE programs hold together, and partial sums of dw."""
    n_rows = n_inner
    if ORDER == "groups":
        n_rows = n_outer * n_inner
    i_group = tl.program_id(0) // SHARE
    i_part = tl.program_id(0) - i_group * SHARE
    n_groups = tl.num_programs(0) // SHARE
    i_col = i_part * BLOCK_N
    o_col = i_col + tl.arange(0, BLOCK_N)
    b_dw = tl.zeros([1, BLOCK_N], tl.float32)
    # n, g and rstd of the row before, whose dx waits for the other programs' parts.
    b_last_n, b_last_g = tl.zeros([1, BLOCK_N], tl.float32), tl.zeros([1, BLOCK_N], tl.float32)
    last_rstd = 0.0
    for i_row in tl.range(i_group, n_rows, n_groups, num_stages=STAGES):
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
                s_dsum_outer, s_dsum_inner, i_col, N, SHARE, SLOTS, BLOCK_N, ORDER
            )  # fmt: skip
        b_last_n, b_last_g, last_rstd = b_n, b_g, rstd
    i_last = i_group + (n_rows - 1 - i_group) // n_groups * n_groups  # tiling makes no more groups than rows
    finish_row(
        p_dx, p_dsum, p_words, b_last_n, b_last_g, last_rstd, i_last, n_inner, s_dx_outer, s_dx_inner, s_dsum_outer,
        s_dsum_inner, i_col, N, SHARE, SLOTS, BLOCK_N, ORDER
    )  # fmt: skip
    if p_dw is not None:
        store_partial(p_dw, b_dw, i_group, o_col, N, N % BLOCK_N == 0)
