"""Look-ups that sum, decode or normalise rows (bags) on Ascend, and their backward: kernels, and what their tiles hold.

With TILES bags have equally many ids, and a program takes BLOCK_M bags at a time: of each the first id, then the second. A
tile [BLOCK_M, BLOCK_N] is fetched by a transfer for each row, and is summed, normalised and stored at once. A tile of which
the table at hand does not have every id is taken bag by bag: see ../cuda.py.
"""

from typing import Any

from npu_tiling import Tile
from npu_tiling.budget import FP32, here
from npu_tiling.device import tl, triton

from ..cuda import (
    bag_ends,
    decode,
    id_at,
    ids_of_each,
    normalise,
    normalise_backward,
    spread_positions,
    store_zeros,
    sum_bag,
)
from ..formula import block_columns
from ..rows import RowKernel, RowShape, RowTiling, fills_units, largest_tile, tile_rows


@triton.jit
def has_all(p_index, p_base, i_first, i_stop, n_base, first_row, stop_row, i_padding):
    """Whether the ids of all these positions are in their bags and in the table at hand."""
    n_inside = 0
    for i in tl.range(i_first, i_stop):
        i_id = id_at(p_index, p_base, i, n_base)
        n_inside += ((i_id >= first_row) & (i_id < stop_row) & (i_id != i_padding)).to(tl.int32)
    return n_inside == i_stop - i_first


@triton.jit
def load_tile(
    p_index, p_base, p_weight, p_steps, i_bag, i_place, n_left, n_each, first_row, s_weight, o_m, o_col,
    FORMAT: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N]: rows of the ids at place `i_place` of the bags from `i_bag`."""
    i_first = first_row.to(tl.int64)
    if p_base is not None:
        i_first -= tl.load(p_base + i_place)
    if SINGLE:
        p_id = p_index + i_bag + o_m
    else:
        p_id = p_index + i_bag * n_each + i_place + o_m * n_each
    b_id = tl.load(p_id, mask=o_m < n_left, other=i_first).to(tl.int64)  # [BLOCK_M]
    b_rows = decode(tl.load(p_weight - i_first * s_weight + b_id[:, None] * s_weight + o_col[None, :]), FORMAT)
    if p_steps is not None:
        b_rows *= tl.load(p_steps - i_first + b_id).to(tl.float32)[:, None]
    return b_rows


@triton.jit(do_not_specialize=["n", "n_bags", "n_offsets", "n_base", "first_row", "stop_row", "n_total", "i_padding"])
def sum_bags_kernel(
    p_index,  # [n]
    p_offsets,  # [n_offsets], n_bags or one more; None: n / n_bags ids to a bag
    p_base,  # int64 [n_base]: the first rows of packed tables, which ids are of in turn; None: one table
    p_sample,  # [n]: weights of the ids; None: 1
    p_weight,  # [stop_row - first_row, N]
    p_steps,  # [stop_row - first_row]: factors of the rows; None: 1
    p_out,  # [n_bags, N]
    n, n_bags, n_offsets, n_base, first_row, stop_row, n_total, i_padding, s_weight, factor,
    eps,  # None: rows are not normalised
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    SINGLE: tl.constexpr,  # a bag has one id
    FORMAT: tl.constexpr,  # "e4m3" or "e5m2": int8 that are the bits of such floats
    MEAN: tl.constexpr,
):  # fmt: skip
    """The sum of the rows of each bag, decoded, weighted and times a factor; MEAN: over the number of its ids."""
    # races: allow p_out: blocks of columns overlap at the row's end, where every program writes the same bits
    # lint: allow scalar-loop: ids that lie in the table are counted on scalars, before a tile of rows moves
    # lint: allow short-transfer: rows are as wide as the caller's, and ids of a place lie apart
    # lint: allow strided-transfer: ids and weights of one place lie a bag apart, as many as a tile has rows
    o_m = tl.arange(0, BLOCK_M)
    n_tiles, n_each = tl.cdiv(n_bags, BLOCK_M), ids_of_each(p_offsets, n, n_bags)
    for i_task in tl.range(tl.program_id(0), n_tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        i_block = i_task // n_tiles
        i_bag = (i_task - i_block * n_tiles).to(tl.int64) * BLOCK_M
        n_left = tl.minimum(n_bags - i_bag, BLOCK_M)
        o_col = block_columns(i_block, N, BLOCK_N)
        if TILES:
            n_alone = n_left
            i_stop = (i_bag + n_left) * n_each
            if has_all(p_index, p_base, i_bag * n_each, i_stop, n_base, first_row, stop_row, i_padding):
                n_alone = n_left * 0
                if SINGLE:
                    b_sum = load_tile(p_index, p_base, p_weight, p_steps, i_bag, 0, n_left, n_each, first_row, s_weight,
                                      o_m, o_col, FORMAT, True)  # fmt: skip
                    if p_sample is not None:
                        b_sum *= tl.load(p_sample + i_bag + o_m, mask=o_m < n_left, other=0.0).to(tl.float32)[:, None]
                else:
                    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    for i_place in tl.range(0, n_each):
                        b_rows = load_tile(p_index, p_base, p_weight, p_steps, i_bag, i_place, n_left, n_each, first_row,
                                           s_weight, o_m, o_col, FORMAT, False)  # fmt: skip
                        if p_sample is not None:
                            p_one = p_sample + i_bag * n_each + i_place + o_m * n_each
                            b_rows *= tl.load(p_one, mask=o_m < n_left, other=0.0).to(tl.float32)[:, None]
                        b_sum += b_rows
                if MEAN:
                    b_sum = b_sum / n_each.to(tl.float32)
                b_sum = b_sum * factor
                if eps is not None:
                    b_sum = normalise(b_sum, eps, N)
                p_tile = p_out + i_bag * N + (o_m[:, None] * N + o_col[None, :])
                tl.store(p_tile, b_sum.to(p_out.dtype.element_ty), mask=(o_m < n_left)[:, None])
            for i in tl.range(i_bag, i_bag + n_alone):
                sum_bag(
                    p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_out, i, n, n_offsets, n_each, n_base,
                    first_row, stop_row, n_total, i_padding, s_weight, factor, eps, o_col, N, BLOCK_N, FORMAT, MEAN,
                )  # fmt: skip
        else:
            sum_bag(
                p_index, p_offsets, p_base, p_sample, p_weight, p_steps, p_out, i_bag, n, n_offsets, n_each, n_base,
                first_row, stop_row, n_total, i_padding, s_weight, factor, eps, o_col, N, BLOCK_N, FORMAT, MEAN,
            )  # fmt: skip


@triton.jit
def spread_bag(
    p_dy, p_index, p_offsets, p_base, p_sample, p_weight, p_dx, p_dsample, i_bag, n, n_bags, n_offsets, n_each, n_base,
    first_row, stop_row, i_padding, s_dy, s_weight, factor, eps, i_block, o_col, N: tl.constexpr, BLOCK_N: tl.constexpr,
    MEAN: tl.constexpr,
):  # fmt: skip
    """Stores a block of columns of dx of the positions of one bag, and its part of their dsample."""
    i_first, i_stop = bag_ends(p_offsets, i_bag, n, n_offsets, n_each)
    n_counted = 0
    if MEAN:
        for i in tl.range(i_first, i_stop):
            n_counted += (id_at(p_index, p_base, i, n_base) != i_padding).to(tl.int32)
    spread_positions(
        p_dy, p_index, p_base, p_sample, p_weight, p_dx, p_dsample, i_bag, i_first, i_stop, n_counted, n, n_base, first_row,
        stop_row, i_padding, s_dy, s_weight, factor, eps, i_block, o_col, N, BLOCK_N, MEAN,
    )  # fmt: skip
    if p_offsets is not None:
        if i_bag == 0:  # positions before the first bag
            store_zeros(p_dx, p_dsample, 0, tl.minimum(i_first, n), n, i_block, o_col, N, BLOCK_N)
        if i_bag == n_bags - 1:  # positions after the last bag
            store_zeros(p_dx, p_dsample, i_stop, n, n, i_block, o_col, N, BLOCK_N)


@triton.jit(do_not_specialize=["n", "n_bags", "n_offsets", "n_base", "first_row", "stop_row", "i_padding"])
def spread_bags_kernel(
    p_dy,  # [n_bags, N]
    p_index, p_offsets, p_base, p_sample,
    p_weight,  # None: neither normalised rows, nor dsample, the gradient of the sample weights, is needed
    p_dx,  # [n, N]; None: not needed
    p_dsample,  # fp32 [blocks of columns, n]: parts of dsample; None: not needed
    n, n_bags, n_offsets, n_base, first_row, stop_row, i_padding, s_dy, s_weight, factor, eps,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,  # of normalised rows alone
    MEAN: tl.constexpr,
):  # fmt: skip
    """dx of each position of a bag, and the gradient of its sample weight. Other arguments: those of `sum_bags_kernel`."""
    # lint: allow scalar-loop: ids that lie in the table are counted on scalars, before a tile of rows moves
    # lint: allow single-buffer: CANN 9.1 on an Ascend950 has one buffer for a piece of 16411 columns
    # lint: allow scalar-reduction: a weight's gradient is one number of two rows
    o_m = tl.arange(0, BLOCK_M)
    n_tiles, n_each = tl.cdiv(n_bags, BLOCK_M), ids_of_each(p_offsets, n, n_bags)
    for i_task in tl.range(tl.program_id(0), n_tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        i_block = i_task // n_tiles
        i_bag = (i_task - i_block * n_tiles).to(tl.int64) * BLOCK_M
        n_left = tl.minimum(n_bags - i_bag, BLOCK_M)
        o_col = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
        if TILES:
            n_alone = n_left
            if has_all(p_index, p_base, i_bag, i_bag + n_left, n_base, first_row, stop_row, i_padding):
                n_alone = n_left * 0
                b_x = load_tile(p_index, p_base, p_weight, None, i_bag, 0, n_left, n_each, first_row, s_weight,
                                o_m, o_col, "", True)  # fmt: skip
                m_tile = (o_m < n_left)[:, None]
                b_dy = tl.load(p_dy + i_bag * s_dy + (o_m[:, None] * s_dy + o_col[None, :]), mask=m_tile, other=0.0)
                b_dx = normalise_backward(b_x * factor, b_dy.to(tl.float32) * factor, eps, N)
                tl.store(p_dx + i_bag * N + (o_m[:, None] * N + o_col[None, :]), b_dx.to(p_dx.dtype.element_ty), mask=m_tile)
            for i in tl.range(i_bag, i_bag + n_alone):
                spread_bag(
                    p_dy, p_index, p_offsets, p_base, p_sample, p_weight, p_dx, p_dsample, i, n, n_bags, n_offsets, n_each,
                    n_base, first_row, stop_row, i_padding, s_dy, s_weight, factor, eps, i_block, o_col,
                    N, BLOCK_N, MEAN,
                )  # fmt: skip
        else:
            spread_bag(
                p_dy, p_index, p_offsets, p_base, p_sample, p_weight, p_dx, p_dsample, i_bag, n, n_bags, n_offsets, n_each,
                n_base, first_row, stop_row, i_padding, s_dy, s_weight, factor, eps, i_block, o_col,
                N, BLOCK_N, MEAN,
            )  # fmt: skip


def _row(what: str, dtypes: int, fp32: str, copies: int) -> Any:
    """What a kernel without tiles holds: so many rows in the dtypes of memory, and so many in fp32."""
    return lambda shape, _: [Tile(what, ("BLOCK_N",), shape.itemsize, dtypes), Tile(fp32, ("BLOCK_N",), FP32, copies)]


def _tile(what: str, dtypes: int, fp32: str) -> Any:
    """What a kernel with tiles holds."""
    tile = ("BLOCK_M", "BLOCK_N")
    return lambda shape, _: [Tile(what, tile, shape.itemsize, dtypes), Tile(fp32, tile, FP32, 4)]


BAGS = RowKernel(
    "sum_bags_kernel, bag by bag", _row("row and result", 4, "sum, and fp32 of a row in decoding", 8), flag="TILES"
)
SPREAD = RowKernel(
    "spread_bags_kernel, bag by bag", _row("row, dy and dx", 6, "fp32: row, dy, product, dx", 4), flag="TILES"
)
BAG_TILES = RowKernel(
    "sum_bags_kernel", _tile("rows and results", 4, "sums, and fp32 of rows"), flag="TILES", row_by_row=BAGS
)
SPREAD_TILES = RowKernel(
    "spread_bags_kernel", _tile("rows, dy and dx", 6, "fp32: rows, dy, products"), flag="TILES", row_by_row=SPREAD
)


def tiles_of_bags(kernel: RowKernel, shape: RowShape) -> RowTiling:
    """Tiles of at least two whole rows, which the compiler moves at once; where there are none, row by row.

    Raises `npu_tiling.UnifiedBufferError` where nothing fits.
    """
    assert kernel.row_by_row is not None
    if not fills_units(shape.width, shape):
        return kernel.row_by_row.tiling(shape)
    tiling = largest_tile(kernel, shape, tile_rows(shape), why="the rows of several bags move at once", decided_at=here())
    return tiling if tiling.block_n == shape.width else kernel.row_by_row.tiling(shape)
