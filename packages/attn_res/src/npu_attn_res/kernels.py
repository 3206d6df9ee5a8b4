"""Kernels of both chips beside those of one layer's whole rows, which are in ascend/kernels.py and cuda/kernels.py.

Here are: rows in blocks of columns, for rows that do not fit on chip and for more layers than fit on it together; the
gradient of h through the RMSNorm that follows it; the gradients of query and rms_weight from partial sums; and the table of
distances through which kernels find the sources of a list. Formulas: formula.py.
"""

from npu_tiling.device import tl, triton
from npu_tiling.partials import sum_of_partials

from .formula import (
    block_at,
    count_rows,
    load_rows,
    load_statistic,
    norm_gradient,
    store_gradient,
    store_partial_sum,
    store_rows,
    store_statistic,
)

# Programs take one block of columns of one tile of tokens. What sums over a whole row is written as one partial sum per
# block of columns and added up in between (small tensors, [blocks, tokens, layers]):
#
#     forward    products(g): <g, v_i>, <v_i, v_i>     then weighted_sum(alpha)
#     backward   products(do): e_i = <do, v_i>         then gradient
#
# so that every block is read twice in each direction, whatever the number of layers.


@triton.jit(do_not_specialize=["n_blocks", "n_tokens"])
def attn_res_products_kernel(
    p_v, p_table,
    p_a,  # rows: of do, or of g, which is the same for every token
    p_dot,  # fp32 [column blocks, n_blocks, n_tokens, S]: <a, v_i>
    p_square,  # fp32 [column blocks, n_blocks, n_tokens]: <v_i, v_i>; None: not needed
    n_blocks, n_tokens, s_block, s_token, s_a_token,
    s_a_row,  # from one row of a tile to the next: layers, or tokens
    D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Sums over blocks of columns of <a, v_i> and of <v_i, v_i>."""
    # lint: allow short-transfer: where a row does not fit beside those of all layers, it comes in equal pieces
    # lint: allow scalar-reduction: rows of a tile are the layers of one token, whose own row is squared alone
    # lint: allow single-buffer: CANN 9.0 on dav-c310 has one buffer for rows beside those of several layers
    EXACT: tl.constexpr = D % BLOCK_D == 0
    ROWS: tl.constexpr = BLOCK_M * BLOCK_S
    N_COLS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    for i_task in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M) * N_COLS, tl.num_programs(0)):
        i_tile = i_task // N_COLS
        i_part = i_task - i_tile * N_COLS
        i_col = i_part * BLOCK_D
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        n_rows = count_rows(n_left, S)
        p_rows = p_a + i_token * s_a_token + i_col
        b_a = load_rows(p_rows, s_a_row, n_rows, D - i_col, ROWS, BLOCK_D, EXACT)  # [ROWS, BLOCK_D]
        for i_block in tl.range(0, n_blocks):
            p_block = block_at(p_v, p_table, s_block, i_block, ALIGNED) + i_token * s_token + i_col
            b_v = load_rows(p_block, s_token, n_left, D - i_col, BLOCK_M, BLOCK_D, EXACT)  # [BLOCK_M, BLOCK_D]
            i_row = (i_part.to(tl.int64) * n_blocks + i_block) * n_tokens + i_token
            store_statistic(p_dot + i_row * S, tl.sum(b_v * b_a, axis=1), n_rows, ROWS)
            if p_square is not None:
                store_statistic(p_square + i_row, tl.sum(b_v * b_v, axis=1), n_left, BLOCK_M)


@triton.jit(do_not_specialize=["n_blocks", "n_tokens"])
def attn_res_weighted_sum_kernel(
    p_v, p_table,
    p_alpha,  # fp32 [n_blocks, n_tokens, S]
    p_o,  # [n_tokens, S, D]
    n_blocks, n_tokens, s_block, s_token,
    D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """o, the sum of the sources with weights, in blocks of columns."""
    # lint: allow short-transfer: where a row does not fit beside those of all layers, it comes in equal pieces
    EXACT: tl.constexpr = D % BLOCK_D == 0
    ROWS: tl.constexpr = BLOCK_M * BLOCK_S
    N_COLS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    for i_task in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M) * N_COLS, tl.num_programs(0)):
        i_tile = i_task // N_COLS
        i_col = (i_task - i_tile * N_COLS) * BLOCK_D
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        n_rows = count_rows(n_left, S)
        b_o = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for i_block in tl.range(0, n_blocks):
            p_block = block_at(p_v, p_table, s_block, i_block, ALIGNED) + i_token * s_token + i_col
            b_v = load_rows(p_block, s_token, n_left, D - i_col, BLOCK_M, BLOCK_D, EXACT)
            i_row = i_block.to(tl.int64) * n_tokens + i_token
            b_alpha = load_statistic(p_alpha + i_row * S, n_rows, ROWS)
            b_o += b_v * b_alpha[:, None]
        store_rows(p_o + i_token * S * D + i_col, D, b_o, n_rows, D - i_col, ROWS, BLOCK_D, EXACT)


@triton.jit(do_not_specialize=["n_blocks", "n_tokens", "n_splits"])
def attn_res_gradient_kernel(
    p_v, p_table,
    p_do,  # rows of do: [n_tokens, S, D]
    p_g,  # fp32 [S, D]
    p_alpha, p_ds_rstd,  # fp32 [n_blocks, n_tokens, S]: the weight of do, and ds r
    p_dv_coef,  # fp32 [n_blocks, n_tokens]: sum over layers of ds s r^2 / D
    p_dv,  # None: no block needs a gradient
    p_dv_table,
    p_dg,  # fp32 [n_splits, S, D], partial sums of dg; None: not needed
    n_blocks, n_tokens, n_splits, s_block, s_token, s_do_token,
    s_do_row,  # from one row of a tile to the next: layers, or tokens
    D: tl.constexpr, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """A program takes one block of columns through every n_splits-th tile of tokens, so that dg stays on chip.

    dv_i = sum over layers of (alpha do + ds_rstd g) - dv_coef v_i        dg = sum over tokens and blocks of ds_rstd v_i
    """
    # lint: allow short-transfer: where a row does not fit beside those of all layers, it comes in equal pieces
    EXACT: tl.constexpr = D % BLOCK_D == 0
    ROWS: tl.constexpr = BLOCK_M * BLOCK_S
    N_COLS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    for i_task in tl.range(tl.program_id(0), N_COLS * n_splits, tl.num_programs(0)):
        i_part = i_task // n_splits
        i_split = i_task - i_part * n_splits
        i_col = i_part * BLOCK_D
        b_g = load_rows(p_g + i_col, D, S, D - i_col, BLOCK_S, BLOCK_D, EXACT)  # [BLOCK_S, BLOCK_D]
        b_dg = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for i_tile in tl.range(i_split, tl.cdiv(n_tokens, BLOCK_M), n_splits):
            i_token = i_tile.to(tl.int64) * BLOCK_M
            n_left = (n_tokens - i_token).to(tl.int32)
            n_rows = count_rows(n_left, S)
            p_rows = p_do + i_token * s_do_token + i_col
            b_do = load_rows(p_rows, s_do_row, n_rows, D - i_col, ROWS, BLOCK_D, EXACT)  # [ROWS, BLOCK_D]
            for i_block in tl.range(0, n_blocks):
                p_block = block_at(p_v, p_table, s_block, i_block, ALIGNED) + i_token * s_token + i_col
                b_v = load_rows(p_block, s_token, n_left, D - i_col, BLOCK_M, BLOCK_D, EXACT)  # [BLOCK_M, BLOCK_D]
                i_row = i_block.to(tl.int64) * n_tokens + i_token
                b_ds_rstd = load_statistic(p_ds_rstd + i_row * S, n_rows, ROWS)
                if p_dg is not None:
                    b_dg += b_v * b_ds_rstd[:, None]
                if p_dv is not None:
                    b_alpha = load_statistic(p_alpha + i_row * S, n_rows, ROWS)
                    b_dv_coef = load_statistic(p_dv_coef + i_row, n_left, BLOCK_M)
                    b_dv = b_do * b_alpha[:, None] + b_g * b_ds_rstd[:, None]
                    if S > 1:
                        b_dv = tl.sum(b_dv, axis=0)[None, :]
                    b_dv -= b_v * b_dv_coef[:, None]
                    store_gradient(
                        p_dv, p_dv_table, b_dv, i_block, i_row, i_token, i_col, n_left, D, BLOCK_M, BLOCK_D, EXACT
                    )
        if p_dg is not None:
            p_partial = p_dg + i_split.to(tl.int64) * S * D + i_col
            if S == 1:
                b_sum = tl.sum(b_dg, axis=0)[None, :]
            else:
                b_sum = b_dg
            store_rows(p_partial, D, b_sum, S, D - i_col, BLOCK_S, BLOCK_D, EXACT)


@triton.jit(do_not_specialize=["n_tokens"])
def attn_res_norm_backward_kernel(
    # read: the gradients of y and, from elsewhere, of h (None: there is none), h, the weight, 1 / rms(h)
    p_dy, p_dh, p_h, p_output_rms_weight, p_norm_rstd,
    p_dh_sum,  # written: fp32 [n_tokens, D], the gradient of h with dh
    p_dweight,  # written: fp32 [programs, D]; None: not needed
    n_tokens, s_dy, s_dh,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,  # BLOCK_D >= D
):  # fmt: skip
    """n = h rstd, f = dy weight: dh + rstd (f - n mean(f n)), and dweight = sum over tokens of dy n."""
    # lint: allow scalar-reduction: tiles are sized for the 910B's compilers, which need twice what the 950's do
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    # lint: allow fill-in-loop: where the padding of such rows takes part in a sum, it has to be zero
    EXACT: tl.constexpr = BLOCK_D == D
    b_weight = load_rows(p_output_rms_weight, 0, 1, D, 1, BLOCK_D, EXACT)  # [1, BLOCK_D]
    if p_dweight is not None:
        b_dweight = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n_tokens, BLOCK_M), tl.num_programs(0)):
        i_token = i_tile.to(tl.int64) * BLOCK_M
        n_left = (n_tokens - i_token).to(tl.int32)
        b_rstd = load_statistic(p_norm_rstd + i_token, n_left, BLOCK_M)
        b_n = load_rows(p_h + i_token * D, D, n_left, D, BLOCK_M, BLOCK_D, EXACT) * b_rstd[:, None]
        b_dy = load_rows(p_dy + i_token * s_dy, s_dy, n_left, D, BLOCK_M, BLOCK_D, EXACT)
        if p_dweight is not None:
            b_dweight += b_dy * b_n
        b_total = norm_gradient(b_dy * b_weight, b_n, b_rstd, D)
        if p_dh is not None:
            b_total += load_rows(p_dh + i_token * s_dh, s_dh, n_left, D, BLOCK_M, BLOCK_D, EXACT)
        store_rows(p_dh_sum + i_token * D, D, b_total, n_left, D, BLOCK_M, BLOCK_D, EXACT)
    if p_dweight is not None:
        store_partial_sum(p_dweight, b_dweight, D, BLOCK_D)


@triton.jit(do_not_specialize=["n_partials"])
def attn_res_add_partials_kernel(
    p_partials,  # fp32 [n_partials, N]
    p_query, p_rms_weight,
    p_dquery,  # None: not needed
    p_drms_weight,  # None: not needed
    n_partials,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dg = the sum of the partial sums, in one fixed order; dquery = dg rms_weight, drms_weight = dg query."""
    # lint: allow short-transfer: the partial sums of all cores are a few KiB, of which every core adds some columns
    EXACT: tl.constexpr = N % BLOCK_N == 0
    for i_block in tl.range(tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        i_col = i_block * BLOCK_N
        b_dg = sum_of_partials(p_partials, n_partials, i_col + tl.arange(0, BLOCK_N), N, BLOCK_M, BLOCK_N)[None, :]
        if p_dquery is not None:
            b_norm = load_rows(p_rms_weight + i_col, N, 1, N - i_col, 1, BLOCK_N, EXACT)  # [1, BLOCK_N]
            store_rows(p_dquery + i_col, N, b_dg * b_norm, 1, N - i_col, 1, BLOCK_N, EXACT)
        if p_drms_weight is not None:
            b_query = load_rows(p_query + i_col, N, 1, N - i_col, 1, BLOCK_N, EXACT)
            store_rows(p_drms_weight + i_col, N, b_dg * b_query, 1, N - i_col, 1, BLOCK_N, EXACT)


@triton.jit(do_not_specialize=["first", *(f"o_{i}" for i in range(16))])
def attn_res_table_kernel(
    p_table, first,
    o_0: tl.int64, o_1: tl.int64, o_2: tl.int64, o_3: tl.int64,
    o_4: tl.int64, o_5: tl.int64, o_6: tl.int64, o_7: tl.int64,
    o_8: tl.int64, o_9: tl.int64, o_10: tl.int64, o_11: tl.int64,
    o_12: tl.int64, o_13: tl.int64, o_14: tl.int64, o_15: tl.int64,
):  # fmt: skip
    """16 entries of a table of offsets, from `first` on."""
    p_entry = p_table + first
    tl.store(p_entry, o_0)
    tl.store(p_entry + 1, o_1)
    tl.store(p_entry + 2, o_2)
    tl.store(p_entry + 3, o_3)
    tl.store(p_entry + 4, o_4)
    tl.store(p_entry + 5, o_5)
    tl.store(p_entry + 6, o_6)
    tl.store(p_entry + 7, o_7)
    tl.store(p_entry + 8, o_8)
    tl.store(p_entry + 9, o_9)
    tl.store(p_entry + 10, o_10)
    tl.store(p_entry + 11, o_11)
    tl.store(p_entry + 12, o_12)
    tl.store(p_entry + 13, o_13)
    tl.store(p_entry + 14, o_14)
    tl.store(p_entry + 15, o_15)
