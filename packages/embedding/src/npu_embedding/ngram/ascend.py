"""The n-gram look-up on Ascend: ids are hashed on the vector unit, and rows are gathered by what it finds.

    row[h, i] = offsets[h] + (mix over k of token[i - k] * multipliers[k]) mod sizes[h]

No vector unit multiplies, divides or compares 64-bit integers. A 64-bit number is six limbs of 11 bits here, each in an
int32: a product of two limbs has 22 bits, and no sum of products overflows. A remainder takes the limbs from the highest to
the lowest. A quotient in fp32 is off by one at most: what is left for the next limb lies a little beyond -size to size.
"""

from math import ceil

from npu_tiling import Block, Tile, persistent_grid
from npu_tiling.budget import FP32, here
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling

from ..formula import block_columns
from ..rows import TILE_BYTES, RowKernel, RowShape, RowTiling, fills_units, largest_tile

# Tokens whose ids are hashed at once: whole 32-byte units of int32, two repeats of a vector instruction at most.
_TOKENS, _MAX_TOKENS = 8, 128
_NUMBERS = 40  # int32 of a token that are alive at once: limbs, products, remainders
_INDEX = 8  # bytes


@triton.jit
def load_tokens(
    p_ids, p_history, i_place, i_batch, i_token, n_left, o_m, eos, SHIFT: tl.constexpr, CONTEXT: tl.constexpr,
):  # fmt: skip
    """int32 [BLOCK_M]: the ids SHIFT places before each token of a tile; before the first the history, or EOS."""
    p_source = p_ids + i_place - SHIFT
    if i_place >= SHIFT:
        b_id = tl.load(p_source + o_m, mask=o_m < n_left, other=0).to(tl.int32)
    else:  # The first tile of all: a load must neither begin before the tensor nor end within a unit of the buffer.
        b_id = tl.zeros_like(o_m)
        for i in tl.range((SHIFT - i_place).to(tl.int32), n_left):
            b_id = tl.where((o_m - i).to(tl.float32) == 0.0, tl.load(p_source + i).to(tl.int32), b_id)
    if SHIFT > 0:
        i_source = i_token - SHIFT
        m_before = (o_m + i_source).to(tl.float32) < 0
        if p_history is not None:
            p_before = p_history + i_batch * CONTEXT + CONTEXT + i_source
            b_id = tl.where(m_before, tl.load(p_before + o_m, mask=o_m < -i_source, other=0).to(tl.int32), b_id)
        else:
            b_id = tl.where(m_before, eos, b_id)
    return b_id


@triton.jit
def mix(b_0, b_1, b_2, b_3, b_4, b_5, b_id, p_multiplier, ADD: tl.constexpr):
    """Limbs of a number, to which id * multiplier is added, or is combined by exclusive or; modulo 2^64."""
    i_factor = tl.load(p_multiplier)
    i_f0 = (i_factor & 2047).to(tl.int32)
    i_f1 = ((i_factor >> 11) & 2047).to(tl.int32)
    i_f2 = ((i_factor >> 22) & 2047).to(tl.int32)
    i_f3 = ((i_factor >> 33) & 2047).to(tl.int32)
    i_f4 = ((i_factor >> 44) & 2047).to(tl.int32)
    i_f5 = ((i_factor >> 55) & 511).to(tl.int32)
    b_t0, b_t1, b_t2 = b_id & 2047, (b_id >> 11) & 2047, b_id >> 22  # the last with the sign
    b_p0 = b_t0 * i_f0
    b_p1 = b_t0 * i_f1 + b_t1 * i_f0
    b_p2 = b_t0 * i_f2 + b_t1 * i_f1 + b_t2 * i_f0
    b_p3 = b_t0 * i_f3 + b_t1 * i_f2 + b_t2 * i_f1
    b_p4 = b_t0 * i_f4 + b_t1 * i_f3 + b_t2 * i_f2
    b_p5 = b_t0 * i_f5 + b_t1 * i_f4 + b_t2 * i_f3
    if ADD:
        b_p0, b_p1, b_p2, b_p3, b_p4, b_p5 = b_p0 + b_0, b_p1 + b_1, b_p2 + b_2, b_p3 + b_3, b_p4 + b_4, b_p5 + b_5
    b_p1 += b_p0 >> 11
    b_p2 += b_p1 >> 11
    b_p3 += b_p2 >> 11
    b_p4 += b_p3 >> 11
    b_p5 += b_p4 >> 11
    b_p0, b_p1, b_p2, b_p3, b_p4, b_p5 = b_p0 & 2047, b_p1 & 2047, b_p2 & 2047, b_p3 & 2047, b_p4 & 2047, b_p5 & 511
    if ADD:
        return b_p0, b_p1, b_p2, b_p3, b_p4, b_p5
    else:
        return b_0 ^ b_p0, b_1 ^ b_p1, b_2 ^ b_p2, b_3 ^ b_p3, b_4 ^ b_p4, b_5 ^ b_p5


@triton.jit
def mix_tokens(
    b_near, b_0, b_1, b_2, b_3, b_4, b_5, p_ids, p_history, p_multipliers, i_place, i_batch, i_token, n_left, o_m, eos, fill,
    FIRST: tl.constexpr, STOP: tl.constexpr, CONTEXT: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Mixes in the ids FIRST to STOP - 1 places before each token. b_near: 0 where EOS stands between."""
    for k in tl.static_range(FIRST, STOP):
        b_id = load_tokens(p_ids, p_history, i_place, i_batch, i_token, n_left, o_m, eos, k, CONTEXT)
        if k > 0:
            b_near = tl.where((b_id - eos).to(tl.float32) == 0.0, 0.0, b_near)
            b_id = tl.where(b_near == 0.0, fill, b_id)
        b_0, b_1, b_2, b_3, b_4, b_5 = mix(b_0, b_1, b_2, b_3, b_4, b_5, b_id, p_multipliers + k, ADD)
    return b_near, b_0, b_1, b_2, b_3, b_4, b_5


@triton.jit
def take_limb(b_rest, b_limb, b_inverse, i_high, i_low):
    """rest * 2^11 + limb less a multiple of size, a little beyond -size to size; size = i_high * 2^11 + i_low."""
    b_quotient = ((b_rest.to(tl.float32) * 2048.0 + b_limb.to(tl.float32)) * b_inverse).to(tl.int32)
    return (b_rest - b_quotient * i_high) * 2048 + (b_limb - b_quotient * i_low)


@triton.jit
def remainder(b_0, b_1, b_2, b_3, b_4, b_5, i_size, BLOCK_M: tl.constexpr):
    """int32 [BLOCK_M]: the remainder of signed numbers by `i_size`, which is below 2^30; from 0 to i_size - 1."""
    b_inverse = tl.full([BLOCK_M], 1.0, tl.float32) / i_size.to(tl.float32)
    i_high, i_low = i_size >> 11, i_size & 2047
    b_rest = b_5 - ((b_5 >> 8) << 9)  # the highest limb, of 9 bits, has the sign
    b_rest = take_limb(b_rest, b_4, b_inverse, i_high, i_low)
    b_rest = take_limb(b_rest, b_3, b_inverse, i_high, i_low)
    b_rest = take_limb(b_rest, b_2, b_inverse, i_high, i_low)
    b_rest = take_limb(b_rest, b_1, b_inverse, i_high, i_low)
    b_rest = take_limb(b_rest, b_0, b_inverse, i_high, i_low)
    # A quotient that is off by one may leave a little more than size on either side.
    b_rest = tl.where(b_rest.to(tl.float32) < 0, b_rest + i_size, b_rest)
    b_rest = tl.where(b_rest.to(tl.float32) < 0, b_rest + i_size, b_rest)
    return tl.where((b_rest - i_size).to(tl.float32) < 0, b_rest, b_rest - i_size)


@triton.jit
def load_rows(p_table, b_row, s_table, o_m, o_col, TILES: tl.constexpr):
    """Rows [BLOCK_M, BLOCK_N] of the table, or without TILES the first [BLOCK_N]: a transfer a row."""
    if TILES:
        return tl.load(p_table + b_row.to(tl.int64)[:, None] * s_table + o_col[None, :])
    else:  # a number leaves the vector unit as a sum; fp32 sums of its halves are exact
        b_first = tl.where(o_m.to(tl.float32) == 0.0, 1.0, 0.0)
        i_high = tl.sum((b_row >> 11).to(tl.float32) * b_first, axis=0).to(tl.int64)
        i_low = tl.sum((b_row & 2047).to(tl.float32) * b_first, axis=0).to(tl.int64)
        return tl.load(p_table + (i_high * 2048 + i_low) * s_table + o_col)


@triton.jit
def store_rows(p_out, b_rows, s_out, o_m, n_left, o_col, TILES: tl.constexpr):
    """Stores the rows of `load_rows`."""
    b_rows = b_rows.to(p_out.dtype.element_ty)
    if TILES:
        tl.store(p_out + o_m[:, None] * s_out + o_col[None, :], b_rows, mask=(o_m < n_left)[:, None])
    else:
        tl.store(p_out + o_col, b_rows)


@triton.jit(do_not_specialize=["n_batches", "n_tokens", "n_rows", "eos", "fill"])
def ngram_rows_kernel(
    p_ids,  # [n_batches, n_tokens]
    p_history,  # [n_batches, CONTEXT]: the ids before those; None: EOS stands there
    p_multipliers,  # int64 [CONTEXT + 1], where OWN [CONTEXT * HEADS, CONTEXT + 1]
    p_sizes,  # int64 [CONTEXT * HEADS]
    p_offsets,  # int64 [CONTEXT * HEADS]
    p_table,  # [n_rows, N]
    p_out,  # [n_batches, n_tokens, CONTEXT * HEADS, N] where CONCAT, else [n_batches, n_tokens, N]
    p_rows,  # int32 [CONTEXT * HEADS, n_batches, n_tokens]
    n_batches, n_tokens, n_rows, eos,
    fill,  # in place of EOS and what stands before it
    s_table,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,  # whether the rows of a tile of tokens move at once; else a tile is one token
    CONTEXT: tl.constexpr,
    HEADS: tl.constexpr,  # of an n-gram
    ADD: tl.constexpr,
    OWN: tl.constexpr,  # each head has multipliers of its own
    CONCAT: tl.constexpr,  # elements are bits then, integers of their size
    NAN: tl.constexpr,  # the bits of a NaN
):  # fmt: skip
    """Finds the rows of the table that n-grams hash to, and copies them (CONCAT) or adds those of a token.

    A program takes tiles of TOKENS tokens of one sequence by BLOCK_N columns, through all heads.
    """
    # races: allow p_out: blocks of columns overlap at the row's end, where every program writes the same bits
    # lint: allow short-transfer: rows are as wide as the caller's, and a head's lie apart
    # lint: allow scalar-reduction: rows that are no multiple of 32 bytes are fetched one by one, by a number
    # races: allow p_rows: every block of columns finds the same rows
    TOKENS: tl.constexpr = BLOCK_M if TILES else 1
    N_HEADS: tl.constexpr = CONTEXT * HEADS
    S_OUT: tl.constexpr = N_HEADS * N if CONCAT else N
    o_m = tl.arange(0, BLOCK_M)
    if CONCAT:
        b_nan = tl.full([BLOCK_N], NAN, p_out.dtype.element_ty)
    n_tiles = tl.cdiv(n_tokens, TOKENS)
    n_tasks = n_batches * n_tiles * tl.cdiv(N, BLOCK_N)
    for i_task in tl.range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_tile = i_task % (n_batches * n_tiles)
        o_col = block_columns(i_task // (n_batches * n_tiles), N, BLOCK_N)
        i_batch = (i_tile // n_tiles).to(tl.int64)
        i_token = (i_tile % n_tiles) * TOKENS
        i_place = i_batch * n_tokens + i_token
        n_left = tl.minimum(n_tokens - i_token, TOKENS)
        b_zero, b_one = tl.zeros([BLOCK_M], tl.int32), tl.full([BLOCK_M], 1.0, tl.float32)
        if not OWN:
            b_near, b_0, b_1, b_2, b_3, b_4, b_5 = mix_tokens(
                b_one, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, p_ids, p_history, p_multipliers, i_place, i_batch,
                i_token, n_left, o_m, eos, fill, 0, 1, CONTEXT, ADD,
            )  # fmt: skip
        if not CONCAT:
            if TILES:
                b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            else:
                b_sum = tl.zeros([BLOCK_N], tl.float32)
        for k in tl.static_range(1, CONTEXT + 1):
            if not OWN:
                b_near, b_0, b_1, b_2, b_3, b_4, b_5 = mix_tokens(
                    b_near, b_0, b_1, b_2, b_3, b_4, b_5, p_ids, p_history, p_multipliers, i_place, i_batch, i_token, n_left,
                    o_m, eos, fill, k, k + 1, CONTEXT, ADD,
                )  # fmt: skip
            for h in tl.range((k - 1) * HEADS, k * HEADS):
                if OWN:
                    _, b_0, b_1, b_2, b_3, b_4, b_5 = mix_tokens(
                        b_one, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, p_ids, p_history,
                        p_multipliers + h * (CONTEXT + 1), i_place, i_batch, i_token, n_left, o_m, eos, fill,
                        0, k + 1, CONTEXT, ADD,
                    )  # fmt: skip
                i_size, i_offset = tl.load(p_sizes + h), tl.load(p_offsets + h)
                # Whether the table has the rows of this head.
                has = ((i_size > 0) & (i_size <= n_rows) & (i_offset >= 0) & (i_offset <= n_rows - i_size)).to(tl.int32)
                i_size, i_offset = tl.where(has > 0, i_size, 1).to(tl.int32), tl.where(has > 0, i_offset, 0).to(tl.int32)
                b_row = remainder(b_0, b_1, b_2, b_3, b_4, b_5, i_size, BLOCK_M) + i_offset
                p_head = p_rows + h * (n_batches * n_tokens).to(tl.int64) + i_place + o_m
                tl.store(p_head, b_row * has + (has - 1), mask=o_m < n_left)
                if not CONCAT:
                    b_rows = load_rows(p_table, b_row, s_table, o_m, o_col, TILES)
                    b_sum += b_rows.to(tl.float32) + tl.where(has > 0, 0.0, float("nan"))
                elif has > 0:
                    b_rows = load_rows(p_table, b_row, s_table, o_m, o_col, TILES)
                    store_rows(p_out + i_place * S_OUT + h * N, b_rows, S_OUT, o_m, n_left, o_col, TILES)
                else:
                    for i in tl.range(i_place, i_place + n_left):
                        tl.store(p_out + i * S_OUT + h * N + o_col, b_nan)
        if not CONCAT:
            store_rows(p_out + i_place * S_OUT, b_sum, S_OUT, o_m, n_left, o_col, TILES)


def _tiles(shape: RowShape, moves_tiles: bool) -> list[Tile]:
    rows: tuple[str, ...] = ("BLOCK_M", "BLOCK_N") if moves_tiles else ("BLOCK_N",)
    tiles = [Tile("rows", rows, shape.itemsize, 2), Tile("row of NaN", ("BLOCK_N",), shape.itemsize)]
    return [*tiles, Tile("ids", ("BLOCK_M",), _INDEX, 6), Tile("numbers", (_NUMBERS, "BLOCK_M"), FP32)]


def _sum_tiles(shape: RowShape, moves_tiles: bool) -> list[Tile]:
    rows: tuple[str, ...] = ("BLOCK_M", "BLOCK_N") if moves_tiles else ("BLOCK_N",)
    rounded = [Tile("rows or sums that are rounded", rows, FP32)] * (shape.itemsize < FP32 or moves_tiles)
    return [*_tiles(shape, moves_tiles), Tile("sums", rows, FP32, 2), *rounded]


NGRAM = RowKernel("ngram_rows_kernel", _tiles, flag="TILES", unit=_TOKENS, one_by_one=True)
NGRAM_SUM = RowKernel("ngram_rows_kernel, which adds", _sum_tiles, flag="TILES", unit=_TOKENS, one_by_one=True)


def choose(shape: RowShape, concat: bool) -> RowTiling:
    """Blocks of the look-up. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    kernel = NGRAM if concat else NGRAM_SUM
    if not fills_units(shape.width, shape):
        why = "rows that do not fill 32-byte units move one by one"
        tokens = Block("BLOCK_M", _TOKENS, _TOKENS)
        return largest_tile(kernel, shape, tokens, moves_tiles=False, why=why, decided_at=here())
    most = min(_MAX_TOKENS, TILE_BYTES // (shape.width * shape.itemsize) // _TOKENS * _TOKENS)
    tokens = Block("BLOCK_M", max(_TOKENS, most), _TOKENS, _TOKENS)
    return largest_tile(kernel, shape, tokens, why="ids of many tokens are hashed at once", decided_at=here())


def grid(tiling: CountTiling, n_batches: int, n_tokens: int, heads: int) -> int:
    """Programs, each of which takes tokens of one sequence through all heads."""
    return persistent_grid(n_batches * ceil(n_tokens / tiling.per_program) * tiling.column_blocks, tiling.device)
