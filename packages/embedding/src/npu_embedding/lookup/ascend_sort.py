"""Indices of a gradient on Ascend, sorted by the rows that they name: kernels and their steps of a plan.

Indices of one row keep their order.

A row is stored as its key, KEY_OF_ROW_0 + row, in the bits of a normal fp32 number: from KEY_OF_ROW_0, the smallest, up to
infinity, larger bits are a larger number, so that each of 2^31 - 2^24 rows has a number of its own. The key of row n_rows
stands for an index that names no row of the table or the padding row, the next for a place after the last index.

The hardware sorts fp32 numbers in the Unified Buffer, and nothing else: row * BLOCK + place is stored in the bits of one. A
table with more rows than fit there takes two sorts, by the lower digit of the row and then by the higher.

    sort_runs_kernel     sorts blocks of BLOCK indices; of more than 64 blocks, a program merges its own to one run
    merge_runs_kernel    merges four runs to one; launched until one is left, at most three times

A merge makes BLOCK keys of the result at a time. It searches for the part of each run that they come from, and sorts those
parts. How much work that is does not depend on the indices.

The scalar unit searches through a cache, and what is stored goes past it. So each round of a program's merges has memory of
its own, from which nothing was read before it was written.
"""

from math import ceil, inf

from npu_tiling import Device
from npu_tiling.budget import here
from npu_tiling.calls import Empty
from npu_tiling.device import tl, triton
from npu_tiling.plans import Plan, Slot

from ..rows import INT32, INT64, Gradient, Rule, Way

KEY_OF_ROW_0 = 0x00800000
_MAX_ROWS = 2**31 - 2**24 - 3  # of a table: their keys, and three more, are finite
_MAX_INDICES = 2**30  # places, and a quarter of a run more, are int32
_LOG = 11
BLOCK = 2**_LOG  # indices of a block; a sort takes 32 bytes of each
_MAX_RUNS = 4**3  # which three launches merge
MAX_ROWS_OF_ONE_DIGIT = 2 ** (31 - _LOG) - 2 ** (24 - _LOG) - 2  # and n_rows + 1 too
SORT = (("LOG", _LOG), ("KEY_OF_ROW_0", KEY_OF_ROW_0))

WAYS = (
    # way, indices, elements of dy, rows of the table, why
    Rule(Way.MERGED, _MAX_INDICES, inf, _MAX_ROWS, 0, f"a vector core sorts {BLOCK} numbers in its Unified Buffer", here()),
)


@triton.jit
def sort_digits(b_digit, LOG: tl.constexpr):
    """int32, twice: 2^LOG digits in ascending order, and where each stood. Each is below (2^31 - 2^24) >> LOG."""
    NORMAL: tl.constexpr = 0x00800000  # the smallest normal fp32 number
    b_number = (b_digit << LOG) + tl.arange(0, 1 << LOG) + NORMAL
    b_sorted = tl.sort(b_number.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - NORMAL
    return b_sorted >> LOG, b_sorted & ((1 << LOG) - 1)


@triton.jit
def taken(b_number, b_place):
    """int32: the numbers at these places."""
    return tl.gather(b_number.to(tl.float32, bitcast=True), b_place, 0).to(tl.int32, bitcast=True)


@triton.jit
def sort_rows(b_row, LOG: tl.constexpr, WIDE: tl.constexpr):
    """int32, twice: rows in ascending order, and where each stood; equal ones in the order of their places."""
    if WIDE:
        DIGIT: tl.constexpr = 1 << 19
        b_low, b_place = sort_digits(b_row & (DIGIT - 1), LOG)
        b_high, b_again = sort_digits(taken(b_row >> 19, b_place), LOG)
        return b_high * DIGIT + taken(b_low, b_again), taken(b_place, b_again)
    else:
        return sort_digits(b_row, LOG)


@triton.jit
def named_rows(p_index, i, n, n_rows, first_row, i_padding, BLOCK: tl.constexpr, LONG: tl.constexpr):
    """int32 [BLOCK]: the rows that indices from place `i` name.

    It is `n_rows` where an index names no row or the padding row, and `n_rows` + 1 after the last index.

    LONG: an index is two int32; the lower half comes first.
    """
    o = tl.arange(0, BLOCK)
    n_left = tl.minimum(n - i, BLOCK).to(tl.int32)
    first_row = first_row.to(tl.int64)
    i_low = first_row.to(tl.int32)
    if LONG:
        o_half = tl.arange(0, 2 * BLOCK)
        b_half = tl.load(p_index + 2 * i + o_half, mask=o_half < 2 * n_left, other=0)
        b_low, b_high = tl.split(tl.reshape(b_half, [BLOCK, 2]))
    else:
        b_low = tl.load(p_index + i + o, mask=o < n_left, other=0)
        b_high = b_low >> 31
    b_row = b_low - i_low
    b_borrow = (((b_low ^ -1) & i_low) | (((b_low ^ -1) | i_low) & b_row)) >> 31  # -1 where the lower halves borrow
    b_high = b_high - (first_row >> 32).to(tl.int32) + b_borrow
    # An int32 that is converted to fp32 keeps its sign, and zero stays zero.
    b_named = tl.where(b_high.to(tl.float32) == 0.0, b_row, n_rows)
    b_named = tl.where(b_row.to(tl.float32) < 0.0, n_rows, b_named)
    b_named = tl.where((b_named - n_rows).to(tl.float32) < 0.0, b_named, n_rows)
    b_named = tl.where((b_named - i_padding).to(tl.float32) == 0.0, n_rows, b_named)
    return tl.where((o - n_left).to(tl.float32) < 0.0, b_named, n_rows + 1)


@triton.jit
def key_after(p_key, i, i_end, n_skipped):
    """The key of a run that stands `n_skipped` after place `i`; 2^31 - 1 past the end of the run."""
    key = tl.load(p_key + tl.minimum(i + n_skipped, i_end - 1))
    return tl.where(i + n_skipped < i_end, key, 0x7FFFFFFF)


@triton.jit
def first_keys(p_key, n, i0, i1, i2, i3, e0, e1, e2, e3, n_steps):
    """Where the first n keys of four runs end in each: runs from i to before e, equal keys in the order of the runs.

    A step takes h keys of the run whose h-th key is the smallest. At most h - 1 keys of each run come before that one, so it
    is among the first 4 (h - 1) + 1; h is the most for which these are at most n_left.
    """
    n_left = i0 * 0 + n  # of i0's type, which the loop keeps
    for _ in tl.range(0, n_steps):
        n_skipped = tl.maximum(n_left - 1, 0) >> 2
        h = tl.minimum(n_skipped + 1, n_left)
        k0, k1 = key_after(p_key, i0, e0, n_skipped), key_after(p_key, i1, e1, n_skipped)
        k2, k3 = key_after(p_key, i2, e2, n_skipped), key_after(p_key, i3, e3, n_skipped)
        late = tl.minimum(k2, k3) < tl.minimum(k0, k1)
        i0 += tl.where(late | (k1 < k0), 0, h)
        i1 += tl.where(late | (k0 <= k1), 0, h)
        i2 += tl.where(late & (k2 <= k3), h, 0)
        i3 += tl.where(late & (k3 < k2), h, 0)
        n_left -= h
    return i0, i1, i2, i3


@triton.jit
def joined(p_number, o, i0, i1, i2, i3, n0, n1, n2, n3):
    """int32 [BLOCK]: numbers from place i0 on before the n0-th, then from i1 on before the n1-th, and so on."""
    b_number = tl.load(p_number + i3 - n2 + o, mask=o < n3, other=0)
    b_number = tl.where((o - n2).to(tl.float32) < 0.0, tl.load(p_number + i2 - n1 + o, mask=o < n2, other=0), b_number)
    b_number = tl.where((o - n1).to(tl.float32) < 0.0, tl.load(p_number + i1 - n0 + o, mask=o < n1, other=0), b_number)
    return tl.where((o - n0).to(tl.float32) < 0.0, tl.load(p_number + i0 + o, mask=o < n0, other=0), b_number)


@triton.jit
def merge_blocks(
    p_key, p_order, p_merged_key, p_merged_order,
    i_start,  # the block that the first run begins with
    i_end,  # the block after the last run
    i_first, i_stop,
    n_run,  # blocks of a run
    n_steps,  # of a search for the first keys of four runs
    n_block_steps,  # of a search for the next BLOCK keys
    LOG: tl.constexpr, WIDE: tl.constexpr, KEY_OF_ROW_0: tl.constexpr,
):  # fmt: skip
    """Merges sets of four runs; makes the blocks from `i_first` to before `i_stop` of the result."""
    BLOCK: tl.constexpr = 1 << LOG
    o = tl.arange(0, BLOCK)
    i0, i1, i2, i3 = i_first * 0, i_first * 0, i_first * 0, i_first * 0
    for i_block in tl.range(i_first, i_stop):
        i_set = i_start + (i_block - i_start) // (4 * n_run) * (4 * n_run)
        e0, e1 = tl.minimum(i_set + n_run, i_end) * BLOCK, tl.minimum(i_set + 2 * n_run, i_end) * BLOCK
        e2, e3 = tl.minimum(i_set + 3 * n_run, i_end) * BLOCK, tl.minimum(i_set + 4 * n_run, i_end) * BLOCK
        if (i_block == i_first) | (i_block == i_set):
            n_before = (i_block - i_set) * BLOCK
            n_search = tl.where(n_before > 0, n_steps, 0)
            i0, i1, i2, i3 = first_keys(p_key, n_before, i_set * BLOCK, e0, e1, e2, e0, e1, e2, e3, n_search)
        j0, j1, j2, j3 = first_keys(p_key, BLOCK, i0, i1, i2, i3, e0, e1, e2, e3, n_block_steps)
        n0 = j0 - i0
        n1 = n0 + j1 - i1
        n2 = n1 + j2 - i2
        b_key = joined(p_key, o, i0, i1, i2, i3, n0, n1, n2, BLOCK)
        b_order = joined(p_order, o, i0, i1, i2, i3, n0, n1, n2, BLOCK)
        b_row, b_place = sort_rows(b_key - KEY_OF_ROW_0, LOG, WIDE)
        tl.store(p_merged_key + i_block * BLOCK + o, b_row + KEY_OF_ROW_0)
        tl.store(p_merged_order + i_block * BLOCK + o, taken(b_order, b_place))
        i0, i1, i2, i3 = j0, j1, j2, j3


@triton.jit(do_not_specialize=["n", "n_rows", "first_row", "i_padding", "n_run", "n_rounds", "n_block_steps"])
def sort_runs_kernel(
    p_index,  # int32 [n], or [2 n] where LONG
    p_key,  # int32 [n_rounds + 1, blocks * BLOCK]: sorted blocks, then what each round of merges makes of them
    p_order,  # the same
    n, n_rows, first_row,
    i_padding,  # the row that gets no gradient, -1 for none
    n_run,  # blocks of a run
    n_rounds,
    n_block_steps,  # of a search for the next BLOCK keys
    LOG: tl.constexpr,  # of BLOCK
    LONG: tl.constexpr, WIDE: tl.constexpr, KEY_OF_ROW_0: tl.constexpr,
):  # fmt: skip
    """Keys of each run in ascending order, and where each stood in all: a program sorts whole runs."""
    # lint: allow single-buffer: a sort fills the Unified Buffer
    # lint: allow scalar-loop: a search among the keys reads single keys
    BLOCK: tl.constexpr = 1 << LOG
    o = tl.arange(0, BLOCK)
    n_blocks = tl.cdiv(n, BLOCK)
    for i_run in tl.range(tl.program_id(0), tl.cdiv(n_blocks, n_run), tl.num_programs(0)):
        i_first = i_run * n_run
        i_stop = tl.minimum(i_first + n_run, n_blocks)
        for i_block in tl.range(i_first, i_stop):
            i = i_block * BLOCK
            b_row, b_place = sort_rows(named_rows(p_index, i, n, n_rows, first_row, i_padding, BLOCK, LONG), LOG, WIDE)
            tl.store(p_key + i + o, b_row + KEY_OF_ROW_0)
            tl.store(p_order + i + o, b_place + i)
        for i_round in tl.range(0, n_rounds):
            i_from = i_round.to(tl.int64) * n_blocks * BLOCK
            i_to = i_from + n_blocks * BLOCK
            n_steps = n_block_steps  # not taken: the first block begins a set
            merge_blocks(
                p_key + i_from, p_order + i_from, p_key + i_to, p_order + i_to, i_first, i_stop, i_first, i_stop,
                1 << (2 * i_round), n_steps, n_block_steps, LOG, WIDE, KEY_OF_ROW_0,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n_blocks", "n_run", "n_steps", "n_block_steps"])
def merge_runs_kernel(
    p_key,  # int32 [n_blocks * BLOCK]
    p_order, p_merged_key, p_merged_order,
    n_blocks,
    n_run,  # blocks of a run
    n_steps,  # of a search for the first keys of four runs
    n_block_steps,  # of a search for the next BLOCK keys
    LOG: tl.constexpr,  # of BLOCK
    WIDE: tl.constexpr, KEY_OF_ROW_0: tl.constexpr,
):  # fmt: skip
    """Keys of each set of four runs in ascending order, and where each stood in all: a program takes blocks in a row."""
    # lint: allow single-buffer: a sort fills the Unified Buffer
    # lint: allow scalar-loop: a search among the keys reads single keys
    n_each = tl.cdiv(n_blocks, tl.num_programs(0))
    i_first = tl.program_id(0) * n_each
    i_stop = tl.minimum(i_first + n_each, n_blocks)
    merge_blocks(
        p_key, p_order, p_merged_key, p_merged_order, i_first * 0, n_blocks, i_first, i_stop, n_run, n_steps, n_block_steps,
        LOG, WIDE, KEY_OF_ROW_0,
    )  # fmt: skip


def sorted_runs(blocks: int, device: Device) -> tuple[int, int]:
    """Blocks of a run that one program sorts, and the rounds in which it merges them."""
    if blocks <= _MAX_RUNS:
        return 1, 0
    run, rounds = ceil(blocks / min(device.vector_cores, _MAX_RUNS)), 0
    while 4**rounds < run:
        rounds += 1
    return run, rounds


def search_steps(n: int) -> int:
    """Steps in which `first_keys` finds n keys: of n that are left, each takes a quarter."""
    steps = 0
    while n:
        n -= (n - 1) // 4 + 1
        steps += 1
    return steps


def sorted_keys(p: Plan, gradient: Gradient, rule: Rule) -> tuple[Slot, Slot]:
    """Adds the steps that sort. Returns the indices as keys in ascending order, int32 [n], and where each stood."""
    tiling = rule.tiling(p.chip, dict(SORT), 1)  # of the launch that sorts runs, and of those that merge them
    n, wide = gradient.indices.numel(), {"WIDE": gradient.n_rows > MAX_ROWS_OF_ONE_DIGIT}
    blocks, steps = ceil(n / BLOCK), {"n_block_steps": search_steps(BLOCK)}
    places = blocks * BLOCK
    run, rounds = sorted_runs(blocks, p.chip)
    keys, order = (p.new(Empty(((rounds + 1) * places,), INT32)) for _ in range(2))
    indices, is_long = gradient.indices, gradient.indices.dtype == INT64
    if is_long:  # its halves
        indices = p.view(indices, (2 * n,), (1,), dtype=INT32)
    p.launch_over(
        sort_runs_kernel,
        tiling,
        ceil(blocks / run),
        flags={"LONG": is_long, **wide},
        decision="embedding backward, sort",
        reads={"p_index": indices},
        writes={"p_key": keys, "p_order": order},
        sizes=gradient.sizes | steps | {"n_run": run, "n_rounds": rounds},
    )
    if rounds:
        keys, order = (p.view(each, (places,), (1,), rounds * places) for each in (keys, order))
    while run < blocks:
        merged_keys, merged_order = (p.new(Empty((places,), INT32)) for _ in range(2))
        p.launch_over(
            merge_runs_kernel,
            tiling,
            blocks,
            flags=wide,
            decision="embedding backward, merges",
            reads={"p_key": keys, "p_order": order},
            writes={"p_merged_key": merged_keys, "p_merged_order": merged_order},
            sizes=steps | {"n_blocks": blocks, "n_run": run, "n_steps": search_steps(4 * run * BLOCK)},
        )
        keys, order, run = merged_keys, merged_order, 4 * run
    if n < places:
        keys, order = (p.view(each, (n,), (1,)) for each in (keys, order))
    return keys, order
