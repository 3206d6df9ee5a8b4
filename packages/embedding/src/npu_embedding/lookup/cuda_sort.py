"""The ways of a gradient on CUDA, and what runs before its sums: which rows have a run, and the order of indices.

A key is the row of the table that an index names. An index outside the table, or of the padding row, has the key `n_rows`,
the last. `sorted` [n] are the keys in ascending order, `order` [n] says where each stood; equal keys stay in their order.

The first launch sorts groups of GROUP indices. Each launch after it makes one run of several sorted runs: it searches each
key in every other run of its set, and its place is the sum of the places it would have in each. The last such launch takes
all runs for one set; it marks the rows that indices name, or finds where the indices of each row begin.
"""

from math import ceil, inf
from typing import NamedTuple

from npu_tiling import Device
from npu_tiling.budget import INT32_END, here
from npu_tiling.calls import Empty
from npu_tiling.device import tl, triton
from npu_tiling.launch import CountTiling
from npu_tiling.plans import Plan, Slot

from ..call import NO_ROW
from ..rows import INT8, INT32, INT64, Gradient, Rule, Way, fill, sorted_numbers

# The most indices, and the most elements of dy, for which no sort is made. Each program looks through all indices and sums
# 128 columns. One launch and four, on an H200: 1024 x 256 take as long, 64 x 768 .008 and .015 ms, 1024 x 768 .041 and .019.
SEARCHED, _SEARCHED_ELEMENTS = 1024, 2**18
RANKED = 131072  # the most indices that kernels of our own sort

# The first row that matches is taken. The kernels of bags, for REPEATED, read rows of dy at one stride: it matches none that
# lie in parts. Gradients on an H200, ms (2026-11-30): of n rows of 160, RANKED and SORTED,
# 65536 .038 and .068, 131072 .068 and .093, 262144 .134 and .129; with 4 indices a row of the table, REPEATED and RANKED,
# 16384 of 768 .024 and .031, 32768 of 4096 .112 and .108; with 2 .032 and .030, .142 and .119.
WAYS = (
    # way, indices, elements of dy, rows (kernels count them in 32 bits, but those of SORTED), indices a row at least, why
    Rule(Way.SEARCHED, SEARCHED, _SEARCHED_ELEMENTS, 2**30, 0, f"{SEARCHED} are looked through sooner than sorted", here()),
    Rule(Way.REPEATED, RANKED, 2**24, 2**30, 4, "all that a row gets is a bag: few partial sums, no zeros", here()),
    Rule(Way.REPEATED, RANKED, inf, 2**30, 8, "bags are long: it pays to look at every row of the table", here()),
    Rule(Way.RANKED, RANKED, inf, 2**30, 0, f"up to {RANKED} torch.sort takes longer, on the host too", here()),
    Rule(Way.SORTED, inf, inf, inf, 0, "a radix sort, whose time is a multiple of the number of indices", here()),
)
RULE_OF = {rule.way: rule for rule in WAYS}


GROUP = 512  # indices that the first kernel of RANKED sorts
_RANKED_AT_ONCE = 16384  # indices whose sorted groups become one run in one launch as fast as in two
_RANKED_TOGETHER = 32  # keys of a program
_SEARCH_BITS = 2
_ZEROED = 4096  # marks, by a program
_MARKING = 512  # indices, by a program that marks their rows
_UNIT = 4  # int32 that begin at a multiple of 16 bytes, which Triton's kernels are compiled for
_LAST = tl.constexpr(2**31 - 2)  # after all keys, and one more is an int32 too


@triton.jit
def load_keys(p_index, o_index, n, n_rows, first_row, i_padding):
    """int64: the keys of the indices at `o_index`; a place past the last has the key `n_rows`."""
    b_row = tl.load(p_index + o_index, mask=o_index < n, other=-1).to(tl.int64) - first_row
    m_named = (b_row >= 0) & (b_row < n_rows) & (b_row != i_padding)
    return tl.where(m_named, b_row, n_rows)


@triton.jit(do_not_specialize=["n", "n_rows", "first_row", "i_padding"])
def mark_rows_kernel(
    p_index, p_key,
    p_marks,  # int8 [n_rows], zeros beforehand
    p_inside,  # int32 [1], zero beforehand
    n, n_rows, first_row, i_padding,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Marks the rows that have a run, counts the indices that name one and, where p_key is given, stores the keys."""
    o_index = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_row = load_keys(p_index, o_index, n, n_rows, first_row, i_padding)  # [BLOCK_M]
    m_named = b_row < n_rows
    tl.store(p_marks + b_row, 1, mask=m_named)
    tl.atomic_add(p_inside, tl.sum(m_named.to(tl.int32), axis=0))  # integers: any order gives the same number
    if p_key is not None:
        tl.store(p_key + o_index, b_row.to(p_key.dtype.element_ty), mask=o_index < n)


@triton.jit(do_not_specialize=["n", "n_groups", "n_rows", "first_row", "i_padding"])
def sort_groups_kernel(
    p_index,
    p_groups,  # int32 [2, n_groups * GROUP]: keys, where each stood; places past the last index have the key _LAST
    p_marks,  # int8 [n_rows], which this launch sets to zero; None: not needed
    n, n_groups, n_rows, first_row, i_padding,
    LOG: tl.constexpr,  # GROUP is 2 ** LOG
    WIDE: tl.constexpr,  # a key and a place in the group are an int64; else an int32
    BLOCK_Z: tl.constexpr,
):  # fmt: skip
    """Sorts the keys of a group, with their places in the lower bits; or sets BLOCK_Z marks to zero."""
    GROUP: tl.constexpr = 1 << LOG
    i_group = tl.program_id(0)
    if i_group < n_groups:
        o_place = tl.arange(0, GROUP)
        o_i = i_group * GROUP + o_place
        b_key = tl.where(o_i < n, load_keys(p_index, o_i, n, n_rows, first_row, i_padding), n_rows + 1)
        if WIDE:
            b_sorted = tl.sort(b_key.to(tl.int64) << LOG | o_place)
        else:
            b_sorted = tl.sort(b_key.to(tl.int32) << LOG | o_place)
        o_from = i_group * GROUP + (b_sorted & (GROUP - 1)).to(tl.int32)
        tl.store(p_groups + o_i, tl.where(o_from < n, (b_sorted >> LOG).to(tl.int32), _LAST))
        tl.store(p_groups + n_groups * GROUP + o_i, o_from)
    elif p_marks is not None:
        o_row = (i_group - n_groups) * BLOCK_Z + tl.arange(0, BLOCK_Z)
        tl.store(p_marks + o_row, tl.zeros([BLOCK_Z], tl.int8), mask=o_row < n_rows)


@triton.jit
def search_step(p_keys, b_at, b_limit, WIDTH: tl.constexpr, LATER: tl.constexpr):
    """int32 [M, G, 1]: places moved on by how many of WIDTH pieces of 2^LATER keys end below the limit.

    LATER is 0 in the last step. Those before leave out the last piece, in which the next step would look after its end.
    """
    o_piece = tl.arange(0, WIDTH)
    m_below = tl.load(p_keys + b_at + (((o_piece + 1) << LATER) - 1)) < b_limit  # [M, G, WIDTH]
    if LATER > 0:
        m_below = m_below & (o_piece < WIDTH - 1)
    return b_at + (tl.expand_dims(tl.sum(m_below.to(tl.int32), axis=2), 2) << LATER)


@triton.jit
def count_below(p_keys, b_run, b_key, STEPS: tl.constexpr, BITS: tl.constexpr):
    """int32 [M, G]: how many keys of the sorted runs of 2^STEPS that begin at `b_run` [M, G] are below `b_key` [M, G].

    A step of the search looks at 2^BITS keys at once, the first step at as many as are left over.
    """
    N_STEPS: tl.constexpr = (STEPS + BITS - 1) // BITS
    b_limit = tl.expand_dims(b_key, 2)
    b_at = search_step(p_keys, tl.expand_dims(b_run, 2), b_limit, 1 << (STEPS - BITS * (N_STEPS - 1)), BITS * (N_STEPS - 1))
    for s in tl.static_range(N_STEPS - 1):
        b_at = search_step(p_keys, b_at, b_limit, 1 << BITS, BITS * (N_STEPS - 2 - s))
    return tl.sum(b_at, axis=2) - b_run


@triton.jit
def count_all_below(p_keys, b_key, n_runs, STEPS: tl.constexpr, BITS: tl.constexpr, BLOCK_G: tl.constexpr):
    """int32 [M]: how many keys of all sorted runs are below `b_key` [M]."""
    b_count = tl.zeros_like(b_key)
    for g in tl.range(0, n_runs, BLOCK_G):
        o_g = g + tl.arange(0, BLOCK_G)
        b_run = (tl.minimum(o_g, n_runs - 1) << STEPS)[None, :] + tl.zeros_like(b_key)[:, None]
        b_below = count_below(p_keys, b_run, b_key[:, None] + tl.zeros_like(b_run), STEPS, BITS)
        b_count += tl.sum(tl.where((o_g < n_runs)[None, :], b_below, 0), axis=1)
    return b_count


@triton.jit(do_not_specialize=["n_runs", "n_rows"])
def rank_runs_kernel(
    p_runs,  # int32 [2, n_runs * RUN]: keys of sorted runs, where each stood
    p_sorted,  # int32 [2, n_runs * RUN]: those of the sets, sorted
    p_marks,
    p_inside,  # int32 [1]
    p_starts,  # int32 [n_rows + 1]: in place of these two, the place where each row's keys begin; None: not needed
    n_runs, n_rows,
    STEPS: tl.constexpr,  # RUN is 2 ** STEPS
    BITS: tl.constexpr,  # log2 of the keys that a step of a search looks at
    SET: tl.constexpr,  # runs that become one; 0: all
    BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """BLOCK_M places of a sorted run, looked up in BLOCK_G runs of its set at a time.

    In runs before its own, all keys that are not above its key come before it; in those after, all keys below. The last
    launch marks the rows that indices name, or has programs more, each for BLOCK_M rows of which it finds the first place.
    """
    RUN: tl.constexpr = 1 << STEPS
    o_i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i_run = tl.program_id(0) * BLOCK_M // RUN
    n_places = n_runs * RUN
    if i_run >= n_runs:
        if p_starts is not None:
            b_row = o_i - n_places
            b_start = count_all_below(p_runs, b_row, n_runs, STEPS, BITS, BLOCK_G)
            tl.store(p_starts + b_row, b_start, mask=b_row <= n_rows)
    else:
        i_set = 0
        i_stop = n_runs
        if SET > 0:
            i_set = i_run // SET * SET
            i_stop = i_set + SET
        b_key = tl.load(p_runs + o_i)  # [BLOCK_M]
        b_order = tl.load(p_runs + n_places + o_i)
        b_rank = o_i - (i_run - i_set) * RUN
        for g in tl.range(i_set, i_stop, BLOCK_G):
            o_g = g + tl.arange(0, BLOCK_G)
            b_limit = b_key[:, None] + (o_g < i_run).to(tl.int32)[None, :]  # [BLOCK_M, BLOCK_G]
            b_run = (tl.minimum(o_g, i_stop - 1) * RUN)[None, :] + tl.zeros_like(b_limit)
            b_below = count_below(p_runs, b_run, b_limit, STEPS, BITS)
            b_rank += tl.sum(tl.where(((o_g != i_run) & (o_g < i_stop))[None, :], b_below, 0), axis=1)
        tl.store(p_sorted + b_rank, b_key)
        tl.store(p_sorted + n_places + b_rank, b_order)
        if p_marks is not None:
            tl.store(p_marks + b_key, 1, mask=b_key < n_rows)
            if tl.program_id(0) == 0:
                b_inside = count_all_below(p_runs, n_rows + tl.arange(0, 1), n_runs, STEPS, BITS, BLOCK_G)
                tl.store(p_inside + tl.arange(0, 1), b_inside)


class Stage(NamedTuple):
    """A launch that searches the keys of each sorted run in the others of its set.

    Attributes:
        run: keys of a run.
        runs: of a set; 0: all.
        together: runs that are searched at a time.
    """

    run: int
    runs: int
    together: int

    @property
    def places(self) -> int:
        """Keys of a set; their number is a multiple of it."""
        return self.run * (self.runs or 1)

    def tiling(self, rule: Rule, device: Device) -> CountTiling:
        """That of the launch, which belongs to a rule."""
        steps = {"STEPS": self.run.bit_length() - 1, "BITS": _SEARCH_BITS, "SET": self.runs}
        blocks = steps | {"BLOCK_M": _RANKED_TOGETHER, "BLOCK_G": self.together}
        return rule.tiling(device, blocks, _RANKED_TOGETHER)


_ALL_GROUPS, _SETS, _ALL_SETS = Stage(GROUP, 0, 16), Stage(GROUP, 16, 8), Stage(16 * GROUP, 0, 8)


def sort_tiling(rule: Rule, device: Device, n_rows: int) -> CountTiling:
    """That of the launch that sorts groups of indices into a table of so many rows."""
    log = GROUP.bit_length() - 1
    blocks = {"LOG": log, "WIDE": (n_rows + 2) << log > INT32_END, "BLOCK_Z": _ZEROED}
    return rule.tiling(device, blocks, GROUP)


def rank_stages(n: int) -> tuple[Stage, ...]:
    """The launches that make one run of the sorted groups of n indices."""
    return (_ALL_GROUPS,) if n <= _RANKED_AT_ONCE else (_SETS, _ALL_SETS)


class Sorted(NamedTuple):
    """Indices [n], sorted by row of the table.

    Attributes:
        rows: [n] or longer, ascending.
        order: [n] or longer, where each stood.
        marks: int8, for each row of the table whether an index names it; None beside the starts of rows.
        inside: int32, the first of which says how many of `rows` have a gradient: the first ones.
    """

    rows: Slot
    order: Slot
    marks: Slot | None
    inside: Slot


def sorted_rows(p: Plan, gradient: Gradient, rule: Rule) -> Sorted:
    """Adds the steps that sort, by kernels of our own or by torch.sort."""
    if rule.way is not Way.SORTED:
        return _ranked(p, gradient, rule)
    # 32 bits are half the passes of a radix sort.
    keys = p.new(Empty(gradient.indices.shape, INT32 if gradient.n_rows < INT32_END else INT64))
    marks, inside = _mark_rows(p, gradient, keys)
    return Sorted(*sorted_numbers(p, keys), marks, inside)


def sorted_slots(p: Plan, gradient: Gradient, slot: Slot, order: Slot) -> Sorted:
    """What `sorted_rows` has for slots in ascending order, from 0 to n, which stands for none."""
    n = slot.numel()
    marks, inside = _mark_rows(p, gradient._replace(indices=slot, n_rows=n, padding=NO_ROW, first_row=0), None)
    return Sorted(slot, order, marks, inside)


def bags_of_rows(p: Plan, gradient: Gradient, rule: Rule) -> tuple[Slot, Slot]:
    """Adds the steps that sort. int32: where each index stood, [n] or longer; where each row's begin, [n_rows + 1]."""
    starts = p.new(Empty((gradient.n_rows + 1,), INT32))
    return _ranked(p, gradient, rule, starts).order, starts


def _ranked(p: Plan, gradient: Gradient, rule: Rule, starts: Slot | None = None) -> Sorted:
    """Adds the steps of kernels that sort. `starts`: what the last launch writes in place of marks."""
    n_rows, n, stages = gradient.n_rows, gradient.indices.numel(), rank_stages(gradient.indices.numel())
    places = ceil(n / stages[0].places) * stages[0].places
    memory = p.new(Empty((_UNIT + 4 * places,), INT32))
    inside = p.view(memory, (_UNIT,), (1,))
    runs, others = (p.view(memory, (2 * places,), (1,), _UNIT + 2 * places * i) for i in range(2))
    marks = p.new(Empty((n_rows,), INT8)) if starts is None else None
    name = "embedding backward, groups"
    p.launch(
        sort_groups_kernel,
        name,
        p.decide(name, sort_tiling(rule, p.chip, n_rows)).grid(places) + (0 if marks is None else ceil(n_rows / _ZEROED)),
        reads={"p_index": gradient.indices},
        writes={"p_groups": runs, "p_marks": marks},
        sizes=gradient.sizes | {"n_groups": places // GROUP},
    )
    name = "embedding backward, ranks"
    for stage in stages:
        last = stage is stages[-1]
        p.launch(
            rank_runs_kernel,
            name,
            p.decide(name, stage.tiling(rule, p.chip)).grid(places + (0 if starts is None or not last else n_rows + 1)),
            reads={"p_runs": runs},
            writes={
                "p_sorted": others,
                "p_marks": marks if last else None,
                "p_inside": inside if last and starts is None else None,
                "p_starts": starts if last else None,
            },
            sizes={"n_runs": places // stage.run, "n_rows": n_rows},
        )
        runs, others = others, runs
    rows, order = (p.view(runs, (places,), (1,), i * places) for i in range(2))
    return Sorted(rows, order, marks, inside)


def _mark_rows(p: Plan, gradient: Gradient, keys: Slot | None) -> tuple[Slot, Slot]:
    """`marks` and `inside` of `Sorted`; writes `keys`, where they are asked for, to sort by."""
    zeros = fill(p, p.new(Empty((_UNIT + ceil(gradient.n_rows / INT32.itemsize),), INT32)), 0)
    marks = p.view(zeros, (gradient.n_rows,), (1,), _UNIT * INT32.itemsize, dtype=INT8)
    inside = p.view(zeros, (1,), (1,))
    p.launch_over(
        mark_rows_kernel,
        RULE_OF[Way.SORTED].tiling(p.chip, {"BLOCK_M": _MARKING}, _MARKING),
        gradient.indices.numel(),
        decision="embedding backward, marks",
        reads={"p_index": gradient.indices},
        writes={"p_key": keys, "p_marks": marks, "p_inside": inside},
        sizes=gradient.sizes,
    )
    return marks, inside
