"""What of a loss follows from shapes, dtypes and options: chunks, and the dtypes of logits and sums."""

from __future__ import annotations

import functools
from math import ceil
from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from . import chunks, tiling
from .options import Needs, Options
from .tiling.problem import ROWS
from .tiling.product import ProductLaunch, is_worth_it

# fp16 sums over tokens are scaled to at most this many times their mean. A mean is at most as large as x, and in a
# vocabulary of 2^15 as small as x / 2^15 / sqrt(tokens): both are within fp16's range if elements of x are at most 255.
_LARGEST_SUM = 256.0
_ROW_NUMBERS = 16  # of each row: statistics, coefficients, references, v
_WIDEST = 2**20  # columns: one sweep notes a number for each tile of a row


def defers(x: Tensor, class_weight: Tensor | None, options: Options) -> bool:
    """Whether the forward leaves factors of the gradients to the backward (see `row_math.prepare`)."""
    return x.dtype == torch.float16 and (options.reduction == "mean" or class_weight is not None)


class Layout(NamedTuple):
    """Everything of a loss that follows from shapes, dtypes and options: computed once, then looked up.

    Attributes:
        plan: where chunks end.
        exact: the dtype of statistics and arithmetic.
        product_dtype: of matrix products.
        logits_dtype: of logits in memory, or of exponentials where there are never logits.
        sum_dtype: of the sums that become the weight's gradient.
        dweight_scale: factor of those sums.
        buffer: elements of the memory for logits.
        exponentials: whether kernels write exponentials, which factors of rows make the gradient of the logits.
        room: whether a chunk's exponentials leave room in its logits' memory for sums of dx.
        fused: whether the product of x and the weight itself makes exponentials, and no logits.
    """

    plan: chunks.Plan
    exact: torch.dtype
    product_dtype: torch.dtype
    logits_dtype: torch.dtype
    sum_dtype: torch.dtype
    dweight_scale: float
    buffer: int
    exponentials: bool
    room: bool
    fused: bool


@functools.lru_cache(maxsize=1024)
def choose_layout(
    shape: tuple[int, int],
    vocabulary: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    options: Options,
    needs: Needs,
    deferred: bool,
    writes_fp32: bool,
    readable: bool,
    device: Device | None,
) -> Layout:
    """The layout for x of a shape [N, H].

    Args:
        writes_fp32: whether products of x's dtype can be fp32.
        readable: whether kernels can multiply these tensors (see launch/product.py).
    """
    in_bf16 = x_dtype == torch.bfloat16 and bias_dtype is None
    if readable and in_bf16 and device is not None and _in_one_sweep(x_dtype, options, needs):
        rows = shape[0] if options.chunk_tokens is None else options.chunk_tokens
        if is_worth_it(rows, shape[1], vocabulary, device):
            layout = _fused(shape, vocabulary, x_dtype, weight_dtype, options, needs, writes_fp32, device)
            if len(layout.plan.columns) <= 1 or layout.plan.kept:
                return layout
    tokens, width = shape
    exact = statistics_dtype(x_dtype)
    logits_dtype = exact if writes_fp32 else x_dtype
    sum_dtype = weight_dtype if options.accum_dtype is None else options.accum_dtype
    once = device is not None and _in_one_sweep(x_dtype, options, needs)
    room = 2 * x_dtype.itemsize == logits_dtype.itemsize and 2 * width <= chunks.pitch(vocabulary)
    wide = exact.itemsize if needs.dx and logits_dtype != x_dtype else 0
    problem = chunks.Problem(
        tokens,
        width,
        vocabulary,
        logits_dtype.itemsize,
        sum_dtype.itemsize if needs.dweight else 0,
        needs.dx and x_dtype.itemsize < exact.itemsize,
        x_dtype.itemsize if needs.dweight and bias_dtype is None and options.shift_invariant else 0,
        width * (x_dtype.itemsize + wide) if once and not room else 0,
    )
    limits = (options.chunk_tokens, options.memory_budget, device)
    if options.accum_dtype is None:
        plan, wide = chunks.plan_sums(problem, *limits)
        sum_dtype = exact if wide else sum_dtype
    else:
        plan = chunks.plan(problem, *limits)
    scale = _power_of_two(_LARGEST_SUM / max(1, tokens)) if deferred else 1.0
    longest, columns = plan.longest
    if once and not plan.kept:
        once = len(plan.columns) == 1 and (bool(options.group) or _is_swept_twice(vocabulary, logits_dtype, x_dtype, device))
    # Programs on Ascend read whole tiles of rows.
    rows = ceil(longest / ROWS) * ROWS if device is not None and device.kind == "ascend" else longest
    memory = rows * chunks.pitch(columns)
    return Layout(plan, exact, logits_dtype, logits_dtype, sum_dtype, scale, memory, once, room, False)


def _fused(
    shape: tuple[int, int],
    vocabulary: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    options: Options,
    needs: Needs,
    writes_fp32: bool,
    device: Device,
) -> Layout:
    """The layout where the product makes exponentials; several columns of the plan: there is no memory for whole rows."""
    (tokens, width), exact = shape, statistics_dtype(dtype)
    product_dtype = exact if writes_fp32 else dtype
    stored, tiles = needs.dx or needs.dweight, ProductLaunch(width, device).column_tiles(vocabulary)
    sums = exact.itemsize if needs.dx and product_dtype != dtype else 0
    problem = chunks.Problem(
        tokens,
        width,
        vocabulary,
        dtype.itemsize if stored else 0,
        (options.accum_dtype or weight_dtype).itemsize if needs.dweight else 0,
        needs.dx,
        dtype.itemsize if needs.dweight and options.shift_invariant else 0,
        width * (dtype.itemsize + sums) if stored else 0,
        (tiles + _ROW_NUMBERS) * exact.itemsize,
        longer=2,
    )
    limits = (options.chunk_tokens, options.memory_budget, device)
    if options.accum_dtype is None:
        plan, wide = chunks.plan_sums(problem, *limits)
        sum_dtype = exact if wide else weight_dtype
    else:
        plan, sum_dtype = chunks.plan(problem, *limits), options.accum_dtype
    longest, columns = plan.longest
    memory = longest * chunks.pitch(columns) if stored else 0
    return Layout(plan, exact, product_dtype, dtype, sum_dtype, 1.0, memory, True, False, True)


def _in_one_sweep(dtype: torch.dtype, options: Options, needs: Needs) -> bool:
    """Whether the gradient of the logits is a row's factor times exponentials, in a dtype with fp32's range."""
    other = options.softcap is not None or options.return_entropy or options.smoothed or options.argmax or needs.dbias
    return not other and dtype != torch.float16


def _is_swept_twice(vocabulary: int, logits: torch.dtype, written: torch.dtype, device: Device | None) -> bool:
    """Whether a gradient that is known after the row would be written in a second sweep."""
    assert device is not None
    problem = tiling.Problem(vocabulary, logits.itemsize, written.itemsize, True)
    return vocabulary <= _WIDEST and tiling.streams(problem, device)


def _power_of_two(limit: float) -> float:
    """The largest power of two that is at most `limit`, and at most 1."""
    scale = 1.0
    while scale > limit:
        scale /= 2.0
    return scale
