"""The gradient's launches on CUDA: what brings the indices of a row together, sums and zeros, partial sums."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.budget.arithmetic import INT32_END
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from ..both.tiling import Way
from ..cuda.tiling import (
    GROUP,
    mark_launch,
    partials_launch,
    rank_launch,
    search_launch,
    sort_launch,
    sums_launch,
)
from ..shape import NO_ROW
from .specs import KERNELS, index_spec, row_spec


class Sorted(NamedTuple):
    """Indices [n], sorted by row of the table.

    Attributes:
        rows: [n], ascending.
        order: [n], where each stood.
        marks: int8, for each row of the table whether an index names it.
        inside: int32 [1], how many of `rows` have a gradient: the first ones.
    """

    rows: Tensor
    order: Tensor
    marks: Tensor
    inside: Tensor


def backward(
    dweight: Tensor,
    dy: Tensor,
    indices: Tensor,
    way: Way,
    padding: int,
    scale_by_count: bool,
    first_row: int,
    device: Device,
) -> None:
    """Writes dweight [n_rows, D], for indices [n] into the rows from `first_row` on. Row `padding` is zeros."""
    if way is Way.SEARCHED:
        _sum_searched(dweight.zero_(), dy, indices, padding, scale_by_count, first_row, device)
    else:
        sort = _ranked if way is Way.RANKED else _sorted
        _sum_sorted(dweight, dy, sort(indices, dweight.shape[0], padding, first_row, device), scale_by_count, device)


def sum_slots(values: Tensor, dy: Tensor, slot: Tensor, order: Tensor, scale_by_count: bool, device: Device) -> None:
    """Writes values [n, D]: row r is the sum of dy's rows at `order`, where `slot` [n] is r; zeros where it never is."""
    n = values.shape[0]
    marks = _mark_rows(slot, None, n, NO_ROW, 0, device)
    inside = (slot < n).sum(dtype=torch.int32)
    _sum_sorted(values, dy, Sorted(slot, order, marks, inside), scale_by_count, device)


def _ranked(indices: Tensor, n_rows: int, padding: int, first_row: int, device: Device) -> Sorted:
    """Sorted by the kernels of cuda/rank.py."""
    n = indices.numel()
    sort, rank = index_spec(sort_launch, device), index_spec(rank_launch, device)
    groups = ceil(n / GROUP)
    scratch = allocate(indices, (groups * 2 * GROUP,), torch.int32)
    rows, order = allocate(indices, (2, ceil(n / 4) * 4), torch.int32).unbind()
    marks = allocate(indices, (n_rows,), torch.int8)
    inside = allocate(indices, (1,), torch.int32)
    tensors: tuple[Tensor, ...] = (indices, scratch, marks)
    scalars = (n, n_rows, first_row, padding)
    KERNELS.launch("cuda.rank", "sort_groups_kernel", sort, sort.launch.grid(groups * GROUP), tensors, scalars)
    tensors = (scratch, rows, order, marks, inside)
    KERNELS.launch("cuda.rank", "rank_groups_kernel", rank, rank.launch.grid(groups * GROUP), tensors, (groups, n_rows))
    return Sorted(rows[:n], order, marks, inside)


def _sorted(indices: Tensor, n_rows: int, padding: int, first_row: int, device: Device) -> Sorted:
    """Sorted by torch.sort."""
    # 32 bits are half the passes of a radix sort.
    keys = allocate(indices, indices.shape, torch.int32 if n_rows < INT32_END else torch.int64)
    marks = _mark_rows(indices, keys, n_rows, padding, first_row, device)
    inside = (keys < n_rows).sum(dtype=torch.int32)
    rows, order = torch.sort(keys, stable=True)
    return Sorted(rows, order, marks, inside)


def _mark_rows(indices: Tensor, keys: Tensor | None, n_rows: int, padding: int, first_row: int, device: Device) -> Tensor:
    """Marks [n_rows] of the rows that `indices` name; `keys`, where they are asked for, to sort by."""
    marks = torch.zeros(n_rows, dtype=torch.int8, device=indices.device)
    n = indices.numel()
    spec = index_spec(mark_launch, device, "KEYS", keys is not None)
    tensors, scalars = (indices, keys, marks), (n, n_rows, first_row, padding)
    KERNELS.launch("cuda.rank", "mark_rows_kernel", spec, spec.launch.grid(n), tensors, scalars)
    return marks


def _sum_sorted(dweight: Tensor, dy: Tensor, indices: Sorted, scale_by_count: bool, device: Device) -> None:
    """Writes the sums of the rows that have a gradient, and zeros in those that have no mark."""
    (n_rows, width), itemsize = dweight.shape, dweight.dtype.itemsize
    spec = row_spec(sums_launch, width, itemsize, device, "SCALE_BY_COUNT", scale_by_count)
    chunks = spec.launch.chunks(indices.rows.numel())
    partials = allocate(dy, (2, chunks, width), torch.float32)
    sums = chunks * spec.launch.column_blocks
    zeros = spec.launch.zeros(n_rows, sums)
    tensors: tuple[Tensor, ...] = (dy, indices.order, indices.rows, indices.inside, indices.marks, dweight, partials)
    scalars = (chunks, n_rows, zeros, dy.stride(0))
    KERNELS.launch("cuda.sums", "sum_sorted_kernel", spec, sums * (zeros + 1), tensors, scalars)
    if chunks > 1:
        spec = row_spec(partials_launch, width, itemsize, device, "SCALE_BY_COUNT", scale_by_count)
        tensors = (partials, indices.rows, indices.inside, dweight)
        KERNELS.launch("cuda.sums", "add_partials_kernel", spec, spec.launch.grid(chunks - 1), tensors, (chunks,))


def _sum_searched(
    dweight: Tensor, dy: Tensor, indices: Tensor, padding: int, scale_by_count: bool, first_row: int, device: Device
) -> None:
    """Adds to a table of zeros the rows that few indices [n] name."""
    (n_rows, width), n = dweight.shape, indices.numel()
    spec = row_spec(search_launch, width, dy.dtype.itemsize, device, "SCALE_BY_COUNT", scale_by_count)
    grid, scalars = n * spec.launch.column_blocks, (n, n_rows, first_row, padding, dy.stride(0))
    KERNELS.launch("cuda.search", "sum_searched_kernel", spec, grid, (dy, indices, dweight), scalars)
