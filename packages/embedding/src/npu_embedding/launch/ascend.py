"""The gradient's launches on Ascend: indices in the order of their rows, sums and zeros, partial sums."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import INT32_END
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from ..ascend import tiling as ascend
from ..ascend.tiling import BLOCK, GROUPS, KEY_OF_ROW_0, SAMPLES, SHARE, chunks, keys_launch, offsets_launch
from ..both.tiling import Way
from ..shape import Shape
from .specs import KERNELS, Gradient, index_spec, row_spec


def backward(dweight: Tensor, gradient: Gradient, way: Way) -> None:
    """Writes dweight [n_rows, D]."""
    keys, order = sorted_keys(gradient, way)
    _sum_rows(dweight, gradient, keys, order, KEY_OF_ROW_0)


def slots(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.slots` without torch.searchsorted and sorts of integers: users report that CANN runs both on the AI CPU."""
    n_rows, device = gradient.n_rows, gradient.device
    keys, order = sorted_keys(gradient, tiling.choose(Shape(gradient.indices.numel(), n_rows, device)).way)
    offsets = _offsets(keys, n_rows, device)
    rows = keys - KEY_OF_ROW_0
    known = (rows >= 0) & (rows < n_rows)
    rows = torch.where(known, rows, torch.where(known[:1], rows[:1], max(gradient.padding, 0)))
    return torch.where(known, offsets.index_select(0, rows), keys.numel()), order, rows.long()


def sum_slots(values: Tensor, gradient: Gradient, slot: Tensor, order: Tensor) -> None:
    """Writes values [n, D]: row r is the sum of dy's rows at `order`, where `slot` [n] is r; zeros where it never is."""
    _sum_rows(values, gradient, slot, order, 0)


def sorted_keys(gradient: Gradient, way: Way) -> tuple[Tensor, Tensor]:
    """Indices as keys (see ascend/sort.py) in ascending order, int32 [n], and where each stood."""
    indices, device = gradient.indices, gradient.device
    n, n_rows, *_ = gradient.numbers
    flags = (("LONG", indices.dtype == torch.int64), ("WIDE", n_rows > ascend.MAX_ROWS_OF_ONE_DIGIT))
    halves = indices.view(torch.int32)
    if way is Way.SORTED_AS_FP32:
        keys = _numbers(indices, n)
        spec = index_spec(keys_launch, device, flags[:1])
        KERNELS.launch("ascend.sort", "make_keys_kernel", spec, spec.launch.grid(n), (halves, keys), gradient.numbers)
        ordered, order = torch.sort(keys.view(torch.float32), stable=True)
        return ordered.view(torch.int32), order
    groups = -(-n // BLOCK)
    buckets = groups * SAMPLES // SHARE
    keys, order, samples = (_numbers(indices, groups * each) for each in (BLOCK, BLOCK, SAMPLES))
    spec = index_spec(ascend.groups_launch, device, flags)
    tensors: tuple[Tensor, ...] = (halves, keys, order, samples)
    KERNELS.launch("ascend.sort", "sort_groups_kernel", spec, spec.launch.grid(groups), tensors, gradient.numbers)
    if groups == 1:
        return keys[:n], order[:n]
    parts = _numbers(indices, (buckets + 1) * GROUPS)
    spec = index_spec(ascend.parts_launch, device, flags[1:])
    KERNELS.launch(
        "ascend.sort", "find_parts_kernel", spec, spec.launch.grid(buckets + 1), (keys, samples, parts), (groups, n_rows)
    )
    in_buckets = tuple(_numbers(indices, buckets * each) for each in (BLOCK, BLOCK, 2))
    spec = index_spec(ascend.copies_launch, device)
    tensors = (keys, order, parts, *in_buckets)
    KERNELS.launch("ascend.sort", "copy_parts_kernel", spec, spec.launch.grid(buckets), tensors, (groups, buckets))
    keys, order = _numbers(indices, n), _numbers(indices, n)
    spec = index_spec(ascend.buckets_launch, device, flags[1:])
    tensors, scalars = (*in_buckets, keys, order), (n, buckets, n_rows)
    KERNELS.launch("ascend.sort", "sort_buckets_kernel", spec, spec.launch.grid(buckets), tensors, scalars)
    return keys, order


def _numbers(like: Tensor, count: int) -> Tensor:
    return allocate(like, (count,), torch.int32)


def _offsets(keys: Tensor, n_rows: int, device: Device) -> Tensor:
    """Offsets [n_rows + 1] of the runs: how many of the sorted keys [n] are below those of row r."""
    n = keys.numel()
    offsets = allocate(keys, (n_rows + 1,), torch.int32 if n < INT32_END else torch.int64)
    spec = index_spec(offsets_launch, device)
    scalars = (n, n_rows, KEY_OF_ROW_0, n.bit_length())
    KERNELS.launch("ascend.keys", "find_runs_kernel", spec, spec.launch.grid(n_rows + 1), (keys, offsets), scalars)
    return offsets


def _sum_rows(dweight: Tensor, gradient: Gradient, keys: Tensor, order: Tensor, key_of_row_0: int) -> None:
    """Writes every row r: the sum of the run of key_of_row_0 + r, zeros where it has none."""
    (n_rows, width), n, dy = dweight.shape, keys.numel(), gradient.dy
    options, by_count = (width, dy.dtype.itemsize, gradient.device), gradient.scale_by_count
    steps = n.bit_length()

    def run(spec: LaunchSpec) -> Tensor:
        n_chunks = chunks(spec.launch, n + n_rows)
        partials = allocate(dy, (2, n_chunks, width), torch.float32)
        scalars = (n, n_rows, n_chunks, key_of_row_0, steps, *gradient.dy_strides)
        tensors = (dy, order, keys, dweight, partials)
        KERNELS.launch("ascend.sums", "sum_rows_kernel", spec, n_chunks * spec.launch.column_blocks, tensors, scalars)
        return partials

    spec = row_spec(ascend.sums_launch, *options, SCALE_BY_COUNT=by_count, IN_PARTS=gradient.in_parts)
    partials = launch_with_fallback("embedding backward, sums", spec, run, tiling.smaller)
    n_chunks = partials.shape[1]
    if n_chunks == 1:
        return
    tensors, scalars = (partials, keys, dweight), (n, n_rows, n_chunks, key_of_row_0, steps)

    def add(spec: LaunchSpec) -> None:
        KERNELS.launch("ascend.sums", "add_partials_kernel", spec, spec.launch.grid(n_chunks - 1), tensors, scalars)

    spec = row_spec(ascend.partials_launch, *options, SCALE_BY_COUNT=by_count)
    launch_with_fallback("embedding backward, partial sums", spec, add, tiling.smaller)
