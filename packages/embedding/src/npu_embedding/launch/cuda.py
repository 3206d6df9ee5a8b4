"""The gradient's launches on CUDA: what brings the indices of a row together, sums and zeros, partial sums."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from npu_tiling.budget.arithmetic import INT32_END
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from ..both.tiling import Way
from ..cuda import tiling
from ..shape import NO_ROW
from .specs import KERNELS, Gradient, index_spec, row_spec

_UNIT = 4  # int32 that begin at a multiple of 16 bytes, which Triton's kernels are compiled for


class Sorted(NamedTuple):
    """Indices [n], sorted by row of the table.

    Attributes:
        rows: [n] or longer, ascending.
        order: [n] or longer, where each stood.
        marks: int8, for each row of the table whether an index names it.
        inside: int32, the first of which says how many of `rows` have a gradient: the first ones.
    """

    rows: Tensor
    order: Tensor
    marks: Tensor
    inside: Tensor


def backward(dweight: Tensor, gradient: Gradient, way: Way) -> None:
    """Writes dweight [n_rows, D]."""
    if way is Way.SEARCHED:
        _sum_searched(dweight, gradient)
    else:
        _sum_sorted(dweight, gradient, _ranked(gradient) if way is Way.RANKED else _sorted(gradient))


def sum_slots(values: Tensor, gradient: Gradient, slot: Tensor, order: Tensor) -> None:
    """Writes values [n, D]: row r is the sum of dy's rows at `order`, where `slot` [n] is r; zeros where it never is."""
    marks, inside = _mark_rows(gradient._replace(indices=slot, n_rows=values.shape[0], padding=NO_ROW, first_row=0), None)
    _sum_sorted(values, gradient, Sorted(slot, order, marks, inside))


def _sum_searched(dweight: Tensor, gradient: Gradient) -> None:
    """Writes dweight in one launch."""
    (n_rows, width), dy = dweight.shape, gradient.dy
    options, by_count = (width, dy.dtype.itemsize, gradient.device), gradient.scale_by_count
    spec = row_spec(tiling.search_launch, *options, SCALE_BY_COUNT=by_count, IN_PARTS=gradient.in_parts)
    sums = gradient.indices.numel() * spec.launch.column_blocks
    zeros = ceil(n_rows / spec.launch.per_program)  # programs that store them
    tensors, scalars = (dy, gradient.indices, dweight), (*gradient.numbers, *gradient.dy_strides)
    KERNELS.launch("cuda.search", "sum_searched_kernel", spec, sums + zeros, tensors, scalars)


def _ranked(gradient: Gradient) -> Sorted:
    """Sorted by the kernels of cuda/rank.py."""
    indices, n_rows, n = gradient.indices, gradient.n_rows, gradient.indices.numel()
    stages = tiling.rank_stages(n)
    places = ceil(n / stages[0].places) * stages[0].places
    room = (_UNIT, 2 * places, 2 * places)
    inside, runs, others = allocate(indices, (sum(room),), torch.int32).split(room)
    marks = allocate(indices, (n_rows,), torch.int8)
    spec = index_spec(tiling.sort_launch, gradient.device)
    grid = spec.launch.grid(places)
    KERNELS.launch("cuda.rank", "sort_groups_kernel", spec, grid, (indices, runs, marks), gradient.numbers)
    for stage in stages:
        spec = index_spec(stage.launch, gradient.device)
        tensors, scalars = (runs, others, marks, inside), (places // stage.run, n_rows)
        KERNELS.launch("cuda.rank", "rank_runs_kernel", spec, spec.launch.grid(places), tensors, scalars)
        runs, others = others, runs
    return Sorted(runs[:places], runs[places:], marks, inside)


def _sorted(gradient: Gradient) -> Sorted:
    """Sorted by torch.sort."""
    # 32 bits are half the passes of a radix sort.
    dtype = torch.int32 if gradient.n_rows < INT32_END else torch.int64
    keys = allocate(gradient.indices, gradient.indices.shape, dtype)
    marks, inside = _mark_rows(gradient, keys)
    return Sorted(*torch.sort(keys, stable=True), marks, inside)


def _mark_rows(gradient: Gradient, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """`marks` and `inside` of `Sorted`; writes `keys`, where they are asked for, to sort by."""
    indices, n_rows = gradient.indices, gradient.n_rows
    zeros = torch.zeros(_UNIT + ceil(n_rows / torch.int32.itemsize), dtype=torch.int32, device=indices.device)
    marks, inside = zeros[_UNIT:].view(torch.int8)[:n_rows], zeros[:1]
    spec = index_spec(tiling.mark_launch, gradient.device, (("KEYS", keys is not None),))
    grid = spec.launch.grid(indices.numel())
    KERNELS.launch("cuda.rank", "mark_rows_kernel", spec, grid, (indices, keys, marks, inside), gradient.numbers)
    return marks, inside


def _sum_sorted(dweight: Tensor, gradient: Gradient, indices: Sorted) -> None:
    """Writes the sums of the rows that have a gradient, and zeros in those that have no mark."""
    (n_rows, width), dy = dweight.shape, gradient.dy
    options, by_count = (width, dy.dtype.itemsize, gradient.device), gradient.scale_by_count
    spec = row_spec(tiling.sums_launch, *options, SCALE_BY_COUNT=by_count, IN_PARTS=gradient.in_parts)
    chunks = tiling.chunks(spec.launch, gradient.indices.numel())
    partials = allocate(dy, (2, chunks, width), torch.float32)
    sums = chunks * spec.launch.column_blocks
    zeros = ceil(n_rows / spec.launch.per_program)  # programs that store them
    tensors: tuple[Tensor, ...] = (dy, indices.order, indices.rows, indices.inside, indices.marks, dweight, partials)
    scalars = (chunks, n_rows, *gradient.dy_strides)
    KERNELS.launch("cuda.sums", "sum_sorted_kernel", spec, sums + zeros, tensors, scalars)
    if chunks > 1:
        spec = row_spec(tiling.partials_launch, *options, SCALE_BY_COUNT=by_count)
        tensors = (partials, indices.rows, indices.inside, dweight)
        KERNELS.launch("cuda.sums", "add_partials_kernel", spec, spec.launch.grid(chunks - 1), tensors, (chunks,))
