"""Device code of the gradient on CUDA before the sums: which rows have a run, and the order of indices.

A key is the row of the table that an index names. An index outside the table, or of the padding row, has the key `n_rows`,
the last. `sorted` [n] are the keys in ascending order, `order` [n] says where each stood; equal keys stay in their order.

The first launch sorts groups of GROUP indices: it compares each with all of its group. Each launch after it makes one run of
several sorted runs: it searches each key in every other run of its set, and its place is the sum of the places it would have
in each. The last such launch takes all runs for one set.
"""

import triton
import triton.language as tl

_LAST = tl.constexpr(2**31 - 2)  # after all keys, and one more is an int32 too


@triton.jit
def load_keys(p_index, o_index, n, n_rows, first_row, i_padding):
    """int64: the keys of the indices at `o_index`; a place past the last has the key `n_rows`."""
    b_row = tl.load(p_index + o_index, mask=o_index < n, other=-1).to(tl.int64) - first_row
    m_named = (b_row >= 0) & (b_row < n_rows) & (b_row != i_padding)
    return tl.where(m_named, b_row, n_rows)


@triton.jit(do_not_specialize=["n", "n_rows", "first_row", "i_padding"])
def mark_rows_kernel(
    p_index,
    p_key,
    p_marks,  # int8 [n_rows], zeros beforehand
    p_inside,  # int32 [1], zero beforehand
    n,
    n_rows,
    first_row,
    i_padding,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Marks the rows that have a run, counts the indices that name one and, with KEYS, stores the keys."""
    o_index = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_row = load_keys(p_index, o_index, n, n_rows, first_row, i_padding)  # [BLOCK_M]
    m_named = b_row < n_rows
    tl.store(p_marks + b_row, 1, mask=m_named)
    tl.atomic_add(p_inside, tl.sum(m_named.to(tl.int32), axis=0))  # integers: any order gives the same number
    if KEYS:
        tl.store(p_key + o_index, b_row.to(p_key.dtype.element_ty), mask=o_index < n)


@triton.jit(do_not_specialize=["n", "n_rows", "first_row", "i_padding"])
def sort_groups_kernel(
    p_index,
    p_groups,  # int32 [2, n_groups * GROUP]: keys, where each stood; places past the last index have the key _LAST
    p_marks,  # int8 [n_rows], which this launch sets to zero
    n,
    n_rows,
    first_row,
    i_padding,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """Sorts the keys of each group. A program compares BLOCK_M indices with all of their group: one wait for memory."""
    o_i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_group = tl.program_id(0) * BLOCK_M // GROUP * GROUP
    o_k = i_group + tl.arange(0, GROUP)
    n_padded = tl.num_programs(0) * BLOCK_M
    b_key = load_keys(p_index, o_i, n, n_rows, first_row, i_padding).to(tl.int32)  # [BLOCK_M]
    b_key = tl.where(o_i < n, b_key, _LAST)
    b_other = load_keys(p_index, o_k, n, n_rows, first_row, i_padding).to(tl.int32)  # [GROUP]
    b_other = tl.where(o_k < n, b_other, _LAST)
    # Of equal keys those that stand before come first.
    b_limit = b_key[:, None] + (o_k[None, :] < o_i[:, None]).to(tl.int32)  # [BLOCK_M, GROUP]
    b_place = i_group + tl.sum((b_other[None, :] < b_limit).to(tl.int32), axis=1)
    tl.store(p_groups + b_place, b_key)
    tl.store(p_groups + n_padded + b_place, o_i)
    o_z = tl.arange(0, BLOCK_Z)
    b_zero = tl.zeros([BLOCK_Z], tl.int8)
    for i in tl.range(tl.program_id(0) * BLOCK_Z, n_rows, tl.num_programs(0) * BLOCK_Z):
        tl.store(p_marks + i + o_z, b_zero, mask=o_z < n_rows - i)


@triton.jit
def count_below(p_keys, b_run, b_key, STEPS: tl.constexpr):
    """How many keys of a sorted run of 2^STEPS, which begins at `b_run`, are below `b_key`: a search in powers of two."""
    p_run = p_keys + b_run
    b_below = tl.zeros_like(b_key)
    RUN: tl.constexpr = 1 << STEPS
    for s in tl.static_range(STEPS):
        step = RUN >> (s + 1)
        b_below += tl.where(tl.load(p_run + b_below + (step - 1)) < b_key, step, 0)
    return b_below + (tl.load(p_run + b_below) < b_key).to(tl.int32)


@triton.jit(do_not_specialize=["n_runs", "n_rows"])
def rank_runs_kernel(
    p_runs,  # int32 [2, n_runs * RUN]: keys of sorted runs, where each stood
    p_sorted,  # int32 [2, n_runs * RUN]: those of the sets, sorted
    p_marks,
    p_inside,  # int32 [1]
    n_runs,
    n_rows,
    STEPS: tl.constexpr,  # RUN is 2 ** STEPS
    SET: tl.constexpr,  # runs that become one; 0: all
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """BLOCK_M places of a sorted run, looked up in BLOCK_G runs of its set at a time.

    In runs before its own, all keys that are not above its key come before it; in those after, all keys below. The last
    launch marks the rows that indices name.
    """
    RUN: tl.constexpr = 1 << STEPS
    i_first = tl.program_id(0) * BLOCK_M
    i_run = i_first // RUN
    n_places = n_runs * RUN
    i_set = 0
    i_stop = n_runs
    if SET > 0:
        i_set = i_run // SET * SET
        i_stop = i_set + SET
    o_i = i_first + tl.arange(0, BLOCK_M)
    b_key = tl.load(p_runs + o_i)  # [BLOCK_M]
    b_order = tl.load(p_runs + n_places + o_i)
    b_rank = o_i - (i_run - i_set) * RUN
    for g in tl.range(i_set, i_stop, BLOCK_G):
        o_g = g + tl.arange(0, BLOCK_G)
        b_run = tl.minimum(o_g, i_stop - 1) * RUN
        b_limit = b_key[:, None] + (o_g < i_run).to(tl.int32)[None, :]  # [BLOCK_M, BLOCK_G]
        b_below = count_below(p_runs, b_run[None, :], b_limit, STEPS)
        b_rank += tl.sum(tl.where(((o_g != i_run) & (o_g < i_stop))[None, :], b_below, 0), axis=1)
    tl.store(p_sorted + b_rank, b_key)
    tl.store(p_sorted + n_places + b_rank, b_order)
    if SET == 0:
        tl.store(p_marks + b_key, 1, mask=b_key < n_rows)
        if i_first == 0:
            n_inside = 0
            for g in tl.range(0, n_runs, BLOCK_G):
                o_g = g + tl.arange(0, BLOCK_G)
                b_run = tl.minimum(o_g, n_runs - 1) * RUN
                b_below = count_below(p_runs, b_run, tl.full([BLOCK_G], 0, tl.int32) + n_rows, STEPS)
                n_inside += tl.sum(tl.where(o_g < n_runs, b_below, 0), axis=0)
            tl.store(p_inside, n_inside)
