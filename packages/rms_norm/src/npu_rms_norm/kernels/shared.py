"""RMSNorm's backward for stock Triton on CUDA where a row fits no program: several programs, all resident, share a row.

Each holds its columns of x, dy and dw in registers. They exchange their parts of mean(g n) in memory, in a word each that
says whether it is there, and finish a row while they read the next one, so that nobody waits for others' parts. Formulas,
row layout and rounding modes: tile.py.
"""

import triton
import triton.language as tl

from .elements import load_scale, normalise
from .tile import load_tile, store_tile, tile_at, tile_rows


@triton.jit
def publish(p_slot, value):
    """Stores a number and, in the same word, that it is there."""
    bits = value.to(tl.uint32, bitcast=True).to(tl.int64) | (1 << 32)
    tl.atomic_xchg(p_slot, bits, sem="relaxed", scope="gpu")


@triton.jit
def collect(p_slots):
    """fp32 [SLOTS]: each number, as soon as it is there."""
    return tl.inline_asm_elementwise(
        "{.reg .pred there; .reg .b64 word; .reg .b32 value, flag; AGAIN: ld.relaxed.gpu.global.b64 word, [$1];"
        " mov.b64 {value, flag}, word; setp.ne.u32 there, flag, 0; @!there bra AGAIN; mov.b32 $0, value;}",
        "=r,l",
        [p_slots.to(tl.int64, bitcast=True)],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def finish_row(
    p_dx,
    p_dsum,
    p_slots,
    b_n,
    b_g,
    rstd,
    i_row,
    n_outer,
    n_inner,
    s_dx_outer,
    s_dx_inner,
    s_dsum_outer,
    s_dsum_inner,
    i_col,
    N: tl.constexpr,
    SHARE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stores dx of one row, once every program's part of mean(g n) is there."""
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    o_slot = tl.arange(0, SLOTS)
    b_part = collect(p_slots + tl.cast(i_row, tl.int64) * SHARE + tl.minimum(o_slot, SHARE - 1))  # [SLOTS]
    mean = tl.sum(tl.where(o_slot < SHARE, b_part, 0.0), axis=0) * (1.0 / N)
    i_outer, i_inner, _, _ = tile_rows(i_row, n_outer, n_inner, 1, 1)
    b_dx = (b_g - b_n * mean) * rstd
    if p_dsum is not None:
        p_tile = tile_at(p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner, i_col, 1, 1, BLOCK_N)
        b_dx += load_tile(p_tile, 1, 1, N - i_col, 1, 1, BLOCK_N, EXACT_N, "")
    p_tile = tile_at(p_dx, s_dx_outer, s_dx_inner, i_outer, i_inner, i_col, 1, 1, BLOCK_N)
    store_tile(p_tile, b_dx, 1, 1, N - i_col, 1, 1, BLOCK_N, EXACT_N)


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_shared_kernel(
    p_dy,
    p_dsum,  # gradient that reaches x from elsewhere and is added to dx; None: there is none
    p_x,
    p_weight,
    p_rstd,
    p_dx,
    p_dw,  # fp32 [programs / SHARE, N]; None: the weight needs no gradient
    p_slots,  # [rows, SHARE], zeros beforehand
    n_outer,
    n_inner,
    s_dy_outer,
    s_dy_inner,
    s_dsum_outer,
    s_dsum_inner,
    s_x_outer,
    s_x_inner,
    s_dx_outer,
    s_dx_inner,
    offset,
    N: tl.constexpr,
    SHARE: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two, >= SHARE
    BLOCK_N: tl.constexpr,  # SHARE * BLOCK_N >= N
    STAGES: tl.constexpr,
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    GATE_SILU: tl.constexpr,  # from here on: of the kernels that take over where programs may not wait for one another
    GATE_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    DTYPE: tl.constexpr = tl.bfloat16 if ROUND_BF16 else tl.float16
    EXACT_N: tl.constexpr = N % BLOCK_N == 0
    i_group = tl.program_id(0) // SHARE
    i_part = tl.program_id(0) - i_group * SHARE
    n_groups = tl.num_programs(0) // SHARE
    n_rows = n_inner if n_outer is None else n_outer * n_inner
    i_col = i_part * BLOCK_N
    o_col = i_col + tl.arange(0, BLOCK_N)
    b_dw = tl.zeros([1, BLOCK_N], tl.float32)
    # What is left to do of the row before.
    b_held_n = tl.zeros([1, BLOCK_N], tl.float32)
    b_held_g = tl.zeros([1, BLOCK_N], tl.float32)
    held_rstd = 0.0
    for i_row in tl.range(i_group, n_rows, n_groups, num_stages=STAGES):
        i_outer, i_inner, _, _ = tile_rows(i_row, n_outer, n_inner, 1, 1)
        p_tile = tile_at(p_x, s_x_outer, s_x_inner, i_outer, i_inner, i_col, 1, 1, BLOCK_N)
        b_x = load_tile(p_tile, 1, 1, N - i_col, 1, 1, BLOCK_N, EXACT_N, "")
        p_tile = tile_at(p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, i_col, 1, 1, BLOCK_N)
        b_g = load_tile(p_tile, 1, 1, N - i_col, 1, 1, BLOCK_N, EXACT_N, "")
        rstd = tl.load(p_rstd + i_row)  # a number: as a block it would be loaded twice, once of them late
        b_n = normalise(b_x, tl.full([1], rstd, tl.float32), DTYPE, ROUND_NORMALISED, ROUND_FACTORS, True)
        if p_dw is not None:
            b_dw += b_g * b_n
        if p_weight is not None:
            b_g *= load_scale(p_weight, o_col, N, offset, DTYPE, EXACT_N, ROUND_FACTORS)[None, :]
        publish(p_slots + tl.cast(i_row, tl.int64) * SHARE + i_part, tl.sum(tl.sum(b_g * b_n, axis=1), axis=0))
        if i_row >= n_groups:
            finish_row(
                p_dx,
                p_dsum,
                p_slots,
                b_held_n,
                b_held_g,
                held_rstd,
                i_row - n_groups,
                n_outer,
                n_inner,
                s_dx_outer,
                s_dx_inner,
                s_dsum_outer,
                s_dsum_inner,
                i_col,
                N,
                SHARE,
                SLOTS,
                BLOCK_N,
            )
        b_held_n, b_held_g, held_rstd = b_n, b_g, rstd
    finish_row(  # there are no more groups than rows
        p_dx,
        p_dsum,
        p_slots,
        b_held_n,
        b_held_g,
        held_rstd,
        i_group + (n_rows - 1 - i_group) // n_groups * n_groups,
        n_outer,
        n_inner,
        s_dx_outer,
        s_dx_inner,
        s_dsum_outer,
        s_dsum_inner,
        i_col,
        N,
        SHARE,
        SLOTS,
        BLOCK_N,
    )
    if p_dw is not None:
        p_partial = p_dw + tl.cast(i_group, tl.int64) * N + o_col
        if EXACT_N:
            tl.store(p_partial, tl.sum(b_dw, axis=0))
        else:
            tl.store(p_partial, tl.sum(b_dw, axis=0), mask=o_col < N)
