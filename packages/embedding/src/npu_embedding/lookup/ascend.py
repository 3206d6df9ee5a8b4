"""The look-up and the gradient's sums on Ascend: kernels, what their tiles hold, and their steps of a plan.

Look-up. A tile is BLOCK_M indices by BLOCK_N columns; programs stride over the tiles. A row of the table is fetched in one
transfer, and a tile is stored in one. Elements are bits there: integers of their size, whatever they mean.

    out[i] = weight[index[i] - first_row]   -0.0 where the index lies in another shard   NaN where no shard has it

Gradient. `sorted` are keys in ascending order (ascend_sort.py): row r has the key `key_of_row_0` + r. `order` says where
each of them stood. Run r is the equal keys of row r. Indices with keys from `key_of_row_0` + n_rows on get no gradient.

    dweight[r] = sum of dy[order[i]] over the positions i with sorted[i] = key_of_row_0 + r

Work is a list: of each row the positions of its run, which are read, then its end, where it is stored. With rows 0, 0, 2 of
three: 0, 1, end of 0, end of 1, 2, end of 2. Position i stands at place i + its row, the end of row r at place r + the
positions before row r + 1. The list is cut in `n_chunks` chunks of equal length, one for each program, so that each reads
and writes as much, however long runs and gaps are. `sum_rows_kernel` stores zeros and the sum of a run that lies in one
chunk. A row that crosses a border between chunks leaves partial sums: a head in each chunk that it enters from before, a
tail in the chunk where it starts. `add_partials_kernel` adds the heads of such a row in the order of the chunks, then its
tail. Every row of dweight is stored once. Sums are fp32, rounded once.
"""

from math import ceil
from typing import Any

from npu_tiling import Device, Tile, footprint
from npu_tiling.budget import FP32, here
from npu_tiling.calls import Empty
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling
from npu_tiling.plans import Plan, Slot

from ..formula import block_columns, dy_offset
from ..rows import (
    FLOAT,
    INT32,
    INT64,
    MIN_CHUNK,
    TILE_BYTES,
    Gradient,
    RowKernel,
    RowShape,
    RowTiling,
    Rule,
    fills_units,
    largest_tile,
    tile_rows,
)
from .ascend_sort import BLOCK, KEY_OF_ROW_0, SORT, sorted_keys

# Where rows are far apart, zeros are stored without a load beside them, so that the start of each store shows.
_ZEROS_BYTES = 2 * TILE_BYTES
_INDEX = 8  # bytes


@triton.jit
def copy_rows(
    p_index, p_weight, p_out, i_first, n_rows, first_row, stop_row, n_total, s_weight, o_col, b_zero, b_nan, N: tl.constexpr
):
    """Copies `n_rows` rows one by one, or fills them, as each index says."""
    for i in tl.range(i_first, i_first + n_rows):
        i_index = tl.load(p_index + i).to(tl.int64)
        p_row = p_out + i * N + o_col
        if (i_index >= first_row) & (i_index < stop_row):
            tl.store(p_row, tl.load(p_weight + (i_index - first_row) * s_weight + o_col))
        elif (i_index >= 0) & (i_index < n_total):
            tl.store(p_row, b_zero)
        else:
            tl.store(p_row, b_nan)


@triton.jit(do_not_specialize=["n", "first_row", "stop_row", "n_total"])
def gather_rows_kernel(
    p_index, p_weight, p_out, n, first_row, stop_row, n_total, s_weight,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GATHER: tl.constexpr,  # whether a tile whose indices are all in the table moves at once; else rows move one by one
    NAN: tl.constexpr,  # the bits of a NaN
):  # fmt: skip
    """Copies the row of the table that each index names; -0.0 where another shard has it, NaN where no shard does."""
    # races: allow p_out: blocks of columns overlap at the row's end, where every program writes the same bits
    # lint: allow scalar-loop: indices that lie in the table are counted on scalars, before a tile of rows moves
    o_row = tl.arange(0, BLOCK_M)
    MINUS_ZERO: tl.constexpr = -(2**15) if p_out.dtype.element_ty == tl.int16 else -(2**31)  # the bits of -0.0
    b_zero = tl.full([BLOCK_N], MINUS_ZERO, p_out.dtype.element_ty)
    b_nan = tl.full([BLOCK_N], NAN, p_out.dtype.element_ty)
    n_tiles = tl.cdiv(n, BLOCK_M)
    for i_task in tl.range(tl.program_id(0), n_tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        i_block = i_task // n_tiles
        i_row = (i_task - i_block * n_tiles).to(tl.int64) * BLOCK_M
        n_left = tl.minimum(n - i_row, BLOCK_M)
        o_col = block_columns(i_block, N, BLOCK_N)
        o_out = i_row * N + (o_row[:, None] * N + o_col[None, :])
        if GATHER:
            n_inside = 0
            for i in tl.range(i_row, i_row + n_left):
                i_index = tl.load(p_index + i)
                n_inside += ((i_index >= first_row) & (i_index < stop_row)).to(tl.int32)
            if n_inside == n_left:
                b_index = tl.load(p_index + i_row + o_row, mask=o_row < n_left, other=first_row).to(tl.int64)  # [BLOCK_M]
                p_rows = p_weight - first_row.to(tl.int64) * s_weight + b_index[:, None] * s_weight
                b_rows = tl.load(p_rows + o_col[None, :])  # [BLOCK_M, BLOCK_N]: a transfer a row, and no select
                tl.store(p_out + o_out, b_rows, mask=(o_row < n_left)[:, None])
            else:
                copy_rows(p_index, p_weight, p_out, i_row, n_left, first_row, stop_row, n_total, s_weight,
                          o_col, b_zero, b_nan, N)  # fmt: skip
        else:
            copy_rows(p_index, p_weight, p_out, i_row, n_left, first_row, stop_row, n_total, s_weight,
                      o_col, b_zero, b_nan, N)  # fmt: skip


@triton.jit
def positions_before(p_sorted, i_place, key_of_row_0, n, n_steps):
    """How many positions stand before a place of the list."""
    i_first, i_stop = i_place * 0, i_place * 0 + n
    for _ in tl.range(0, n_steps):
        i_half = (i_first + i_stop) // 2
        i_row = tl.load(p_sorted + tl.minimum(i_half, n - 1)).to(tl.int64) - key_of_row_0
        before = (i_half + i_row < i_place) & (i_first < i_stop)
        i_stop = tl.where(before | (i_first >= i_stop), i_stop, i_half)
        i_first = tl.where(before, i_half + 1, i_first)
    return i_first


@triton.jit
def keys_below(p_sorted, key, i_first, i_stop, n_steps):
    """The first position from `i_first` to before `i_stop` whose key is not below `key`; `i_stop` if there is none."""
    i_first, i_stop = i_first.to(tl.int64), i_stop.to(tl.int64)
    for _ in tl.range(0, n_steps):
        i_half = (i_first + i_stop) // 2
        below = (tl.load(p_sorted + tl.minimum(i_half, tl.maximum(i_stop - 1, 0))) < key) & (i_first < i_stop)
        i_stop = tl.where(below | (i_first >= i_stop), i_stop, i_half)
        i_first = tl.where(below, i_half + 1, i_first)
    return i_first


@triton.jit
def count_places(p_sorted, n, n_rows, key_of_row_0, n_steps):
    """int64: a place for each row of the table, and for each index that names one."""
    return keys_below(p_sorted, key_of_row_0 + n_rows, n * 0, n, n_steps) + n_rows


@triton.jit
def sum_rows(p_dy, p_order, i_first, i_stop, n_part, s_part, s_dy, o_col, BLOCK_N: tl.constexpr, IN_PARTS: tl.constexpr):
    """fp32 [BLOCK_N]: the sum of the rows of dy at the sorted positions from `i_first` to before `i_stop`."""
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.range(i_first, i_stop):
        i_dy = dy_offset(tl.load(p_order + i), n_part, s_part, s_dy, IN_PARTS)
        b_sum += tl.load(p_dy + i_dy + o_col).to(tl.float32)
    return b_sum


@triton.jit
def store_zeros(p_dweight, i_row, i_stop, o_m, o_col, b_zeros, N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Zeros in the rows from `i_row` to before `i_stop`."""
    for i in tl.range(i_row, i_stop, BLOCK_M):
        tl.store(p_dweight + i * N + (o_m[:, None] * N + o_col[None, :]), b_zeros, mask=(o_m < i_stop - i)[:, None])


@triton.jit(do_not_specialize=["n", "n_rows", "n_chunks", "key_of_row_0", "n_steps", "n_part"])
def sum_rows_kernel(
    p_dy, p_order, p_sorted, p_dweight,
    p_partials,  # fp32 [2, n_chunks, N]: heads, tails
    n, n_rows, n_chunks, key_of_row_0,
    n_steps,  # of a search among n
    n_part,  # rows of a part of dy
    s_part, s_dy,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of zeros
    BLOCK_N: tl.constexpr, SCALE_BY_COUNT: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """Sums of the rows of dy that one index names, and zeros: a program takes one chunk through one block of columns."""
    # races: allow p_partials: blocks of columns overlap at the row's end, where every program writes the same bits
    # races: allow p_dweight: blocks of columns overlap at the row's end, where every program writes the same bits
    # lint: allow scalar-loop: a search among the keys reads single keys, and a row of dy has one place
    # lint: allow unaligned-rows: rows are as wide as the caller's; what is no multiple of 32 bytes is padded on chip
    i_block = tl.program_id(0) // n_chunks
    i_chunk = tl.program_id(0) - i_block * n_chunks
    o_m = tl.arange(0, BLOCK_M)
    o_col = block_columns(i_block, N, BLOCK_N)
    b_zeros = tl.zeros([BLOCK_M, BLOCK_N], p_dweight.dtype.element_ty)
    n_places = count_places(p_sorted, n, n_rows, key_of_row_0, n_steps)
    n_each = tl.cdiv(n_places, n_chunks)
    i_place = tl.minimum(i_chunk * n_each, n_places)
    i_end = tl.minimum(i_place + n_each, n_places)
    i_first = positions_before(p_sorted, i_place, key_of_row_0, n, n_steps)
    i_stop = positions_before(p_sorted, i_end, key_of_row_0, n, n_steps)
    i_row, i_last_row = i_place - i_first, i_end - i_stop  # rows that end before this chunk, and before its end
    # From i_whole to before i_rest lie the runs that neither begin before this chunk nor end after it.
    i_whole, i_rest = i_first, i_stop
    if i_first > 0:
        if (tl.load(p_sorted + i_first - 1).to(tl.int64) - key_of_row_0 == i_row) & (i_place < i_end):
            i_whole = keys_below(p_sorted, key_of_row_0 + i_row + 1, i_first, i_stop, n_steps)
            b_sum = sum_rows(p_dy, p_order, i_first, i_whole, n_part, s_part, s_dy, o_col, BLOCK_N, IN_PARTS)
            tl.store(p_partials + i_chunk.to(tl.int64) * N + o_col, b_sum)
            i_row = tl.minimum(i_row + 1, i_last_row)
    if i_whole < i_stop:
        i_rest = keys_below(p_sorted, key_of_row_0 + i_last_row, i_whole, i_stop, n_steps)
        if i_rest < i_stop:
            b_sum = sum_rows(p_dy, p_order, i_rest, i_stop, n_part, s_part, s_dy, o_col, BLOCK_N, IN_PARTS)
            tl.store(p_partials + (n_chunks + i_chunk).to(tl.int64) * N + o_col, b_sum)
    b_sum = tl.zeros([BLOCK_N], tl.float32)
    i_run = i_whole
    i_this = i_row
    if i_whole < i_rest:
        i_this = tl.load(p_sorted + i_whole).to(tl.int64) - key_of_row_0
    for i in tl.range(i_whole, i_rest):
        i_dy = dy_offset(tl.load(p_order + i), n_part, s_part, s_dy, IN_PARTS)
        i_next = tl.load(p_sorted + tl.minimum(i + 1, i_rest - 1)).to(tl.int64) - key_of_row_0
        store_zeros(p_dweight, i_row, i_this, o_m, o_col, b_zeros, N, BLOCK_M)
        i_row = i_this
        b_sum += tl.load(p_dy + i_dy + o_col).to(tl.float32)
        if (i_this != i_next) | (i + 1 == i_rest):
            b_row = b_sum
            if SCALE_BY_COUNT:
                b_row = b_row / (i + 1 - i_run).to(tl.float32)
            tl.store(p_dweight + i_this * N + o_col, b_row.to(p_dweight.dtype.element_ty))
            b_sum = tl.zeros([BLOCK_N], tl.float32)
            i_run = i + 1
            i_row = i_this + 1
        i_this = i_next
    store_zeros(p_dweight, i_row, i_last_row, o_m, o_col, b_zeros, N, BLOCK_M)


@triton.jit(do_not_specialize=["n", "n_rows", "n_chunks", "key_of_row_0", "n_steps"])
def add_partials_kernel(
    p_partials, p_sorted, p_dweight,
    n, n_rows, n_chunks, key_of_row_0,
    n_steps,  # of a search among n
    N: tl.constexpr, BLOCK_N: tl.constexpr, SCALE_BY_COUNT: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of rows that cross a border between two chunks."""
    # lint: allow scalar-loop: a search among the keys reads single keys
    # races: allow p_dweight: blocks of columns overlap at the row's end, where every program writes the same bits
    n_each = tl.cdiv(count_places(p_sorted, n, n_rows, key_of_row_0, n_steps), n_chunks)
    n_blocks = tl.cdiv(N, BLOCK_N)
    for i_task in tl.range(tl.program_id(0), (n_chunks - 1) * n_blocks, tl.num_programs(0)):
        i_border = i_task // n_blocks + 1  # between the chunks i_border - 1 and i_border
        o_col = block_columns(i_task % n_blocks, N, BLOCK_N)
        i_place = i_border.to(tl.int64) * n_each
        i = positions_before(p_sorted, i_place, key_of_row_0, n, n_steps)
        i_row = i_place - i
        if i > 0:
            key = tl.load(p_sorted + i - 1).to(tl.int64)
            if (key - key_of_row_0 == i_row) & (i_row < n_rows):
                i_start = keys_below(p_sorted, key, n * 0, i, n_steps)
                # The first border that a row crosses adds up the whole row.
                if i_start + i_row >= i_place - n_each:
                    i_stop = keys_below(p_sorted, key + 1, i, n, n_steps)
                    i_last_chunk = (i_stop + i_row) // n_each
                    b_row = tl.zeros([BLOCK_N], tl.float32)
                    for i_head in tl.range(i_border.to(tl.int64), i_last_chunk + 1):
                        # Always 1: without a product the sums have no barrier between them, compiler fault 5.
                        factor = tl.minimum(i_last_chunk + 1 - i_head, 1).to(tl.float32)
                        b_row += tl.load(p_partials + i_head * N + o_col) * factor
                    b_row += tl.load(p_partials + (n_chunks + i_border - 1).to(tl.int64) * N + o_col)
                    if SCALE_BY_COUNT:
                        b_row = b_row / (i_stop - i_start).to(tl.float32)
                    tl.store(p_dweight + i_row * N + o_col, b_row.to(p_dweight.dtype.element_ty))


@triton.jit(do_not_specialize=["n", "n_rows", "i_no_row", "n_steps"])
def find_slots_kernel(
    p_sorted,
    p_slot,  # int32 [n]: the first entry of the same row; n for an entry without a gradient
    p_row,  # int64 [n]
    n,
    n_rows,
    i_no_row,  # the row of entries without a gradient, where no index names a row
    n_steps,  # of a search among n
    LOG: tl.constexpr,  # of BLOCK
    KEY_OF_ROW_0: tl.constexpr,
):
    """Slots and rows of sorted keys.

    A key's slot is the place of the first equal key of its tile; what equals the tile's first key is searched before it too.
    """
    # lint: allow scalar-loop: a search among the keys reads single keys
    BLOCK: tl.constexpr = 1 << LOG
    o = tl.arange(0, BLOCK)
    i_end = KEY_OF_ROW_0 + n_rows
    i_smallest = tl.load(p_sorted)
    i_no_row = tl.where(i_smallest < i_end, i_smallest - KEY_OF_ROW_0, i_no_row)
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = i_tile * BLOCK
        i_key = tl.load(p_sorted + i)
        i_run = keys_below(p_sorted, i_key, i * 0, i, n_steps).to(tl.int32)
        b_key = tl.load(p_sorted + i + o, mask=o < n - i, other=KEY_OF_ROW_0)
        b_number = b_key.to(tl.float32, bitcast=True)
        b_first = o
        for step in tl.range(0, LOG):
            # The search stops at place 0: keys that equal the tile's first get `i_run`.
            b_before = tl.maximum(b_first - ((BLOCK // 2) >> step), 0)
            b_first = tl.where(tl.gather(b_number, b_before, 0) == b_number, b_before, b_first)
        b_slot = tl.where(b_number == i_key.to(tl.float32, bitcast=True), i_run, i + b_first)
        b_named = b_number < i_end.to(tl.float32, bitcast=True)
        tl.store(p_slot + i + o, tl.where(b_named, b_slot, n), mask=o < n - i)
        tl.store(p_row + i + o, tl.where(b_named, b_key - KEY_OF_ROW_0, i_no_row).to(tl.int64), mask=o < n - i)


def _gather_tiles(shape: RowShape, moves_tiles: bool) -> list[Tile]:
    fills = Tile("rows of zeros and of NaN", (2, "BLOCK_N"), shape.itemsize)
    if not moves_tiles:
        return [Tile("row", ("BLOCK_N",), shape.itemsize, 2), fills]
    # Rows that are taken one by one, where a tile has an index outside, use the tile's buffers.
    rows = Tile("rows", ("BLOCK_M", "BLOCK_N"), shape.itemsize, 2)
    return [rows, fills, Tile("indices", ("BLOCK_M",), _INDEX, 2)]


def _sums_tiles(shape: RowShape, moves_tiles: bool) -> list[Tile]:
    row, narrow = ("BLOCK_N",), shape.itemsize < FP32
    tiles = [Tile("row of dy", row, shape.itemsize, 2), Tile("zeros", row, FP32), Tile("sum so far", row, FP32)]
    tiles += [Tile("row in fp32", row, FP32)] * narrow
    return [*tiles, Tile("tile of zeros", ("BLOCK_M", "BLOCK_N"), shape.itemsize), *_stored(shape)]


def _partials_tiles(shape: RowShape, moves_tiles: bool) -> list[Tile]:
    row, narrow = ("BLOCK_N",), shape.itemsize < FP32
    tiles = [Tile("partial sum", row, FP32, 2), *[Tile("sum so far", row, FP32)] * narrow]
    if shape.device.arch == "dav-c310":
        tiles += [Tile("product with 1", row, FP32, 1 if narrow else 2)]
    return [*tiles, *_stored(shape)]


def _stored(shape: RowShape) -> list[Tile]:
    return [Tile("row of dweight", ("BLOCK_N",), shape.itemsize, 2), Tile("length of a run", (1,), FP32)]


GATHER = RowKernel("gather_rows_kernel", _gather_tiles, flag="GATHER")  # the compiler moves rows that fill units as a tile
SUMS = RowKernel("sum_rows_kernel", _sums_tiles)
PARTIALS = RowKernel("add_partials_kernel", _partials_tiles)


def gather_tiling(shape: RowShape) -> RowTiling:
    """Blocks of the look-up. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    moves_tiles = fills_units(shape.width, shape)
    why, decided_at = "a tile of rows moves at once", here()
    if not moves_tiles:
        why, decided_at = "rows that do not fill 32-byte units move one by one", here()
        single = footprint(_gather_tiles(shape, False), {"BLOCK_N": shape.width}, shape.device)
        if single > shape.device.ub_bytes:
            moves_tiles, why, decided_at = True, "a row does not fit: blocks of it, which fill 32-byte units", here()
    return largest_tile(GATHER, shape, tile_rows(shape), moves_tiles=moves_tiles, why=why, decided_at=decided_at)


def sums_tiling(shape: RowShape) -> RowTiling:
    """Blocks of the gradient's sums and zeros. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    # One row of zeros alone takes the double buffers of the sums from CANN 9.1 on an Ascend950.
    why = "rows are added one by one; zeros between them are long stores"
    return largest_tile(SUMS, shape, tile_rows(shape, _ZEROS_BYTES), why=why, decided_at=here())


def chunks(sums: CountTiling, n: int) -> int:
    """Pieces that n sorted positions and rows are cut in: as many as run at once, each through one block of columns."""
    return max(1, min(sums.device.vector_cores // sums.column_blocks, ceil(n / MIN_CHUNK)))


def slots_tiling(device: Device) -> CountTiling:
    """That of the launch that finds slots of a sparse gradient."""
    return CountTiling(
        device=device, blocks=SORT, per_program=BLOCK, why=f"{BLOCK} keys are searched at once", decided_at=here()
    )


def backward(p: Plan, gradient: Gradient, dweight: Slot, rule: Rule) -> None:
    """Adds the steps that write dweight [n_rows, D] by a rule."""
    _sum_runs(p, gradient, dweight, *sorted_keys(p, gradient, rule), KEY_OF_ROW_0)


def slots(p: Plan, gradient: Gradient, rule: Rule) -> tuple[Slot, Slot, Slot]:
    """`reference.slots` in launches of our own, by a rule."""
    keys, order = sorted_keys(p, gradient, rule)
    n = gradient.indices.numel()
    slot, rows = p.new(Empty((n,), INT32)), p.new(Empty((n,), INT64))
    p.launch_over(
        find_slots_kernel,
        slots_tiling(p.chip),
        n,
        decision="embedding backward, slots",
        reads={"p_sorted": keys},
        writes={"p_slot": slot, "p_row": rows},
        sizes={"n": n, "n_rows": gradient.n_rows, "i_no_row": max(gradient.padding, 0), "n_steps": n.bit_length()},
    )
    return slot, order, rows


def sum_slots(p: Plan, gradient: Gradient, values: Slot, slot: Slot, order: Slot) -> None:
    """Adds the steps that write values [n, D]: row r is the sum of the rows of dy whose slot is r, or zeros."""
    _sum_runs(p, gradient, values, slot, order, 0)


def _sum_runs(p: Plan, gradient: Gradient, dweight: Slot, keys: Slot, order: Slot, key_of_row_0: int) -> None:
    """Adds the steps that write every row r: the sum of the run of key_of_row_0 + r, zeros where it has none."""
    (n_rows, width), n, name = dweight.shape, keys.numel(), "embedding backward, sums"
    tiling = p.decide(name, sums_tiling(gradient.shape(p.chip)))
    n_chunks = chunks(tiling, n + n_rows)
    partials = p.new(Empty((2, n_chunks, width), FLOAT))
    sizes: dict[str, Any] = {"n": n, "n_rows": n_rows, "n_chunks": n_chunks, "key_of_row_0": key_of_row_0}
    sizes["n_steps"] = n.bit_length()
    p.launch(
        sum_rows_kernel,
        name,
        n_chunks * tiling.column_blocks,
        reads={"p_dy": gradient.dy, "p_order": order, "p_sorted": keys},
        writes={"p_dweight": dweight, "p_partials": partials},
        sizes=sizes | gradient.dy_sizes,
        flags=gradient.flags,
    )
    if n_chunks == 1:
        return
    p.launch_over(
        add_partials_kernel,
        PARTIALS.tiling(gradient.shape(p.chip)),
        n_chunks - 1,
        flags={"SCALE_BY_COUNT": gradient.scale_by_count},
        decision="embedding backward, partial sums",
        reads={"p_partials": partials, "p_sorted": keys},
        writes={"p_dweight": dweight},
        sizes=sizes,
    )
