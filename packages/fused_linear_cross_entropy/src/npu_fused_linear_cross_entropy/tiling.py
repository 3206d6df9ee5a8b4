"""The decision how a loss is computed: `Shape` -> `Tiling`, a way and the chunks of tokens and vocabulary that it takes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.places import here
from npu_tiling.pytorch.tensors import statistics_dtype

from . import chunks, demands, parallel, splitting
from .ascend import tiling as ascend
from .ascend.tiling import AscendLaunch
from .both.tiling.chunks import ROWS, ChunkKernel, ChunkShape
from .chunks import Chunks, Layout
from .cuda import tiling as cuda
from .cuda.tiling import CudaLaunch, is_worth_it
from .shape import Shape, Task
from .splitting import Demand

# fp16 sums over tokens are scaled to at most this many times their mean. A mean is at most as large as x, and in a
# vocabulary of 2^15 as small as x / 2^15 / sqrt(tokens): both are within fp16's range if elements of x are at most 255.
_MAX_SUM_OVER_MEAN = 256.0
_MAX_EXPONENTIAL_COLUMNS = 2**20  # a kernel notes a number for each tile of a row
_MAX_SORTED_COLUMNS = 2**24  # targets are sorted as fp32 numbers, in which integers up to here are exact


class Way(Enum):
    """How a loss and its gradients come about: ways/ has a class for each.

    g is the gradient of the logits. Where it is a factor v of each row times exponentials E, one sweep writes E before v
    is known, and v is multiplied in with the products.
    """

    WHOLE_ROWS = "PyTorch's product writes rows of logits; g takes their place; dx = g W, dW += g^T x"
    EXPONENTIALS = "PyTorch's product writes rows of logits; E takes their place; dx = v (E W), dW += E^T (v x)"
    PRODUCT = "a kernel's product writes rows of E, and no logits; dx = v (E W), dW += E^T (v x)"
    KEPT_LOGITS = (
        "PyTorch's product writes some columns of logits; all wait in dW's memory, and become g; dx = g W, dW = g^T x"
    )
    KEPT_EXPONENTIALS = (
        "PyTorch's product writes some columns of logits; all E wait in dW's memory; dx = v (E W), dW = (v E)^T x"
    )
    KEPT_PRODUCT = "a kernel's product writes all E into dW's memory, and no logits; dx = v (E W), dW = (v E)^T x"
    COLUMNS = (
        "PyTorch's product writes some columns of logits, twice; the second time g takes their place; dx += g W, dW = g^T x"
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
class Tiling:
    """How a loss is computed.

    Attributes:
        shape: of the loss.
        way: which class of ways/ runs.
        chunks: where chunks end.
        exact: the dtype of statistics and arithmetic.
        product_dtype: of matrix products.
        logits_dtype: of logits in memory, or of exponentials where there are never logits.
        sum_dtype: of the sums that become the weight's gradient.
        dweight_scale: factor of the sums that become the weight's gradient.
        buffer: elements of the memory for logits.
        sums_in_buffer: whether a chunk's exponentials leave memory in its logits' place for sums of dx.
        why: why this way.
        decided_at: file and line of the rule that chose it.
    """

    shape: Shape = field(repr=False)
    way: Way
    chunks: Chunks
    exact: torch.dtype
    product_dtype: torch.dtype
    logits_dtype: torch.dtype
    sum_dtype: torch.dtype
    dweight_scale: float
    buffer: int
    sums_in_buffer: bool
    why: str
    decided_at: str


class Rule(NamedTuple):
    """A row of `RULES`.

    Attributes:
        way: the class of ways/ that runs.
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
    if not (shape.is_readable and in_bf16 and is_v_times_e(shape)):
        return False
    assert shape.device is not None
    # A chunk's rows, where its length was given: under `batch_invariant` the way must not depend on the number of tokens.
    rows = shape.tokens if shape.options.chunk_tokens is None else shape.options.chunk_tokens
    return is_worth_it(rows, shape.width, shape.vocabulary, shape.device)


def is_v_times_e(shape: Shape) -> bool:
    """Whether kernels can make the gradient of the logits as a factor of the row times exponentials."""
    are_sorted = shape.vocabulary <= _MAX_SORTED_COLUMNS
    return shape.device is not None and are_sorted and shape.is_row_factor_times_exponentials


def saves_a_sweep(shape: Shape) -> bool:
    """Whether a gradient that is known after the row would otherwise be written in a second sweep over whole rows."""
    if shape.task is not Task.LOSS_AND_GRADIENTS or not is_v_times_e(shape):
        return False
    if shape.vocabulary > _MAX_EXPONENTIAL_COLUMNS:
        return False
    itemsize = shape.logits_dtype.itemsize
    if shape.options.group:  # a second sweep reads logits again; v multiplies sums of dx, in fp32, and x
        return shape.vocabulary * itemsize > shape.width * (itemsize + 3 * shape.x_dtype.itemsize)
    assert shape.device is not None
    both = ChunkShape(
        kernel=ChunkKernel.BOTH, width=shape.vocabulary, itemsize=itemsize, written_itemsize=shape.x_dtype.itemsize
    )
    return chunk_launch(both, shape.device).streams


def is_of_distributions(shape: Shape) -> bool:
    """Whether there are no losses."""
    return shape.is_of_distributions


def always(shape: Shape) -> bool:
    """Holds for every shape."""
    return True


# The first row that holds is taken. Chunks of KEPT_PRODUCT and PRODUCT come from `demands.of_product`; those of
# the other ways from `demands.of_logits`.
RULES = (
    rule(Way.DISTRIBUTIONS, Layout.ROWS, is_of_distributions, "outputs of distributions; whole rows fit"),
    rule(Way.DISTRIBUTIONS, Layout.COLUMNS, is_of_distributions, "outputs of distributions; few whole rows fit"),
    rule(Way.KEPT_PRODUCT, Layout.KEPT, can_multiply, "a kernel's product stores exponentials, and all of them are kept"),
    rule(Way.PRODUCT, Layout.ROWS, can_multiply, "a kernel's product stores exponentials of whole rows"),
    rule(Way.KEPT_EXPONENTIALS, Layout.KEPT, is_v_times_e, "the logits of all rows do not fit in one chunk; the gradient"
          " is v times E, a factor of each row times its exponentials"),
    rule(Way.KEPT_LOGITS, Layout.KEPT, always, "the logits of all rows do not fit in one chunk; the gradient is not v times"
          " E, a factor of each row times its exponentials (smoothing, argmax, fp16, a CPU, or more than 2^24 columns)"),
    rule(Way.COLUMNS, Layout.COLUMNS, always, "few whole rows fit at a time, and the weight's gradient cannot keep all"
          " logits (more tokens than columns of x, no such gradient, a bias, or an option)"),
    rule(Way.EXPONENTIALS, Layout.ROWS, saves_a_sweep, "whole rows fit; the gradient is v times E: one sweep, not two"),
    rule(Way.WHOLE_ROWS, Layout.ROWS, always, "whole rows fit, and the gradient takes the logits' place: it is more than v"
          " times E (smoothing, entropy, softcap, argmax, a bias's gradient, an adapter or fp16), or E would save no sweep"
          " (no gradients in this pass, statistics that an earlier pass computed, rows of one tile, on ranks short ones, or"
          " of more than 2^20 columns, or a CPU)"),
)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def choose(shape: Shape) -> Tiling:
    """The way, by `RULES`, and the chunks. Ranks that share a vocabulary cut tokens as an average rank does.

    Their ways may differ: each way exchanges once, at the end of a chunk of tokens.
    """
    average = _of_average_rank(shape) if shape.options.group else shape
    agreed = None if average == shape else choose(average).chunks
    plans = {False: _split(shape, demands.of_logits(shape), agreed)}
    if can_multiply(shape):
        plans[True] = _split(shape, demands.of_product(shape), agreed)
    for each in RULES:
        parts, sum_dtype = plans.get(each.way.multiplies, (None, None))
        if parts is not None and sum_dtype is not None and parts.layout is each.layout and each.holds(shape):
            return made(shape, each, parts, sum_dtype)
    raise AssertionError(f"no rule for {shape}")


def _of_average_rank(shape: Shape) -> Shape:
    """The shape of a rank with the average number of columns, whose tensors TMA can read: it is equal on all ranks."""
    columns = parallel.most_columns(shape.options, shape.vocabulary)
    return shape._replace(vocabulary=columns, is_readable=True, options=shape.options._replace(vocab_first=0))


def chunk_launch(shape: ChunkShape, device: Device) -> CudaLaunch | AscendLaunch:
    """Blocks of a launch over a chunk of logits. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return (cuda if device.kind == "cuda" else ascend).chunk_launch(shape, device)


def smaller(launch: CudaLaunch | AscendLaunch) -> AscendLaunch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    return ascend.smaller(launch) if isinstance(launch, AscendLaunch) else None


def _split(shape: Shape, demand: Demand, agreed: Chunks | None) -> tuple[Chunks, torch.dtype]:
    """Chunks, and the dtype of the sums that become the weight's gradient."""
    parts, sum_dtype = _split_within(shape, demand, shape.options.chunk_tokens, shape.options.memory_budget)
    if agreed is None or parts.tokens == agreed.tokens:
        return parts, sum_dtype
    budget = shape.options.memory_budget
    if budget is None and agreed.layout is not Layout.ROWS:
        budget = splitting.budget_of(None, shape.device)  # without a budget, chunks of a given length take whole rows
    parts, sum_dtype = _split_within(shape, demand, agreed.longest[0], budget)
    why = f"ranks cut tokens alike, as for the average of their columns: {agreed.why}"
    return dataclasses.replace(parts, tokens=agreed.tokens, why=why), sum_dtype


def _split_within(
    shape: Shape, demand: Demand, chunk_tokens: int | None, memory_budget: int | None
) -> tuple[Chunks, torch.dtype]:
    limits = (chunk_tokens, memory_budget, shape.device)
    if shape.options.accum_dtype is not None:
        return splitting.split(demand, *limits), shape.options.accum_dtype
    parts, in_fp32 = splitting.split_and_sum(demand, *limits)
    return parts, statistics_dtype(shape.x_dtype) if in_fp32 or shape.frozen_width else shape.weight_dtype


def made(shape: Shape, rule: Rule, parts: Chunks, sum_dtype: torch.dtype) -> Tiling:
    """The tiling of a rule, with its chunks and the dtype of the sums that become the weight's gradient."""
    multiplies, (tokens, columns) = rule.way.multiplies, parts.longest
    if shape.device is not None and shape.device.kind == "ascend":  # whose programs read whole tiles of rows
        tokens = ceil(tokens / ROWS) * ROWS
    stores = shape.needs.dx or shape.needs.dweight or not multiplies
    return Tiling(
        shape=shape,
        way=rule.way,
        chunks=parts,
        exact=statistics_dtype(shape.x_dtype),
        product_dtype=shape.logits_dtype,
        logits_dtype=shape.x_dtype if multiplies else shape.logits_dtype,
        sum_dtype=sum_dtype,
        dweight_scale=_scale_of_sums(shape),
        buffer=tokens * chunks.pitch(columns) if stores else 0,
        sums_in_buffer=rule.way is Way.EXPONENTIALS and demands.has_room_for_sums(shape),
        why=rule.why,
        decided_at=rule.decided_at,
    )


def _scale_of_sums(shape: Shape) -> float:
    """The factor of sums that become the weight's gradient: a power of two, below 1 where gradients are left unfinished."""
    scale = 1.0
    while shape.unfinished and scale > _MAX_SUM_OVER_MEAN / max(1, shape.tokens):
        scale /= 2.0
    return scale
