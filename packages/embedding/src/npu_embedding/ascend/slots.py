"""Device code of a sparse gradient on Ascend: for each sorted key an entry, with the place of the first entry of its row."""

import triton
import triton.language as tl

from .sums import keys_below


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
