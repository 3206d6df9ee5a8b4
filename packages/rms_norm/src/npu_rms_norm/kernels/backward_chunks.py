"""The backward for stock Triton on CUDA, of rows in equal chunks: see forward_chunks.py."""

import triton
import triton.language as tl

from .chunk import load_chunk, load_gate_chunk, load_scale_chunk, store_chunk
from .elements import normalise, round_weighted
from .tile import result_strides, row_mask, row_stride, store_partial, tile_range, tile_rows


@triton.jit(do_not_specialize=["n_outer", "n_inner"])
def backward_chunks_kernel(
    p_dy,
    p_dsum,  # gradient that reaches x from elsewhere and is added to dx; None: there is none
    p_x,
    p_weight,
    p_bias,  # None: no bias
    p_gate,  # None: no gate
    p_rstd,
    p_dx,  # None: x needs no gradient
    p_dgate,  # None: the gate needs no gradient; else, GATE_FIRST, p_dx is given
    p_dw,  # fp32 [programs, N], one partial sum per program; None: the weight needs no gradient
    p_db,  # the same for the bias
    n_outer,
    n_inner,
    s_dy_outer,
    s_dy_inner,  # of this and the others, None: rows lie side by side
    s_dsum_outer,
    s_dsum_inner,
    s_x_outer,
    s_x_inner,
    s_gate_outer,
    s_gate_inner,
    s_dx_outer,
    s_dx_inner,
    offset,
    N: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of a chunk
    ROUND_NORMALISED: tl.constexpr,
    ROUND_FACTORS: tl.constexpr,
    ROUND_BF16: tl.constexpr,
    GATE_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """The partial sum of dw stays in registers over the whole loop."""
    DTYPE: tl.constexpr = tl.bfloat16 if ROUND_BF16 else tl.float16
    s_dy_inner, s_dsum_inner = row_stride(s_dy_inner, N), row_stride(s_dsum_inner, N)
    s_x_inner, s_gate_inner = row_stride(s_x_inner, N), row_stride(s_gate_inner, N)
    s_dx_inner = row_stride(s_dx_inner, N)
    o_row = tl.arange(0, BLOCK_G * BLOCK_M)
    o_chunk = tl.arange(0, BLOCK_N)
    sums, bias_sums = (), ()
    if p_dw is not None:
        for _ in tl.static_range(CHUNKS):
            sums = sums + (tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32),)
    if p_db is not None:
        for _ in tl.static_range(CHUNKS):
            bias_sums = bias_sums + (tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32),)
    i_first, i_stop, n_step, i_head = tile_range(
        tl.program_id(0), tl.num_programs(0), n_outer, n_inner, BLOCK_G, BLOCK_M, PER_HEAD
    )
    s_y_outer, s_y_inner = result_strides(n_outer, n_inner, N, PER_HEAD)
    if PER_HEAD:
        if p_weight is not None:
            p_weight += i_head * N
        if p_bias is not None:
            p_bias += i_head * N
    for i_tile in tl.range(i_first, i_stop, n_step):
        i_outer, i_inner, n_groups, n_rows = tile_rows(i_tile, n_outer, n_inner, BLOCK_G, BLOCK_M)
        i_row = tl.cast(i_outer, tl.int64) * n_inner + i_inner
        m_row = row_mask(n_groups, n_rows, BLOCK_G, BLOCK_M)
        b_rstd = tl.load(p_rstd + i_row + o_row, mask=m_row, other=0.0)
        b_product = tl.zeros([BLOCK_G * BLOCK_M, BLOCK_N], tl.float32)
        normalised, gradient, added, bias_added, acts, slopes = (), (), (), (), (), ()
        for i_chunk in tl.static_range(CHUNKS):
            b_x = load_chunk(
                p_x, s_x_outer, s_x_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M, BLOCK_N
            )
            b_g = load_chunk(
                p_dy, s_dy_outer, s_dy_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M, BLOCK_N
            )
            if p_weight is not None:
                b_scale = load_scale_chunk(p_weight, offset, i_chunk, N, BLOCK_N, DTYPE, ROUND_FACTORS)
            if p_gate is not None:
                b_act, b_slope = load_gate_chunk(
                    p_gate, s_gate_outer, s_gate_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M,
                    BLOCK_N, GATE_SILU
                )  # fmt: skip
            if GATE_FIRST:
                b_n = normalise(b_x * b_act, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, False)
                acts, slopes = acts + (b_act,), slopes + (b_x * b_slope,)
            else:
                b_n = normalise(b_x, b_rstd, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, False)
            if p_gate is not None:
                if not GATE_FIRST:
                    if p_dgate is not None:
                        b_z = b_n
                        if p_weight is not None:
                            b_z *= b_scale[None, :]
                        if p_bias is not None:
                            b_bias = load_scale_chunk(p_bias, 0.0, i_chunk, N, BLOCK_N, DTYPE, ROUND_FACTORS)
                            b_z = (
                                round_weighted(b_z, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, False)
                                + b_bias[None, :]
                            )
                        b_z = round_weighted(b_z, p_weight, DTYPE, ROUND_NORMALISED, ROUND_FACTORS, False)
                        store_chunk(
                            p_dgate, b_g * b_z * b_slope, s_y_outer, s_y_inner, i_outer, i_inner, n_groups, n_rows, i_chunk,
                            N, BLOCK_G, BLOCK_M, BLOCK_N
                        )  # fmt: skip
                    b_g *= b_act
            if p_dw is not None:
                added = added + (sums[i_chunk] + b_g * b_n,)
            if p_db is not None:
                bias_added = bias_added + (bias_sums[i_chunk] + b_g,)
            if p_dx is not None:
                if p_weight is not None:
                    b_g *= b_scale[None, :]
                b_product += b_g * b_n
                normalised, gradient = normalised + (b_n,), gradient + (b_g,)
        sums, bias_sums = added, bias_added
        if p_dx is not None:
            b_mean = tl.sum(b_product, axis=1) * (1.0 / N)  # [BLOCK_M]
            for i_chunk in tl.static_range(CHUNKS):
                b_dx = (gradient[i_chunk] - normalised[i_chunk] * b_mean[:, None]) * b_rstd[:, None]
                if GATE_FIRST:
                    if p_dgate is not None:
                        store_chunk(
                            p_dgate, b_dx * slopes[i_chunk], s_y_outer, s_y_inner, i_outer, i_inner, n_groups, n_rows,
                            i_chunk, N, BLOCK_G, BLOCK_M, BLOCK_N
                        )  # fmt: skip
                    b_dx *= acts[i_chunk]
                if p_dsum is not None:
                    b_dx += load_chunk(
                        p_dsum, s_dsum_outer, s_dsum_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M,
                        BLOCK_N
                    )  # fmt: skip
                store_chunk(
                    p_dx, b_dx, s_dx_outer, s_dx_inner, i_outer, i_inner, n_groups, n_rows, i_chunk, N, BLOCK_G, BLOCK_M,
                    BLOCK_N
                )  # fmt: skip
    if p_dw is not None:
        for i_chunk in tl.static_range(CHUNKS):
            store_partial(p_dw, sums[i_chunk], tl.program_id(0), i_chunk * BLOCK_N + o_chunk, N, False)
    if p_db is not None:
        for i_chunk in tl.static_range(CHUNKS):
            store_partial(p_db, bias_sums[i_chunk], tl.program_id(0), i_chunk * BLOCK_N + o_chunk, N, False)
