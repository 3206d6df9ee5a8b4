"""Device code that kernels of both chips share: formulas, and the loads and stores of rows. Tokens are independent.

    r_i = 1 / sqrt(mean(v_i^2) + eps)        s_i = r_i <g, v_i>        g = query * rms_weight
    alpha = softmax_i(s)                     h = sum_i alpha_i v_i

    e_i = <dh, v_i>        delta = sum_i alpha_i e_i = <dh, h>        ds_i = alpha_i (e_i - delta)
    dv_i = alpha_i dh + ds_i r_i (g - s_i r_i v_i / D)                dg = sum over tokens and sources of ds_i r_i v_i

In code c_i = ds_i r_i and slope_i = s_i r_i / D. A prefix is a source like the others.

The rows of a tile are BLOCK_M tokens of one layer (BLOCK_S == 1), or BLOCK_S layers of one token (BLOCK_M == 1). A tile has
all columns of its rows, BLOCK_D >= D, or some: those of kernels.py that take columns, and halves of a row on Ascend.

Source i lies at p_v + i * s_block or, where there is a table, at p_v + table[i], in elements and 64 bits: the sources of a
list lie anywhere. Statistics are [sources, tokens, layers]; ascend/kernels.py also stores [tokens, sources].

Where values are keys (the folder keys), for queries g_q:

    n_i = r_i v_i        r_i = 1 / sqrt(mean(v_i^2) + eps)        s_qi = <g_q, n_i>
    alpha_q = softmax_i(s_q)        h_q = sum_i alpha_qi n_i

    e_qi = <dh_q, n_i>        delta_q = sum_i alpha_qi e_qi        ds_qi = alpha_qi (e_qi - delta_q)
    dv_i = sum_q (a_qi dh_q + c_qi g_q) - k_i v_i        dg_q = sum over tokens and sources of c_qi v_i
    a_qi = alpha_qi r_i        c_qi = ds_qi r_i        k_i = r_i^2 / D sum_q (alpha_qi e_qi + ds_qi s_qi)
"""

from npu_tiling.device import gradient_of_rows, load_block, places_below, store_block, tl, triton, widen

ALIGNMENT = tl.constexpr(16)  # elements
NO_SCORE = tl.constexpr(-1e30)  # where there is no source: its weight is zero
NO_GRADIENT = tl.constexpr(-(2**63))  # the entry in the table of gradients of a source that needs none


@triton.jit
def rms_inverse(b_square, eps, D: tl.constexpr):
    """1 / rms of rows, from their sums of squares."""
    return tl.rsqrt(b_square * (1.0 / D) + eps)


@triton.jit
def score_rows(b_v, b_g, eps, D: tl.constexpr):
    """s of each row, r and sum(v^2) of each row of v. b_v and b_g: [rows, columns]."""
    b_square, b_product = tl.sum(b_v * b_v, axis=1), tl.sum(b_v * b_g, axis=1)
    b_rstd = rms_inverse(b_square, eps, D)
    return b_product * b_rstd, b_rstd, b_square


@triton.jit
def exponentials(b_old, b_new, b_reference):
    """exp of two scores (or log-sums), relative to a reference that is at least as high as both."""
    return tl.exp(b_old - b_reference), tl.exp(b_new - b_reference)


@triton.jit
def add_source(b_v, b_score, b_o, b_sum, b_max):
    """One step of the online softmax: the sums of exp(s - highest) v and of exp(s - highest), and the highest score s."""
    b_next = tl.where(b_score > b_max, b_score, b_max)
    b_shrink, b_weight = exponentials(b_max, b_score, b_next)
    b_o = b_o * b_shrink[:, None] + b_v * b_weight[:, None]
    return b_o, b_sum * b_shrink + b_weight, b_next


@triton.jit
def softmax_of_two(b_lse, b_score):
    """The shares of exp(lse) and of exp(score) in their sum."""
    b_first, b_second = exponentials(b_lse, b_score, tl.maximum(b_lse, b_score))
    b_inverse = 1.0 / (b_first + b_second)
    return b_first * b_inverse, b_second * b_inverse


@triton.jit
def score_gradient(b_alpha, b_e, b_delta, b_rstd):
    """c = ds r."""
    return b_alpha * (b_e - b_delta) * b_rstd


@triton.jit
def slope(b_score, b_rstd, D: tl.constexpr):
    """s r / D."""
    return b_score * b_rstd * (1.0 / D)


@triton.jit
def source_gradient(b_v, b_dh, b_g, b_alpha, b_c, b_slope):
    """dv = alpha dh + c (g - slope v)."""
    return b_dh * b_alpha + (b_g - b_v * b_slope) * b_c


@triton.jit
def expanded_gradient(b_v, b_slope_c, b_first, b_first_factor, b_last, b_last_factor):
    """The same as first - slope c v + last.

    In attn_res_backward_kernel alpha dh is the first term and c g the last; in attn_res_backward_row_kernel c g is the first
    and alpha dh the last. The order decides where compilers for Ascend wait: hold predicted times against a change of it.
    """
    return b_first * b_first_factor[:, None] - b_v * b_slope_c[:, None] + b_last * b_last_factor[:, None]


@triton.jit
def norm_gradient(b_f, b_n, b_rstd, D: tl.constexpr):
    """RMSNorm's gradient from n = x rstd and f = dy weight, [rows, columns] both."""
    return gradient_of_rows(b_f, b_n, b_rstd, tl.sum(b_f * b_n, axis=1) * (1.0 / D))


@triton.jit
def block_at(p_v, p_table, s_block, i_block, ALIGNED: tl.constexpr = False):
    """The first row of a block. ALIGNED: the table's entries are multiples of 16, which matters to CUDA's compiler alone."""
    if p_table is None:
        return p_v + tl.cast(i_block, tl.int64) * s_block
    else:
        i_offset = tl.load(p_table + i_block)
        if ALIGNED:
            i_offset = tl.multiple_of(i_offset, ALIGNMENT)
        return p_v + i_offset


@triton.jit
def count_blocks(p_count, max_blocks):
    """How many blocks count: max_blocks, or the number at p_count, which is clamped to that before it is cut to 32 bits."""
    if p_count is None:
        return max_blocks
    else:
        return tl.minimum(tl.maximum(tl.load(p_count), 0), max_blocks).to(tl.int32)


@triton.jit
def row_pointers(p_row, s_row, R: tl.constexpr, C: tl.constexpr):
    """[R, C]; the first row and column are in p_row."""
    if R > 1:
        return p_row + (tl.arange(0, R)[:, None] * s_row + tl.arange(0, C)[None, :])
    else:
        return p_row + tl.arange(0, C)[None, :]


@triton.jit
def row_tile_mask(n_rows, n_cols, R: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """The mask of what lies inside of [R, C]; EXACT: every column does. None: all does."""
    if R > 1:
        m_tile = (tl.arange(0, R) < n_rows)[:, None]
        if not EXACT:
            m_tile = m_tile & (tl.arange(0, C) < n_cols)[None, :]
        return m_tile
    elif not EXACT:
        return (tl.arange(0, C) < n_cols)[None, :]


@triton.jit
def fetch_rows(p_row, s_row, n_rows, n_cols, R: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """[R, C] in the dtype of the memory, zero outside."""
    return load_block(row_pointers(p_row, s_row, R, C), row_tile_mask(n_rows, n_cols, R, C, EXACT))


@triton.jit
def load_rows(p_row, s_row, n_rows, n_cols, R: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """fp32 [R, C], zero outside."""
    return fetch_rows(p_row, s_row, n_rows, n_cols, R, C, EXACT).to(tl.float32)


@triton.jit
def fetch_whole_rows(p_row, s_row, n_rows, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """[R, C >= D] in the dtype of the memory, zero outside. There may be no rows: n_rows may be negative."""
    if R == 1:
        n_cols = tl.where(n_rows > 0, D, 0)
        b_tile = fetch_rows(p_row, s_row, n_rows, n_cols, R, C, False)
    else:
        b_tile = fetch_rows(p_row, s_row, n_rows, D, R, C, C == D)
    return b_tile


@triton.jit
def store_rows(p_row, s_row, b_tile, n_rows, n_cols, R: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """Stores what lies inside of [R, C], in the dtype of the memory."""
    p_tile = row_pointers(p_row, s_row, R, C)
    b_tile = b_tile.to(p_row.dtype.element_ty)
    store_block(p_tile, b_tile, row_tile_mask(n_rows, n_cols, R, C, EXACT))


@triton.jit
def load_statistic(p_value, n_rows, R: tl.constexpr):
    """[R]"""
    o_row = tl.arange(0, R)
    return load_block(p_value + o_row, m_block=places_below(o_row, n_rows, R == 1))


@triton.jit
def store_statistic(p_value, b_value, n_rows, R: tl.constexpr, s_row=1):
    """Stores [R], s_row elements apart."""
    o_row = tl.arange(0, R)
    if R > 1:
        tl.store(p_value + o_row * s_row, b_value, mask=o_row < n_rows)
    else:
        tl.store(p_value + o_row, b_value)


@triton.jit
def store_gradient(
    p_dv, p_table, b_dv, i_source, i_row, i_token, i_col, n_rows, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of a source, columns i_col on of tokens i_token on; nothing where the table says NO_GRADIENT."""
    if p_table is None:
        store_rows(p_dv + i_row * D + i_col, D, b_dv, n_rows, D - i_col, R, C, EXACT)
    else:
        i_offset = tl.load(p_table + i_source)
        if i_offset != NO_GRADIENT:
            store_rows(p_dv + i_offset + i_token * D + i_col, D, b_dv, n_rows, D - i_col, R, C, EXACT)


@triton.jit
def store_partial_sum(p_partials, b_sum, D: tl.constexpr, C: tl.constexpr):
    """Stores this program's sum over the rows of [R, C >= D]: one row of fp32 [programs, D]."""
    p_partial = p_partials + tl.program_id(0).to(tl.int64) * D
    store_rows(p_partial, D, tl.sum(b_sum, axis=0)[None, :], 1, D, 1, C, C == D)


@triton.jit
def count_rows(n_left, S: tl.constexpr):
    """Rows of a tile: those of S layers, or of the tokens that are left."""
    if S > 1:
        return S
    else:
        return n_left


@triton.jit
def load_query(
    p_query, p_rms_weight, s_weight, D: tl.constexpr, S: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):
    """g of S layers, fp32 [BLOCK_S, BLOCK_D], zero outside. s_weight: 0 where all have one rms_weight."""
    EXACT: tl.constexpr = BLOCK_D == D
    b_query = load_rows(p_query, D, S, D, BLOCK_S, BLOCK_D, EXACT)
    return b_query * load_rows(p_rms_weight, s_weight, S, D, BLOCK_S, BLOCK_D, EXACT)


@triton.jit
def load_prefix(
    p_prefix, p_x, p_new_prefix, i_token, n_left, s_prefix, s_x, s_new_prefix,
    D: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """fp32 [M, C >= D]: rows of the prefix from i_token on. A layer's output x, where there is one, is added first, and the
    sum is rounded to the dtype of p_new_prefix and stored there."""
    b_p = load_rows(p_prefix + i_token * s_prefix, s_prefix, n_left, D, M, C, C == D)
    if p_x is not None:
        b_p += load_rows(p_x + i_token * s_x, s_x, n_left, D, M, C, C == D)
        b_new_prefix = b_p.to(p_new_prefix.dtype.element_ty)
        store_rows(p_new_prefix + i_token * s_new_prefix, s_new_prefix, b_new_prefix, n_left, D, M, C, C == D)
        b_p = widen(b_new_prefix)
    return b_p


@triton.jit
def store_lse(p_lse, b_reference, b_sum, i_row, n_rows, R: tl.constexpr):
    """Stores log(sum(exp(s))), from the sum of exp(s - reference), and returns 1 / that sum, a factor of o."""
    b_factor = 1.0 / b_sum
    if p_lse is not None:
        # Not + log(b_sum): CANN 8.5 sets a flag twice where the vector unit takes what the scalar unit summed in a loop.
        store_statistic(p_lse + i_row, b_reference - tl.log(b_factor), n_rows, R)
    return b_factor


@triton.jit
def normalise_rows(b_h, p_weight, p_y, p_rstd, i_row, n_rows, eps, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Stores y = h / rms(h) * weight and 1 / rms(h) for rows i_row on, whole ones, of h as it is stored, fp32 [R, C]."""
    EXACT: tl.constexpr = C == D
    b_rstd = rms_inverse(tl.sum(b_h * b_h, axis=1), eps, D)
    b_weight = load_rows(p_weight, 0, 1, D, 1, C, EXACT)
    store_rows(p_y + i_row * D, D, b_h * b_rstd[:, None] * b_weight, n_rows, D, R, C, EXACT)
    if p_rstd is not None:
        store_statistic(p_rstd + i_row, b_rstd, n_rows, R)


# Where values are keys, statistics of a turn's tokens are tiles [ROWS, BLOCK_N], and [ROWS] for the prefix: row i * Q + q is
# query q of token i, a column is a block.


@triton.jit
def is_number(i, R: tl.constexpr):
    """[R], true at place i. Compared as floats: chips compare vectors of these alone."""
    return tl.arange(0, R).to(tl.float32) == tl.cast(i, tl.float32)


@triton.jit
def add_row(b_tile, b_row, i_row, R: tl.constexpr):
    """[R, columns] with b_row [columns] added to row i_row."""
    return b_tile + tl.where(is_number(i_row, R)[:, None], b_row[None, :], 0.0)


@triton.jit
def pick_row(b_tile, i_row, R: tl.constexpr):
    """Row i_row of [R, columns]."""
    return tl.sum(tl.where(is_number(i_row, R)[:, None], b_tile, 0.0), axis=0)


@triton.jit
def add_number(b_numbers, b_number, i, R: tl.constexpr):
    """[R] with b_number [1] added at place i."""
    return b_numbers + tl.where(is_number(i, R), b_number, 0.0)


@triton.jit
def pick_number(b_numbers, i, R: tl.constexpr):
    """The number [1] at place i of [R]."""
    return tl.sum(tl.where(is_number(i, R), b_numbers, 0.0)[None, :], axis=1)


@triton.jit
def softmax_of_sources(b_score, b_p_score):
    """alpha of blocks [ROWS, BLOCK_N] and of the prefix [ROWS]."""
    b_max = tl.max(b_score, axis=1)
    b_max = tl.where(b_p_score > b_max, b_p_score, b_max)
    b_weight, b_p_weight = tl.exp(b_score - b_max[:, None]), tl.exp(b_p_score - b_max)
    b_inverse = 1.0 / (tl.sum(b_weight, axis=1) + b_p_weight)
    return b_weight * b_inverse[:, None], b_p_weight * b_inverse


@triton.jit
def store_statistic_rows(p_value, b_blocks, b_prefix, i_row, n_rows, n_blocks, n_sources, R: tl.constexpr, N: tl.constexpr):
    """Stores rows i_row on of [rows, n_sources]: of blocks [R, N] and, unless it is None, of the prefix [R]."""
    o_row, o_block = tl.arange(0, R), tl.arange(0, N)
    p_first = p_value + i_row * n_sources
    m_tile = (o_row < n_rows)[:, None] & (o_block < n_blocks)[None, :]
    tl.store(p_first + (o_row[:, None] * n_sources + o_block[None, :]), b_blocks, mask=m_tile)
    if b_prefix is not None:
        tl.store(p_first + n_blocks + o_row * n_sources, b_prefix, mask=o_row < n_rows)


@triton.jit
def load_of_blocks(p_value, other, i_row, n_rows, n_blocks, n_sources, R: tl.constexpr, N: tl.constexpr):
    """[R, N] of what `store_statistic_rows` stores, `other` outside."""
    o_row, o_block = tl.arange(0, R), tl.arange(0, N)
    m_tile = (o_row < n_rows)[:, None] & (o_block < n_blocks)[None, :]
    p_tile = p_value + i_row * n_sources + (o_row[:, None] * n_sources + o_block[None, :])
    return tl.load(p_tile, mask=m_tile, other=other)


@triton.jit
def load_of_prefix(p_value, other, i_row, n_rows, n_blocks, n_sources, R: tl.constexpr):
    """[R] of the prefix, which `store_statistic_rows` stores behind the blocks, `other` outside."""
    o_row = tl.arange(0, R)
    return tl.load(p_value + i_row * n_sources + n_blocks + o_row * n_sources, mask=o_row < n_rows, other=other)


@triton.jit
def weights_of_sources(
    b_dot, b_square, b_p_dot, b_p_square, p_score, p_rstd, p_prefix, i_row, n_rows, n_blocks, eps,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """alpha r of blocks [ROWS, BLOCK_N] and of the prefix [ROWS], from <g, v> and <v, v>; stores s and r."""
    m_block = (tl.arange(0, BLOCK_N).to(tl.float32) < tl.cast(n_blocks, tl.float32))[None, :]
    b_rstd, b_p_rstd = rms_inverse(b_square, eps, D), rms_inverse(b_p_square, eps, D)
    b_score, b_p_score = b_dot * b_rstd, b_p_dot * b_p_rstd
    if p_score is not None:
        n_sources = n_blocks if p_prefix is None else n_blocks + 1
        b_last_score, b_last_rstd = None if p_prefix is None else b_p_score, None if p_prefix is None else b_p_rstd
        store_statistic_rows(p_score, b_score, b_last_score, i_row, n_rows, n_blocks, n_sources, ROWS, BLOCK_N)
        store_statistic_rows(p_rstd, b_rstd, b_last_rstd, i_row, n_rows, n_blocks, n_sources, ROWS, BLOCK_N)
    if p_prefix is None:
        b_p_score, b_p_rstd = tl.full([ROWS], NO_SCORE, tl.float32), tl.zeros([ROWS], tl.float32)
    b_alpha, b_p_alpha = softmax_of_sources(tl.where(m_block, b_score, NO_SCORE), b_p_score)
    # eps may be 0, and what is no block has no length
    return b_alpha * tl.where(m_block, b_rstd, 0.0), b_p_alpha * b_p_rstd


@triton.jit
def factors_of_gradients(
    b_e, b_p_e, p_score, p_rstd, p_prefix, i_row, n_rows, n_blocks,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """a, c and each query's part of k, of blocks [ROWS, BLOCK_N] and of the prefix [ROWS], from <dh, v>."""
    n_sources = n_blocks if p_prefix is None else n_blocks + 1
    b_score = load_of_blocks(p_score, NO_SCORE, i_row, n_rows, n_blocks, n_sources, ROWS, BLOCK_N)
    b_rstd = load_of_blocks(p_rstd, 0.0, i_row, n_rows, n_blocks, n_sources, ROWS, BLOCK_N)
    if p_prefix is None:
        b_p_score = tl.full([ROWS], NO_SCORE, tl.float32)
        b_p_rstd = tl.zeros([ROWS], tl.float32)
    else:
        b_p_score = load_of_prefix(p_score, NO_SCORE, i_row, n_rows, n_blocks, n_sources, ROWS)
        b_p_rstd = load_of_prefix(p_rstd, 0.0, i_row, n_rows, n_blocks, n_sources, ROWS)
    b_alpha, b_p_alpha = softmax_of_sources(b_score, b_p_score)
    b_e, b_p_e = b_e * b_rstd, b_p_e * b_p_rstd
    b_delta = tl.sum(b_alpha * b_e, axis=1) + b_p_alpha * b_p_e
    b_ds, b_p_ds = b_alpha * (b_e - b_delta[:, None]), b_p_alpha * (b_p_e - b_delta)
    b_a, b_p_a = b_alpha * b_rstd, b_p_alpha * b_p_rstd
    b_c, b_p_c = b_ds * b_rstd, b_p_ds * b_p_rstd
    b_k = (b_alpha * b_e + b_ds * b_score) * b_rstd * b_rstd * (1.0 / D)
    b_p_k = (b_p_alpha * b_p_e + b_p_ds * b_p_score) * b_p_rstd * b_p_rstd * (1.0 / D)
    return b_a, b_c, b_k, b_p_a, b_p_c, b_p_k
