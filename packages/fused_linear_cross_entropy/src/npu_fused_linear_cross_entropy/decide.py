"""How a loss is computed: where chunks end, by `CASES`, and the way, by `RULES`.

Each chunk of tokens reads the weight and adds to its gradient, so it must be long enough for matrix products to take longer
than that traffic; longer chunks only take memory. With T tokens a product with the weight does 2 T H V operations, and the
one that adds to the weight's gradient moves 2 H V elements of it:

    T = OVERLAP * (operations per second) / (bytes per second) * (bytes of an element)

but no more than the memory budget allows. Where a kernel multiplies, twice as many tokens are wanted
(`Demand.length_factor`), and longer chunks take less time yet, up to `Demand.longest` tokens.

`Shape` has all that a decision depends on, `Demand` the memory that follows from it, and `LossTiling` the decision.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import Any, NamedTuple

import torch
from npu_tiling import Device, collectives
from npu_tiling.budget import FP32, here
from npu_tiling.calls import statistics_dtype
from npu_tiling.launch import Tiling

from .call import EachOptions, Needs, Options
from .tiling import ROWS, ChunkKernel, ChunkShape, ProductTiling, chunk_tiling, is_worth_it

# Where chunks end.

MIB = 2**20
DEFAULT_BUDGET = {"cuda": 1280 * MIB, "ascend": 384 * MIB, "cpu": 256 * MIB}
UNIT = 128  # tokens and columns of a chunk are multiples of this: whole tiles of matrix products
_OVERLAP = 2.75  # at this many times the break-even length, chunking costs no measurable time
# CUDA: an H200, 790 TFLOP/s and 4.28 TB/s. Ascend: a default for chips whose figures are not published.
_OPERATIONS_PER_BYTE = {"cuda": 185.0, "ascend": 295.0, "cpu": 185.0}
_KEPT_BUDGET = 128 * MIB  # for a chunk of columns where logits are kept: more was not faster on an H200
_MIN_CHUNK_SHARE = 0.375  # of T: with fewer tokens, weight traffic costs more than computing all logits twice
_MIN_COLUMNS = 512
_PITCH_UNIT = 16  # elements that the pitch of a row of logits is a multiple of: a multiple of 32 bytes in every dtype


# Parts of a range: of tokens, and of columns of the vocabulary.


def token_groups(tokens: int, longest: int) -> tuple[slice, ...]:
    """Groups of tokens whose sums of dx are in memory at a time: all of them, or a power of two units each."""
    if tokens <= longest:
        return (slice(0, tokens),)
    return exactly(tokens, UNIT << ((longest // UNIT).bit_length() - 1))


def in_groups(parts: tuple[slice, ...], count: int) -> tuple[slice, ...]:
    """Neighbours as one, `count` at a time."""
    groups = (parts[first : first + count] for first in range(0, len(parts), count))
    return tuple(slice(group[0].start, group[-1].stop) for group in groups)


def exactly(total: int, length: int) -> tuple[slice, ...]:
    """Parts of that length; the last may be shorter."""
    return tuple(slice(first, min(first + length, total)) for first in range(0, total, length))


def equally(total: int, longest: int) -> tuple[slice, ...]:
    """Parts of one length, a multiple of the unit, except the last: a kernel is compiled for each length."""
    if not total:
        return ()
    length = ceil(total / ceil(total / longest) / UNIT) * UNIT
    return exactly(total, min(length, longest) if longest >= UNIT else longest)


def evenly(total: int, longest: int) -> tuple[slice, ...]:
    """As few parts as possible, whose lengths differ by at most one unit."""
    if total <= longest:
        return (slice(0, total),) if total else ()
    unit = UNIT if longest % UNIT == 0 else 1
    units, count = ceil(total / unit), ceil(total / longest)
    ends = [min(total, (units * (i + 1) // count) * unit) for i in range(count)]
    return tuple(slice(first, end) for first, end in zip([0, *ends], ends, strict=False))


class Layout(Enum):
    """How a chunk takes the vocabulary."""

    ROWS = "whole rows of logits"
    KEPT = "some columns at a time, whose exponentials are kept in the memory of the weight's gradient"
    COLUMNS = "some columns at a time, whose logits are computed twice"


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Where chunks end, and how the vocabulary is taken.

    Attributes:
        tokens: chunks of tokens.
        columns: chunks of the vocabulary; one if whole rows of logits are in memory.
        kept: parts of the vocabulary, of a few chunks each, whose exponentials are kept in those rows of the weight's
            gradient; empty if none are kept.
        why: the case that decided.
    """

    tokens: tuple[slice, ...]
    columns: tuple[slice, ...]
    kept: tuple[slice, ...] = ()
    why: str = ""

    @property
    def layout(self) -> Layout:
        """How the vocabulary is taken."""
        if self.kept:
            return Layout.KEPT
        return Layout.COLUMNS if len(self.columns) > 1 else Layout.ROWS

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens and columns of the largest chunk."""
        return tuple(max((part.stop - part.start for part in parts), default=0) for parts in (self.tokens, self.columns))  # type: ignore[return-value]


@dataclass(frozen=True)
class Demand:
    """The memory that a loss asks for, in sizes and bytes.

    Attributes:
        tokens, width, vocabulary: N, H and V.
        logit_bytes: bytes of a logit; 0 if none is in memory.
        dweight_bytes: bytes of an element of the sums that become the weight's gradient; 0 if it is not wanted.
        dx: whether the gradient of x is wanted, in a dtype narrower than its sums.
        kept_bytes: bytes of an exponential that is kept for the gradient; 0 if none may be.
        scaled_bytes: bytes of a token's row of x times a factor, and of its sums of dx.
        sum_bytes: bytes of a token's partial sums, statistics and coefficients.
        length_factor: chunks have this many times T tokens.
        longest: tokens of a chunk at most, where longer ones than T take less time; 0: they do not.
    """

    tokens: int
    width: int
    vocabulary: int
    logit_bytes: int
    dweight_bytes: int
    dx: bool
    kept_bytes: int
    scaled_bytes: int = 0
    sum_bytes: int = 0
    length_factor: int = 1
    longest: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row of logits, its row of scaled x and its partial sums."""
        return pitch(self.vocabulary) * self.logit_bytes + self.scaled_bytes + self.sum_bytes

    def fits_in_dweight(self, part: slice) -> bool:
        """Whether the exponentials of a part of the vocabulary can be kept in its rows of the weight's gradient."""
        width = part.stop - part.start
        return self.tokens * pitch(width) * self.kept_bytes <= width * self.width * self.dweight_bytes


def pitch(columns: int) -> int:
    """Elements from one row of logits to the next."""
    return ceil(columns / _PITCH_UNIT) * _PITCH_UNIT


def wanted_tokens(dweight_bytes: int, device: Device | None) -> int:
    """T: the shortest chunk of tokens that hides the traffic of the weight behind matrix products."""
    kind = "cpu" if device is None else device.kind
    ratio = _OPERATIONS_PER_BYTE[kind]
    if device is not None and device.kind == "ascend" and device.bandwidth and device.matrix_flops:
        ratio = device.matrix_flops / device.bandwidth
    # A product without a gradient reads each weight once, for 2 T operations; one that adds to the weight's gradient reads
    # and writes an element for them.
    return max(1, round(_OVERLAP * ratio * (dweight_bytes or 1) / UNIT)) * UNIT


def budget_of(memory_budget: int | None, device: Device | None) -> int:
    """Bytes for logits and sums: those that were given, or the default."""
    return DEFAULT_BUDGET["cpu" if device is None else device.kind] if memory_budget is None else memory_budget


class Room(NamedTuple):
    """A demand and the memory for it.

    Attributes:
        demand: what is asked for.
        given: tokens of a chunk that the caller asked for; None: the caller did not.
        budget: bytes for logits and sums.
        is_limited: whether the caller gave the budget.
        wanted: tokens of a chunk that hide the weight's traffic.
        longest: tokens of a chunk at most.
        affordable: whole rows that the budget holds.
    """

    demand: Demand
    given: int | None
    budget: int
    is_limited: bool
    wanted: int
    longest: int
    affordable: int

    @property
    def least(self) -> int:
        """Tokens of a chunk of whole rows at least."""
        return ceil(self.wanted * _MIN_CHUNK_SHARE)

    def rows(self, longest: int, cut: Callable[[int, int], tuple[slice, ...]] = evenly) -> Chunks:
        """Chunks of whole rows, of at most `longest` tokens."""
        return Chunks(tokens=cut(self.demand.tokens, longest), columns=(slice(0, self.demand.vocabulary),))

    def some_columns(self) -> Chunks:
        """Chunks of columns, for as many tokens at a time as the budget holds, or as the caller asked for."""
        demand, budget = self.demand, self.budget
        columns = pitch(min(_MIN_COLUMNS, demand.vocabulary))
        sums = FP32 * demand.width if demand.dx else 0
        if self.given is None:
            affordable = max(budget // (sums + columns * demand.logit_bytes), UNIT)
            chunks = evenly(demand.tokens, demand.tokens if affordable >= demand.tokens else affordable // UNIT * UNIT)
        else:
            chunks = exactly(demand.tokens, self.given)
        tokens = max(chunk.stop - chunk.start for chunk in chunks)
        longest = max(columns, (budget // tokens - sums) // demand.logit_bytes // UNIT * UNIT)
        return Chunks(tokens=chunks, columns=equally(demand.vocabulary, longest))

    def kept_columns(self) -> Chunks | None:
        """Chunks of columns of all tokens, whose exponentials are kept; None if they, or the sums of dx, have no memory."""
        demand, tokens, vocabulary = self.demand, self.demand.tokens, self.demand.vocabulary
        budget = min(self.budget, _KEPT_BUDGET) - tokens * demand.sum_bytes
        # The longest chunk for which logits fit, and for each row and chunk a number: the maximum that was subtracted.
        longest = budget // (tokens * demand.logit_bytes) // UNIT * UNIT
        while longest >= UNIT and tokens * (longest * demand.logit_bytes + ceil(vocabulary / longest) * FP32) > budget:
            longest -= UNIT
        if longest < min(_MIN_COLUMNS, vocabulary):
            return None
        together = demand.logit_bytes // demand.kept_bytes  # kept chunks that one chunk of logits has room for
        columns = equally(vocabulary, longest)
        kept = in_groups(columns, together)
        if not demand.fits_in_dweight(kept[-1]):  # the padding of rows makes the last part too big: its end is kept apart
            whole = vocabulary // UNIT * UNIT
            rest = (slice(whole, vocabulary),)
            columns = (*equally(whole, longest), *rest)
            kept = (*in_groups(columns[:-1], together), *rest)
        room = tokens * pitch(columns[0].stop) * demand.logit_bytes
        sums = min(tokens, UNIT) * demand.width * FP32 if demand.dx else 0
        if len(columns) == 1 or sums > room or not all(demand.fits_in_dweight(part) for part in kept[:-1]):
            return None
        return Chunks(tokens=(slice(0, tokens),), columns=columns, kept=kept)


class Case(NamedTuple):
    """A row of `CASES`: whether it holds, its chunks (None: they have no memory), and why, with names that `split` knows."""

    holds: Callable[[Room], object]
    chunks: Callable[[Room], Chunks | None]
    why: str


# The first row that holds, and whose chunks have memory, is taken.
# fmt: off
CASES = (
    Case(lambda room: room.given and (not room.is_limited or min(room.given, room.demand.tokens) <= room.affordable),
         lambda room: room.rows(room.given or 1, exactly),
         "chunk_tokens was given"),
    Case(lambda room: room.given,
         Room.some_columns,
         "{mib} hold {affordable} whole rows of logits, of the {given} that were given"),
    Case(lambda room: room.demand.tokens <= min(room.affordable, room.longest),
         lambda room: room.rows(room.longest),
         "the logits of all tokens fit in {mib}, and a chunk has at most {longest} tokens"),
    Case(lambda room: room.demand.longest and room.affordable >= room.wanted,
         lambda room: room.rows(min(room.longest, room.affordable // UNIT * UNIT)),
         "{mib} hold {affordable} tokens, and a chunk has at most {longest}: {count} chunks of nearly equal length"),
    Case(lambda room: room.demand.kept_bytes,
         Room.kept_columns,
         "a number for each logit fits in the weight's gradient, and the logits of a chunk in {kept_mib}"),
    Case(lambda room: room.affordable >= min(room.demand.tokens, room.wanted),
         lambda room: room.rows(room.wanted),
         "chunks of at most {wanted} tokens hide the weight's traffic behind products"),
    Case(lambda room: room.affordable >= room.least or not room.demand.logit_bytes,  # chunks of columns save logits alone
         lambda room: room.rows(room.affordable // UNIT * UNIT or room.affordable or UNIT),
         "{mib} hold {affordable} tokens of the {wanted} that would hide the weight's traffic:"
         " {count} chunks of nearly equal length"),
    Case(lambda room: True,
         Room.some_columns,
         "{mib} hold {affordable} whole rows of logits, and a chunk of whole rows has at least {least}"),
)
# fmt: on


def split(demand: Demand, chunk_tokens: int | None, memory_budget: int | None, device: Device | None) -> Chunks:
    """Chunks for a demand; `memory_budget`: bytes for logits and sums, without inputs and gradients."""
    budget, wanted = budget_of(memory_budget, device), demand.tokens
    if demand.logit_bytes:
        wanted = wanted_tokens(demand.dweight_bytes, device) * demand.length_factor
    affordable, longest = budget // demand.row_bytes, max(wanted, demand.longest)
    room = Room(demand, chunk_tokens, budget, memory_budget is not None, wanted, longest, affordable)
    for case in CASES:
        chunks = case.chunks(room) if case.holds(room) else None
        if chunks is not None:
            mib, kept_mib = (f"{each / MIB:.4g} MiB" for each in (budget, min(budget, _KEPT_BUDGET)))
            words = {"mib": mib, "kept_mib": kept_mib, "least": room.least, "count": len(chunks.tokens)}
            return dataclasses.replace(chunks, why=case.why.format(**room._asdict(), **words))
    raise AssertionError(f"no case for {demand}")


# Ways.


class Task(Enum):
    """Results of one call of an operator."""

    LOSS = "the outputs alone"
    LOSS_AND_GRADIENTS = "the outputs, and the gradients of a loss that is one number"
    GRADIENTS = "gradients, given those of the losses and entropies"
    DISTRIBUTIONS = "moments and log-probabilities of each token's distribution"
    DISTRIBUTION_GRADIENTS = "gradients, given those of moments and log-probabilities"


class Shape(NamedTuple):
    """All that the decision how a loss is computed depends on.

    Attributes:
        task: the results.
        tokens, width, vocabulary: N, H and the rows of the weight.
        x_dtype, weight_dtype: of x, and of the weight as it was given.
        bias_dtype: None where there is no bias.
        options: of the loss.
        needs: which gradients are computed.
        unfinished: whether factors of the gradients are left for later (see `write_target_facts` in loss/reference.py).
        writes_fp32: whether matrix products of x's dtype can be fp32.
        frozen_width: of the columns of x, those of a weight that is not trained; the others are an adapter's.
        is_readable: whether a kernel's own matrix product can read x and the weight (see `is_possible` in tiling.py).
        device: whose kernels run; None for plain PyTorch.
    """

    task: Task
    tokens: int
    width: int
    vocabulary: int
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    options: Options
    needs: Needs
    unfinished: bool
    writes_fp32: bool
    is_readable: bool
    device: Device | None
    frozen_width: int = 0

    def is_of_distributions(self) -> bool:
        """Whether there are no losses."""
        return self.task in (Task.DISTRIBUTIONS, Task.DISTRIBUTION_GRADIENTS)

    @property
    def is_row_factor_times_exponentials(self) -> bool:
        """Whether the gradient of the logits is a factor of the row times exponentials, in a dtype with fp32's range."""
        options = self.options
        other = (
            self.is_of_distributions()
            or self.frozen_width
            or options.softcap is not None
            or options.return_entropy
            or options.smoothed
            or options.argmax
        )
        return not other and not self.needs.dbias and self.x_dtype != torch.float16

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype that PyTorch's product of x and the weight is rounded to."""
        return statistics_dtype(self.x_dtype) if self.writes_fp32 else self.x_dtype

    @property
    def has_room_for_sums(self) -> bool:
        """Whether exponentials leave half of each row of logits to sums of dx, [tokens, H]."""
        return 2 * self.x_dtype.itemsize == self.product_dtype.itemsize and 2 * self.width <= pitch(self.vocabulary)


# fp16 sums over tokens are scaled to at most this many times their mean. A mean is at most as large as x, and in a
# vocabulary of 2^15 as small as x / 2^15 / sqrt(tokens): both are within fp16's range if elements of x are at most 255.
_MAX_SUM_OVER_MEAN = 256
_MAX_EXPONENTIAL_COLUMNS = 2**20  # a kernel notes a number for each tile of a row
_MAX_SORTED_COLUMNS = 2**24  # targets are sorted as fp32 numbers, in which integers up to here are exact


class Way(Enum):
    """How results come about: a function each, in the plan.py of distillation and of distributions, or in loss/ways.py.

    g is the gradient of the logits. Where it is a factor v of each row times exponentials E, one sweep writes E before v
    is known, and v is multiplied in with the products.
    """

    WHOLE_ROWS = "PyTorch's product writes rows of logits; their gradient g takes their place; dx = g W, dW += g^T x"
    EXPONENTIALS = (
        "PyTorch's product writes rows of logits z, then E = exp(z - k); dx = v (E W), dW += E^T (v x); v, k: a row's"
    )
    PRODUCT = "a kernel's product writes rows of E = exp(z - k), no logits z; dx = v (E W), dW += E^T (v x); v, k: a row's"
    KEPT_EXPONENTIALS = (
        "PyTorch's product writes columns of logits z; E = exp(z - k) waits in dW; dx = v (E W), dW = (v E)^T x"
    )
    KEPT_PRODUCT = "a kernel's product writes E = exp(z - k) to dW's memory, no logits z; dx = v (E W), dW = (v E)^T x"
    COLUMNS = (
        "PyTorch's product writes columns of logits, twice; then their gradient g takes their place; dx += g W, dW = g^T x"
    )
    DISTILLATION = (
        "PyTorch's products write rows of a student's logits and of its teacher's; g takes the student's place; dx = g W,"
        " dW += g^T x"
    )
    DISTRIBUTIONS = (
        "PyTorch's product writes logits; a kernel reads what their distributions are; in the backward g takes their place"
    )

    @property
    def multiplies(self) -> bool:
        """Whether a kernel of ours multiplies x and the weight."""
        return self in (Way.PRODUCT, Way.KEPT_PRODUCT)


@dataclass(frozen=True, kw_only=True)
class LossTiling(Tiling):
    """How a loss is computed.

    Attributes:
        shape: of the loss.
        way: which function runs.
        chunks: where chunks end.
        exact: the dtype of statistics and arithmetic.
        logits_dtype: of logits in memory, or of exponentials where there are never logits.
        sum_dtype: of the sums that become the weight's gradient.
        dweight_scale: factor of the sums that become the weight's gradient.
        buffer: elements of the memory for a chunk's logits or exponentials, and later for sums of dx or scaled copies.
        why: why this way.
        decided_at: file and line of the rule that chose it.
    """

    shape: Shape = field(repr=False)
    way: Way
    chunks: Chunks
    exact: torch.dtype
    logits_dtype: torch.dtype
    sum_dtype: torch.dtype
    dweight_scale: float
    buffer: int
    why: str
    decided_at: str

    def __hash__(self) -> int:
        return hash((self.shape, self.way))  # before Python 3.12 the slices of chunks have none


class Rule(NamedTuple):
    """A row of `RULES`.

    Attributes:
        way: which function runs.
        layout: how chunks take the vocabulary, by the memory budget and the lengths of products.
        holds: the other condition.
        why: the same in words.
        decided_at: file and line of the row.
    """

    way: Way
    layout: Layout
    holds: Callable[[Shape], bool]
    why: str
    decided_at: str


def rule(way: Way, layout: Layout, holds: Callable[[Shape], bool], why: str) -> Rule:
    """A rule, with the file and line of the call."""
    return Rule(way, layout, holds, why, here(2))


def can_multiply(shape: Shape) -> bool:
    """Whether a kernel's product of x and the weight can store exponentials, and is faster than PyTorch's and a sweep."""
    in_bf16 = shape.x_dtype == torch.bfloat16 and shape.bias_dtype is None
    if not (shape.is_readable and in_bf16 and can_use_exponentials(shape)):
        return False
    assert shape.device is not None
    # A chunk's rows, where its length was given: under `batch_invariant` the way must not depend on the number of tokens.
    rows = shape.tokens if shape.options.chunk_tokens is None else shape.options.chunk_tokens
    return is_worth_it(rows, shape.width, shape.vocabulary, shape.device)


def can_use_exponentials(shape: Shape) -> bool:
    """Whether kernels can make the gradient of the logits as v times E, a factor of the row times exponentials."""
    can_sort = shape.vocabulary <= _MAX_SORTED_COLUMNS
    return shape.device is not None and can_sort and shape.is_row_factor_times_exponentials


def saves_a_sweep(shape: Shape) -> bool:
    """Whether exponentials, written in one sweep, save a second sweep over whole rows for the gradient."""
    fits = shape.vocabulary <= _MAX_EXPONENTIAL_COLUMNS
    if shape.task is not Task.LOSS_AND_GRADIENTS or not fits or not can_use_exponentials(shape):
        return False
    itemsize = shape.product_dtype.itemsize
    if shape.options.group:  # a second sweep reads logits again; v multiplies sums of dx, in fp32, and x
        return shape.vocabulary * itemsize > shape.width * (itemsize + 3 * shape.x_dtype.itemsize)
    assert shape.device is not None
    both = ChunkShape(
        kernel=ChunkKernel.BOTH, width=shape.vocabulary, itemsize=itemsize, written_itemsize=shape.x_dtype.itemsize
    )
    return chunk_tiling(both, shape.device).streams


def always(shape: Shape) -> bool:
    """Holds for every shape."""
    return True


# The first row that holds is taken. Chunks of KEPT_PRODUCT and PRODUCT come from `of_product`, others from `of_logits`.
RULES = (
    rule(Way.DISTRIBUTIONS, Layout.ROWS, Shape.is_of_distributions, "outputs of distributions; whole rows fit"),
    rule(Way.DISTRIBUTIONS, Layout.COLUMNS, Shape.is_of_distributions, "outputs of distributions; few whole rows fit"),
    rule(Way.KEPT_PRODUCT, Layout.KEPT, can_multiply, "a kernel's product stores exponentials, and all of them are kept"),
    rule(Way.PRODUCT, Layout.ROWS, can_multiply, "a kernel's product stores exponentials of whole rows (sm_90, bf16, no"
          " bias, from 2e11 operations on)"),
    rule(Way.KEPT_EXPONENTIALS, Layout.KEPT, can_use_exponentials, "the logits of all rows do not fit in one chunk; the"
          " gradient is v times E, a factor of each row times its exponentials"),
    rule(Way.COLUMNS, Layout.COLUMNS, always, "few whole rows fit at a time, and the weight's gradient cannot keep"
          " exponentials of all (more tokens than columns of x, no such gradient, a bias, an option, fp16 or a CPU)"),
    rule(Way.EXPONENTIALS, Layout.ROWS, saves_a_sweep, "whole rows fit; the gradient is v times E: one sweep, not two"),
    rule(Way.WHOLE_ROWS, Layout.ROWS, lambda shape: not shape.is_row_factor_times_exponentials, "whole rows fit, and the"
          " gradient takes the logits' place: it is more than v times E (smoothing, entropy, softcap, argmax, a bias's"
          " gradient, an adapter or fp16)"),
    rule(Way.WHOLE_ROWS, Layout.ROWS, always, "whole rows fit, and E would save no sweep (no gradients in this pass,"
          " statistics that an earlier pass computed, rows of one tile, on ranks short ones, or of more than 2^20 columns,"
          " or a CPU)"),
)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def choose(shape: Shape) -> LossTiling:
    """The way, by `RULES`, and the chunks. Ranks that share a vocabulary cut tokens as an average rank does.

    Their ways may differ: every way exchanges once for each chunk of tokens, between its statistics and its gradients.
    """
    if shape.options.vocab_parts > 1:
        return _in_parts_of_the_vocabulary(shape)
    average = _of_average_rank(shape) if shape.options.group else shape
    agreed = None if average == shape else choose(average).chunks
    by_pytorch = _split_as_agreed(shape, of_logits(shape), agreed)
    by_kernel = _split_as_agreed(shape, of_product(shape), agreed) if can_multiply(shape) else None
    for each in RULES:
        found = by_kernel if each.way.multiplies else by_pytorch
        if found is not None and found[0].layout is each.layout and each.holds(shape):
            return tiling_of(shape, each, *found)
    raise AssertionError(f"no rule for {shape}")


_PARTS_RULE = rule(Way.COLUMNS, Layout.COLUMNS, always, "vocab_parts was given: one part of the vocabulary at a time")


def _in_parts_of_the_vocabulary(shape: Shape) -> LossTiling:
    """Products of one shape, whatever part of the vocabulary this rank has."""
    options = shape.options
    tokens = exactly(shape.tokens, options.chunk_tokens or shape.tokens)
    columns = exactly(shape.vocabulary, options.vocab_size // options.vocab_parts)
    _, sum_dtype = _split_within_limits(shape, of_logits(shape), options.chunk_tokens, options.memory_budget)
    return tiling_of(shape, _PARTS_RULE, Chunks(tokens=tokens, columns=columns, why=_PARTS_RULE.why), sum_dtype)


def most_columns(options: EachOptions, own: int) -> int:
    """Columns of the vocabulary that a rank has in equal parts: the same number on all, so that they cut tokens alike."""
    return -(-options.vocab_size // collectives.ranks(options.group)) if options.group else own


def _of_average_rank(shape: Shape) -> Shape:
    """The shape of a rank with the average number of columns, whose tensors TMA can read: it is equal on all ranks."""
    columns = most_columns(shape.options, shape.vocabulary)
    return shape._replace(vocabulary=columns, is_readable=True, options=shape.options._replace(vocab_first=0))


_MAX_FP32_SUMS = 600 * MIB  # beside a default budget


def _split_as_agreed(shape: Shape, demand: Demand, agreed: Chunks | None) -> tuple[Chunks, torch.dtype]:
    """Chunks, and the dtype of the sums that become the weight's gradient."""
    chunks, sum_dtype = _split_within_limits(shape, demand, shape.options.chunk_tokens, shape.options.memory_budget)
    if agreed is None or chunks.tokens == agreed.tokens:
        return chunks, sum_dtype
    budget = shape.options.memory_budget
    if budget is None and agreed.layout is not Layout.ROWS:
        budget = budget_of(None, shape.device)  # without a budget, chunks of a given length take whole rows
    chunks, sum_dtype = _split_within_limits(shape, demand, agreed.longest[0], budget)
    why = f"ranks cut tokens alike, as for the average of their columns: {agreed.why}"
    return dataclasses.replace(chunks, tokens=agreed.tokens, why=why), sum_dtype


def _split_within_limits(
    shape: Shape, demand: Demand, chunk_tokens: int | None, memory_budget: int | None
) -> tuple[Chunks, torch.dtype]:
    """Chunks within these limits, and the dtype of the sums.

    Sums are fp32 although the weight is narrower if several chunks of tokens add to them, and a given budget holds them
    beside the logits. The default budget is for logits alone: sums that take less than it, and less than 600 MiB, come
    beside it.
    """
    chunks, exact = split(demand, chunk_tokens, memory_budget, shape.device), statistics_dtype(shape.x_dtype)
    if shape.options.accum_dtype is not None:
        return chunks, shape.options.accum_dtype
    if len(chunks.tokens) > 1 and 0 < demand.dweight_bytes < FP32:
        sums, room = demand.vocabulary * demand.width * FP32, budget_of(memory_budget, shape.device)
        if sums < (min(room, _MAX_FP32_SUMS) if memory_budget is None else room):
            left = None if memory_budget is None else memory_budget - sums
            wide = split(dataclasses.replace(demand, dweight_bytes=FP32), chunk_tokens, left, shape.device)
            if len(wide.columns) == 1 or wide.kept:
                return wide, exact
    return chunks, exact if shape.frozen_width else shape.weight_dtype


def tiling_of(shape: Shape, rule: Rule, chunks: Chunks, sum_dtype: torch.dtype) -> LossTiling:
    """The tiling of a rule, with its chunks and the dtype of the sums that become the weight's gradient."""
    multiplies, (tokens, columns) = rule.way.multiplies, chunks.longest
    if shape.device is not None and shape.device.kind == "ascend":  # whose programs read whole tiles of rows
        tokens = ceil(tokens / ROWS) * ROWS
    stores = shape.needs.dx or shape.needs.dweight or not multiplies
    return LossTiling(
        shape=shape,
        way=rule.way,
        chunks=chunks,
        exact=statistics_dtype(shape.x_dtype),
        logits_dtype=shape.x_dtype if multiplies else shape.product_dtype,
        sum_dtype=sum_dtype,
        # Below 1 where gradients are left unfinished: a power of two.
        dweight_scale=0.5 ** (max(0, shape.tokens - 1) // _MAX_SUM_OVER_MEAN).bit_length() if shape.unfinished else 1.0,
        buffer=tokens * pitch(columns) if stores else 0,
        why=rule.why,
        decided_at=rule.decided_at,
    )


_ROW_NUMBERS = 16  # of each row: statistics, coefficients, k, v
# Tokens of the longest chunks where a kernel multiplies. Losses with gradients on an H200, ms, in chunks of 2048 and of 4096
# tokens, and of all (2026-11-30, with an older product; the first takes 16.5 since): 4096 x 4096 x 128256 19.5, 19.0
# (exponentials that are kept: 20.9); 8192 x 2048 x 151936 23.3, 22.4, 22.3; 8192 x 4096 x 32000 11.4, 10.1, 9.4.
_LONG = 8192


def of_logits(shape: Shape) -> Demand:
    """Memory for a loss whose logits PyTorch's product writes."""
    dtype, exact, logits = shape.x_dtype, statistics_dtype(shape.x_dtype), shape.product_dtype
    once = shape.device is not None and shape.is_row_factor_times_exponentials
    sums = exact.itemsize if shape.needs.dx and logits != dtype else 0
    return _demand(
        shape,
        logit_bytes=logits.itemsize,
        dx=shape.needs.dx and dtype.itemsize < exact.itemsize,
        scaled_bytes=shape.width * (dtype.itemsize + sums) if once and not shape.has_room_for_sums else 0,
    )


def of_product(shape: Shape) -> Demand:
    """Memory for a loss whose exponentials a kernel's product writes, or keeps in registers."""
    assert shape.device is not None
    dtype, exact, needs = shape.x_dtype, statistics_dtype(shape.x_dtype), shape.needs
    is_stored = needs.dx or needs.dweight
    sums = exact.itemsize if needs.dx and shape.product_dtype != dtype else 0
    tiles = ProductTiling(width=shape.width, device=shape.device).column_tiles(shape.vocabulary)
    return _demand(
        shape,
        logit_bytes=dtype.itemsize if is_stored else 0,
        dx=needs.dx,
        scaled_bytes=shape.width * (dtype.itemsize + sums) if is_stored else 0,
        sum_bytes=(tiles + _ROW_NUMBERS) * exact.itemsize,
        length_factor=2,
        longest=_LONG if shape.task in (Task.LOSS_AND_GRADIENTS, Task.GRADIENTS) else 0,
    )


def dweight_bytes(shape: Shape) -> int:
    """Bytes of an element of the weight's gradient, 0 if there is none; an adapter's is small, and does not count."""
    counts = shape.needs.dweight and not shape.frozen_width
    return (shape.options.accum_dtype or shape.weight_dtype).itemsize if counts else 0


def _demand(shape: Shape, **others: Any) -> Demand:
    """What demands of both products have."""
    is_new = shape.task is Task.LOSS_AND_GRADIENTS  # the memory of the weight's gradient; a weight_grad holds gradients
    may_keep = dweight_bytes(shape) and shape.bias_dtype is None and shape.options.shift_invariant
    keeps = is_new and may_keep and can_use_exponentials(shape)
    kept, sizes = shape.x_dtype.itemsize if keeps else 0, (shape.tokens, shape.width, shape.vocabulary)
    return Demand(*sizes, dweight_bytes=dweight_bytes(shape), kept_bytes=kept, **others)
