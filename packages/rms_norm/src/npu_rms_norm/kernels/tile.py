"""Device code of RMSNorm.

    rstd = 1 / sqrt(mean(x^2) + eps)        n = x rstd        y = n (offset + w) + b
    g = dy (offset + w)                     dx = rstd (g - n mean(g n))        dw, db = sums over rows of dy n and of dy

With a gate, a = act(gate) and a' its derivative, either z = n (offset + w) + b is gated:

    y = z a            dgate = dy z a'      and dy a stands for dy above

or, GATE_FIRST, x is: x a stands for x above, and of its gradient du

    dx = du a          dgate = du x a'

Rows lie on two levels, `n_outer` groups of `n_inner` rows (None, on CUDA: one), and every tensor has a stride for each (in
elements), so that a slice of a wider tensor is read in place. A tile is BLOCK_M rows of one group, or all rows of BLOCK_G
groups, by BLOCK_N columns; or, BLOCK_G < 0 (CUDA), BLOCK_M rows of whatever groups, which have -BLOCK_G rows each. Programs
stride over the tiles; with CONTIGUOUS_SPLIT each program takes one contiguous, equal range of the rows of the only group.
PER_HEAD: a group is the rows of one head, which has its own parameters; a program takes tiles of one head, BLOCK_G is 1, and
in results, which are contiguous, the heads of a token stand side by side. ROUND_NORMALISED rounds n, to bf16 or (not
ROUND_BF16) fp16, before it meets the weight, ROUND_FACTORS rounds rstd, offset + w and b as well.

Kernels with `wide` in their names serve rows that do not fit on chip: columns in blocks, x read twice.
"""

import triton
import triton.language as tl


@triton.jit
def even_row_range(n_rows):
    """First row and stop of the equal, contiguous share of one group's rows that this program takes."""
    n_share = tl.cdiv(n_rows, tl.num_programs(0))
    i_first = tl.minimum(tl.program_id(0) * n_share, n_rows)
    return i_first, tl.minimum(i_first + n_share, n_rows)


@triton.jit
def tile_range(i_program, n_programs, n_outer, n_inner, G: tl.constexpr, M: tl.constexpr, PER_HEAD: tl.constexpr):
    """First tile of a program, where they stop, the step, and the program's head (0 without PER_HEAD)."""
    n_tiles = tl.cdiv(n_inner, M)  # of one group
    if n_outer is None:
        return i_program, n_tiles, n_programs, 0
    elif G < 0:
        return i_program, tl.cdiv(n_outer * n_inner, M), n_programs, 0
    elif PER_HEAD:
        i_head = i_program % n_outer
        return i_head * n_tiles + i_program // n_outer, (i_head + 1) * n_tiles, n_programs // n_outer, i_head
    else:
        return i_program, tl.cdiv(n_outer, G) * n_tiles, n_programs, 0


@triton.jit
def result_strides(n_outer, n_inner, N: tl.constexpr, PER_HEAD: tl.constexpr):
    """From group to group and from row to row of a result, which is contiguous."""
    if PER_HEAD:
        return N, tl.cast(n_outer, tl.int64) * N
    else:
        return tl.cast(n_inner, tl.int64) * N, N  # a group may have 2^31 elements


@triton.jit
def tile_rows(i_tile, n_outer, n_inner, G: tl.constexpr, M: tl.constexpr, PER_HEAD: tl.constexpr = False):
    """First group and row of a tile, and how many groups, and rows of the first one, are left from there on.

    G < 0: group and row of each of its rows, [M], 1, and how many rows are left in all; PER_HEAD: in the order of tokens.
    """
    if n_outer is None:
        return 0, i_tile * M, 1, n_inner - i_tile * M
    elif G < 0:
        o_row = i_tile * M + tl.arange(0, M)
        i_first = o_row // -G
        i_second = o_row - i_first * -G
        n_left = n_outer * n_inner - i_tile * M
        if PER_HEAD:
            return i_second, i_first, 1, n_left
        else:
            return i_first, i_second, 1, n_left
    else:
        n_tiles = tl.cdiv(n_inner, M)  # of one group
        i_group = i_tile // n_tiles
        i_outer, i_inner = i_group * G, (i_tile - i_group * n_tiles) * M
        return i_outer, i_inner, n_outer - i_outer, n_inner - i_inner


@triton.jit
def row_numbers(i_tile, i_outer, i_inner, n_inner, G: tl.constexpr, M: tl.constexpr, PER_HEAD: tl.constexpr):
    """Of a tile's rows, counted through all groups: the first one and what is added for each, [ROWS]."""
    if G >= 0:
        return tl.cast(i_outer, tl.int64) * n_inner + i_inner, tl.arange(0, G * M)
    elif PER_HEAD:
        return 0, tl.cast(i_outer, tl.int64) * n_inner + i_inner
    else:
        return tl.cast(i_tile, tl.int64) * M, tl.arange(0, M)


@triton.jit
def tile_rows_of_range(i_tile, n_tiles, i_first, i_stop, M: tl.constexpr):
    """As `tile_rows`, of one group's rows from i_first to i_stop: the short tile is the first, before the pipeline fills."""
    i_tile_stop = i_stop - (n_tiles - 1 - i_tile) * M
    i_inner = tl.maximum(i_tile_stop - M, i_first)
    return 0, i_inner, 1, i_tile_stop - i_inner


@triton.jit
def row_stride(s_inner, N: tl.constexpr):
    """From row to row: None where rows of N lie side by side, whose distances in a tile are then known to the compiler."""
    if s_inner is None:
        return N
    else:
        return s_inner


@triton.jit
def tile_at(p_base, s_outer, s_inner, i_outer, i_inner, i_col, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Pointers [M, N], or [G, M, N] of several groups, to a tile; 64-bit offsets on scalars alone."""
    p_tile = p_base + tl.cast(i_outer, tl.int64) * s_outer + tl.cast(i_inner, tl.int64) * s_inner + i_col
    o_row, o_col = tl.arange(0, M), tl.arange(0, N)
    if M > 1 and G >= 0:
        s_inner = tl.cast(s_inner, tl.int32)  # tiling bounds offsets inside a tile
    if G < 0:
        return p_tile[:, None] + o_col[None, :]
    elif G > 1:
        s_group = tl.cast(s_outer, tl.int32)
        return p_tile + (tl.arange(0, G)[:, None, None] * s_group + o_row[None, :, None] * s_inner + o_col[None, None, :])
    elif M > 1:
        return p_tile + (o_row[:, None] * s_inner + o_col[None, :])
    else:
        return p_tile + o_col[None, :]


@triton.jit
def tile_mask(n_outer, n_inner, n_cols, G: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EXACT_N: tl.constexpr):
    """What of a tile lies inside, given how many groups, rows and columns are left; EXACT_N: every column does."""
    if G > 1:
        m_tile = (tl.arange(0, G) < n_outer)[:, None, None]
        if not EXACT_N:
            m_tile = m_tile & (tl.arange(0, N) < n_cols)[None, None, :]
    elif M > 1:
        m_tile = (tl.arange(0, M) < n_inner)[:, None]
        if not EXACT_N:
            m_tile = m_tile & (tl.arange(0, N) < n_cols)[None, :]
    else:
        m_tile = (tl.arange(0, N) < n_cols)[None, :]
    return m_tile


@triton.jit
def row_mask(n_outer, n_inner, G: tl.constexpr, M: tl.constexpr):
    """Which of the G * M rows of a tile lie inside, given how many groups, and rows of the first one, are left."""
    if G > 1:
        return tl.arange(0, G * M) < tl.minimum(n_outer, G) * n_inner
    else:
        return tl.arange(0, M) < n_inner


@triton.jit
def load_raw(
    p_tile,
    n_outer,
    n_inner,
    n_cols,
    G: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EXACT_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """[M, N], or [G, M, N] of several groups, as it lies in memory, zero outside."""
    if G * M == 1 and EXACT_N:
        return tl.load(p_tile, eviction_policy=EVICTION)
    else:
        m_tile = tile_mask(n_outer, n_inner, n_cols, G, M, N, EXACT_N)
        return tl.load(p_tile, mask=m_tile, other=0.0, eviction_policy=EVICTION)


@triton.jit
def load_tile(
    p_tile,
    n_outer,
    n_inner,
    n_cols,
    G: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EXACT_N: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """fp32 [G * M, N], zero outside."""
    b_tile = load_raw(p_tile, n_outer, n_inner, n_cols, G, M, N, EXACT_N, EVICTION).to(tl.float32)
    if G > 1:
        b_tile = tl.reshape(b_tile, (G * M, N))
    return b_tile


@triton.jit
def store_tile(
    p_tile,
    b_tile,
    n_outer,
    n_inner,
    n_cols,
    G: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EXACT_N: tl.constexpr,
):
    """Stores what lies inside of [G * M, N], in the dtype of the memory."""
    b_tile = b_tile.to(p_tile.dtype.element_ty)
    if G > 1:
        b_tile = tl.reshape(b_tile, (G, M, N))
    if G * M == 1 and EXACT_N:
        tl.store(p_tile, b_tile)
    else:
        tl.store(p_tile, b_tile, mask=tile_mask(n_outer, n_inner, n_cols, G, M, N, EXACT_N))


@triton.jit
def store_partial(p_partials, b_sum, i_partial, o_col, N: tl.constexpr, EXACT_N: tl.constexpr):
    """Stores one partial sum of a parameter's gradient, of the rows of [G * M, BLOCK_N]."""
    p_partial = p_partials + i_partial.to(tl.int64) * N + o_col
    if EXACT_N:
        tl.store(p_partial, tl.sum(b_sum, axis=0))
    else:
        tl.store(p_partial, tl.sum(b_sum, axis=0), mask=o_col < N)
