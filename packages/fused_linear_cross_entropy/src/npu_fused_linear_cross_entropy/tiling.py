"""The decision how a loss is computed: `Shape` -> `Tiling`, a way and the chunks of tokens and vocabulary that it takes."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from enum import Enum
from math import ceil
from pathlib import Path

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import statistics_dtype

from . import chunks
from .ascend import tiling as ascend
from .ascend.tiling import AscendLaunch
from .both.tiling.chunks import ROWS, ChunkKernel, ChunkShape
from .chunks import Chunks, Demand
from .cuda import tiling as cuda
from .cuda.tiling import CudaLaunch, ProductLaunch, is_worth_it
from .shape import Shape, Task

# fp16 sums over tokens are scaled to at most this many times their mean. A mean is at most as large as x, and in a
# vocabulary of 2^15 as small as x / 2^15 / sqrt(tokens): both are within fp16's range if elements of x are at most 255.
_MAX_SUM_OVER_MEAN = 256.0
_ROW_NUMBERS = 16  # of each row: statistics, coefficients, references, v
_MAX_EXPONENTIAL_COLUMNS = 2**20  # a kernel notes a number for each tile of a row


class Way(Enum):
    """How statistics of rows, and the gradient of the logits g, come about. ways/ has a class for each."""

    WHOLE_ROWS = "logits -> statistics and g in their place -> dx = g W, dW += g^T x"
    EXPONENTIALS = "logits -> statistics and exponentials E in their place -> v of each row -> dx = v (E W), dW += E^T (v x)"
    PRODUCT = "the same, with E out of the product itself: there are no logits"
    KEPT_LOGITS = (
        "logits of some columns -> statistics, logits kept in dW's memory -> g in their place -> dx = g W, dW = g^T x"
    )
    KEPT_EXPONENTIALS = "the same with E kept -> v of each row -> dx = v (E W), dW = (v E)^T x"
    KEPT_PRODUCT = "the same, with E out of the product itself"
    COLUMNS = "logits of some columns -> statistics; logits again -> g -> dx += g W, dW = g^T x"

    @property
    def keeps(self) -> bool:
        """Whether something of each logit is kept in the memory of the weight's gradient."""
        return self in (Way.KEPT_LOGITS, Way.KEPT_EXPONENTIALS, Way.KEPT_PRODUCT)

    @property
    def multiplies(self) -> bool:
        """Whether a kernel of ours multiplies x and the weight."""
        return self in (Way.PRODUCT, Way.KEPT_PRODUCT)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a loss is computed.

    Attributes:
        shape: what it was made for.
        way: which class of ways/ runs.
        chunks: where chunks end.
        exact: the dtype of statistics and arithmetic.
        product_dtype: of matrix products.
        logits_dtype: of logits in memory, or of exponentials where there are never logits.
        sum_dtype: of the sums that become the weight's gradient.
        dweight_scale: factor of those sums.
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


@functools.lru_cache(maxsize=1024)
def choose(shape: Shape) -> Tiling:
    """The way and the chunks: the first rule that holds."""
    if _can_multiply(shape):
        parts, sum_dtype = _split(shape, _product_demand(shape))
        if parts.kept:
            return _product(
                shape, Way.KEPT_PRODUCT, parts, sum_dtype, why="a kernel's product stores exponentials, all kept"
            )
        if len(parts.columns) <= 1:
            return _product(shape, Way.PRODUCT, parts, sum_dtype, why="a kernel's product stores exponentials of whole rows")
    demand = _logits_demand(shape)
    parts, sum_dtype = _split(shape, demand)
    exponentials = shape.device is not None and shape.is_row_factor_times_exponentials
    if parts.kept and exponentials:
        return _logits(shape, Way.KEPT_EXPONENTIALS, parts, sum_dtype, why="too many logits at once; g is a factor times E")
    if parts.kept:
        return _logits(shape, Way.KEPT_LOGITS, parts, sum_dtype, why="too many logits at once; options need more than E")
    if len(parts.columns) > 1:
        return _logits(shape, Way.COLUMNS, parts, sum_dtype, why="too many logits at once, and no place to keep them")
    if exponentials and shape.task is Task.LOSS_AND_GRADIENTS and _saves_a_sweep(shape):
        return _logits(shape, Way.EXPONENTIALS, parts, sum_dtype, why="g is a factor times E, which saves a second sweep")
    return _logits(
        shape, Way.WHOLE_ROWS, parts, sum_dtype, why="the logits of whole rows are in memory, and g takes their place"
    )


def chunk_launch(shape: ChunkShape, device: Device) -> CudaLaunch | AscendLaunch:
    """Blocks of a launch over a chunk of logits. Raises `npu_tiling.UnifiedBufferError` where nothing fits."""
    return (cuda if device.kind == "cuda" else ascend).chunk_launch(shape, device)


def smaller(launch: CudaLaunch | AscendLaunch) -> AscendLaunch | None:
    """The next smaller launch for a compiler that needs more Unified Buffer than was declared; None at the end."""
    return ascend.smaller(launch) if isinstance(launch, AscendLaunch) else None


def _can_multiply(shape: Shape) -> bool:
    """Whether a kernel's product of x and the weight can store exponentials, and is faster than PyTorch's and a sweep."""
    in_bf16 = shape.x_dtype == torch.bfloat16 and shape.bias_dtype is None
    if not (shape.is_readable and in_bf16 and shape.device is not None and shape.is_row_factor_times_exponentials):
        return False
    rows = shape.tokens if shape.options.chunk_tokens is None else shape.options.chunk_tokens
    return is_worth_it(rows, shape.width, shape.vocabulary, shape.device)


def _saves_a_sweep(shape: Shape) -> bool:
    """Whether a gradient that is known after the row would be written in a second sweep over whole rows."""
    assert shape.device is not None
    if shape.vocabulary > _MAX_EXPONENTIAL_COLUMNS:
        return False
    if shape.options.group:  # the statistics of a row are known when all ranks have exchanged theirs
        return True
    itemsize = _logits_dtype(shape).itemsize
    both = ChunkShape(
        kernel=ChunkKernel.BOTH, width=shape.vocabulary, itemsize=itemsize, written_itemsize=shape.x_dtype.itemsize
    )
    return chunk_launch(both, shape.device).streams


def _logits_dtype(shape: Shape) -> torch.dtype:
    return statistics_dtype(shape.x_dtype) if shape.writes_fp32 else shape.x_dtype


def _has_room_for_sums(shape: Shape) -> bool:
    """Whether exponentials leave half of each row of logits to sums of dx, [tokens, H]."""
    halves = 2 * shape.x_dtype.itemsize == _logits_dtype(shape).itemsize
    return halves and 2 * shape.width <= chunks.pitch(shape.vocabulary)


def _given_sum_dtype(shape: Shape) -> torch.dtype:
    return shape.options.accum_dtype or shape.weight_dtype


def _kept_bytes(shape: Shape) -> int:
    """Bytes of a logit, or of its exponential, in the memory of the weight's gradient; 0 if none may be there."""
    keeps = shape.needs.dweight and shape.bias_dtype is None and shape.options.shift_invariant
    return shape.x_dtype.itemsize if keeps else 0


def _logits_demand(shape: Shape) -> Demand:
    """What is in memory where PyTorch's product writes logits."""
    dtype, exact, logits = shape.x_dtype, statistics_dtype(shape.x_dtype), _logits_dtype(shape)
    once = shape.device is not None and shape.is_row_factor_times_exponentials
    sums = exact.itemsize if shape.needs.dx and logits != dtype else 0
    return Demand(
        tokens=shape.tokens,
        width=shape.width,
        vocabulary=shape.vocabulary,
        logit_bytes=logits.itemsize,
        dweight_bytes=_given_sum_dtype(shape).itemsize if shape.needs.dweight else 0,
        dx=shape.needs.dx and dtype.itemsize < exact.itemsize,
        kept_bytes=_kept_bytes(shape),
        scaled_bytes=shape.width * (dtype.itemsize + sums) if once and not _has_room_for_sums(shape) else 0,
    )


def _product_demand(shape: Shape) -> Demand:
    """What is in memory where a kernel's product writes exponentials, if it writes any."""
    assert shape.device is not None
    dtype, exact, needs = shape.x_dtype, statistics_dtype(shape.x_dtype), shape.needs
    is_stored = needs.dx or needs.dweight
    sums = exact.itemsize if needs.dx and _logits_dtype(shape) != dtype else 0
    tiles = ProductLaunch(width=shape.width, device=shape.device).column_tiles(shape.vocabulary)
    return Demand(
        tokens=shape.tokens,
        width=shape.width,
        vocabulary=shape.vocabulary,
        logit_bytes=dtype.itemsize if is_stored else 0,
        dweight_bytes=_given_sum_dtype(shape).itemsize if needs.dweight else 0,
        dx=needs.dx,
        kept_bytes=_kept_bytes(shape),
        scaled_bytes=shape.width * (dtype.itemsize + sums) if is_stored else 0,
        sum_bytes=(tiles + _ROW_NUMBERS) * exact.itemsize,
        length_factor=2,
    )


def _split(shape: Shape, demand: Demand) -> tuple[Chunks, torch.dtype]:
    """Chunks, and the dtype of the sums that become the weight's gradient."""
    limits = (shape.options.chunk_tokens, shape.options.memory_budget, shape.device)
    if shape.options.accum_dtype is not None:
        return chunks.split(demand, *limits), shape.options.accum_dtype
    parts, in_fp32 = chunks.split_and_sum(demand, *limits)
    return parts, statistics_dtype(shape.x_dtype) if in_fp32 else shape.weight_dtype


def _product(shape: Shape, way: Way, parts: Chunks, sum_dtype: torch.dtype, *, why: str) -> Tiling:
    is_stored = shape.needs.dx or shape.needs.dweight
    tokens, columns = parts.longest
    return Tiling(
        shape=shape,
        way=way,
        chunks=parts,
        exact=statistics_dtype(shape.x_dtype),
        product_dtype=_logits_dtype(shape),
        logits_dtype=shape.x_dtype,
        sum_dtype=sum_dtype,
        dweight_scale=1.0,
        buffer=tokens * chunks.pitch(columns) if is_stored else 0,
        sums_in_buffer=False,
        why=why,
        decided_at=_caller(),
    )


def _logits(shape: Shape, way: Way, parts: Chunks, sum_dtype: torch.dtype, *, why: str) -> Tiling:
    tokens, columns = parts.longest
    if shape.device is not None and shape.device.kind == "ascend":  # whose programs read whole tiles of rows
        tokens = ceil(tokens / ROWS) * ROWS
    logits = _logits_dtype(shape)
    return Tiling(
        shape=shape,
        way=way,
        chunks=parts,
        exact=statistics_dtype(shape.x_dtype),
        product_dtype=logits,
        logits_dtype=logits,
        sum_dtype=sum_dtype,
        dweight_scale=_power_of_two(_MAX_SUM_OVER_MEAN / max(1, shape.tokens)) if shape.unfinished else 1.0,
        buffer=tokens * chunks.pitch(columns),
        sums_in_buffer=_has_room_for_sums(shape),
        why=why,
        decided_at=_caller(),
    )


def _caller() -> str:
    """File and line of the rule that made a tiling."""
    frame = sys._getframe(2)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _power_of_two(limit: float) -> float:
    """The largest power of two that is at most `limit`, and at most 1."""
    scale = 1.0
    while scale > limit:
        scale /= 2.0
    return scale
