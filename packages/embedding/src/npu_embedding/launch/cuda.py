"""The backward's launches on CUDA: what brings equal indices together, and the sums."""

from __future__ import annotations

from math import ceil

import torch
from npu_tiling import Device
from npu_tiling.budget.arithmetic import INT32_END
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from .specs import KERNELS, index_spec, rows_side_by_side, spec_of

FEW = 256  # indices that each program of a launch looks through, instead of a sort
MOST_RANKED = 65536  # indices that two launches of ours sort; past that torch.sort is faster
MOST_ROWS = 2**30  # of a table whose rows those launches count in 32 bits


def backward(
    dweight: Tensor, dy: Tensor, indices: Tensor, padding: int, scale_by_count: bool, first: int, device: Device
) -> None:
    """Writes dweight [n_rows, D], for indices [n] into the rows from `first` on. Row `padding`, if not -1, is zeros."""
    n_rows, n = dweight.shape[0], indices.numel()
    if n <= FEW:
        sum_few(dweight.zero_(), dy, indices, padding, scale_by_count, first, device)
    elif n <= MOST_RANKED and n_rows <= MOST_ROWS:
        ordered, order, marks, inside = rank_rows(indices, n_rows, padding, first, device)
        sum_sorted(dweight, dy, ordered, order, marks, inside, scale_by_count, device)
    else:
        # 32 bits are half the passes of a radix sort.
        keys = allocate(indices, indices.shape, torch.int32 if n_rows < INT32_END else torch.int64)
        marks = mark_rows(indices, keys, n_rows, padding, first, device)
        inside = (keys < n_rows).sum(dtype=torch.int32)
        ordered, order = torch.sort(keys, stable=True)
        sum_sorted(dweight, dy, ordered, order, marks, inside, scale_by_count, device)


def sum_slots(out: Tensor, dy: Tensor, ordered: Tensor, order: Tensor, scale_by_count: bool, device: Device) -> None:
    """Writes out [n, D]: row r is the sum of dy's rows at `order`, where `ordered` [n] is r; zeros where it never is."""
    marks = mark_rows(ordered, None, out.shape[0], -1, 0, device)
    inside = (ordered < out.shape[0]).sum(dtype=torch.int32)
    sum_sorted(out, dy, ordered, order, marks, inside, scale_by_count, device)


def rank_rows(
    indices: Tensor, n_rows: int, padding: int, first: int, device: Device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys of indices [n] in ascending order, where each stood, and the marks: see kernels/rank.py."""
    n = indices.numel()
    sort, rank = index_spec(tiling.sort_launch, device), index_spec(tiling.rank_launch, device)
    groups = ceil(n / sort.launch.group)
    scratch = allocate(indices, (groups * 2 * sort.launch.group,), torch.int32)
    ordered, order = allocate(indices, (2, ceil(n / 4) * 4), torch.int32).unbind()
    marks = allocate(indices, (n_rows,), torch.int8)
    inside = allocate(indices, (1,), torch.int32)
    scalars = (n, n_rows, first, padding)
    KERNELS.launch("kernels.rank", "sort_groups_kernel", sort, sort.launch.grid(groups), (indices, scratch, marks), scalars)
    tensors = (scratch, ordered, order, marks, inside)
    KERNELS.launch("kernels.rank", "rank_groups_kernel", rank, rank.launch.grid(groups), tensors, (groups, n_rows))
    return ordered[:n], order, marks, inside


def sum_sorted(
    dweight: Tensor,
    dy: Tensor,
    ordered: Tensor,
    order: Tensor,
    marks: Tensor,
    inside: Tensor,
    scale_by_count: bool,
    device: Device,
) -> None:
    """Writes the rows r of which the first `inside` of `ordered` has one, and zeros in those that have no mark."""
    (n_rows, width), itemsize, n = dweight.shape, dweight.dtype.itemsize, ordered.numel()
    rows = rows_side_by_side(dy.reshape(-1, width))
    flags = (("SCALE_BY_COUNT", scale_by_count),)
    spec = spec_of(tiling.sums_launch, width, itemsize, device, flags)
    chunks = spec.launch.chunks(n)
    partials = allocate(dy, (2, chunks, width), torch.float32)
    tensors = (rows, order, ordered, inside, marks, dweight, partials)
    sums = chunks * spec.launch.column_blocks
    zeros = spec.launch.zeros(n_rows, sums)
    scalars = (chunks, n_rows, zeros, rows.stride(0))
    KERNELS.launch("kernels.cuda", "sum_sorted_kernel", spec, sums * (zeros + 1), tensors, scalars)
    if chunks > 1:
        spec = spec_of(tiling.partials_launch, width, itemsize, device, flags)
        grid = spec.launch.grid(chunks)
        KERNELS.launch("kernels.cuda", "add_partials_kernel", spec, grid, (partials, ordered, inside, dweight), (chunks,))


def sum_few(
    dweight: Tensor, dy: Tensor, indices: Tensor, padding: int, scale_by_count: bool, first: int, device: Device
) -> None:
    """Writes the rows that `FEW` indices [n] or less name."""
    (n_rows, width), n = dweight.shape, indices.numel()
    rows = rows_side_by_side(dy.reshape(-1, width))
    scalars = (n, n_rows, first, padding, rows.stride(0))
    flags = (("SCALE_BY_COUNT", scale_by_count), ("BLOCK_M", FEW))
    spec = spec_of(tiling.runs_launch, width, dy.dtype.itemsize, device, flags)
    grid = n * spec.launch.column_blocks
    KERNELS.launch("kernels.cuda", "sum_few_kernel", spec, grid, (rows, indices, dweight), scalars)


def mark_rows(indices: Tensor, keys: Tensor | None, n_rows: int, padding: int, first: int, device: Device) -> Tensor:
    """Marks [n_rows] of the rows that `indices` name; `keys` to sort by."""
    marks = torch.zeros(n_rows, dtype=torch.int8, device=indices.device)
    n = indices.numel()
    spec = index_spec(tiling.mark_launch, device, (("KEYS", keys is not None),))
    KERNELS.launch(
        "kernels.rank", "mark_rows_kernel", spec, spec.launch.grid(n), (indices, keys, marks), (n, n_rows, first, padding)
    )
    return marks
