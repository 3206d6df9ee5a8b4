"""The gradient's launches on Ascend: indices in the order of their rows, sums and zeros, partial sums."""

from __future__ import annotations

import torch
from npu_tiling import LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from ..ascend import tiling as ascend
from ..ascend.tiling import BLOCK, KEY_OF_ROW_0, chunks, search_steps, slots_launch, sort_launch
from .specs import KERNELS, Gradient, index_spec, row_spec


def backward(dweight: Tensor, gradient: Gradient) -> None:
    """Writes dweight [n_rows, D]."""
    keys, order = sorted_keys(gradient)
    _sum_rows(dweight, gradient, keys, order, KEY_OF_ROW_0)


def slots(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.slots` in launches of our own."""
    keys, order = sorted_keys(gradient)
    n, n_rows, _, padding = gradient.numbers
    slot, rows = _numbers(keys, n), allocate(keys, (n,), torch.int64)
    spec = index_spec(slots_launch, gradient.device)
    scalars = (n, n_rows, max(padding, 0), n.bit_length())
    KERNELS.launch("ascend.slots", "find_slots_kernel", spec, spec.launch.grid(n), (keys, slot, rows), scalars)
    return slot, order, rows


def sum_slots(values: Tensor, gradient: Gradient, slot: Tensor, order: Tensor) -> None:
    """Writes values [n, D]: row r is the sum of the rows of dy whose slot is r, zeros where there are none."""
    _sum_rows(values, gradient, slot, order, 0)


def sorted_keys(gradient: Gradient) -> tuple[Tensor, Tensor]:
    """Indices as keys (see ascend/sort.py) in ascending order, int32 [n], and where each stood."""
    indices, device = gradient.indices, gradient.device
    n, n_rows, *_ = gradient.numbers
    wide = ("WIDE", n_rows > ascend.MAX_ROWS_OF_ONE_DIGIT)
    blocks, block_steps = -(-n // BLOCK), search_steps(BLOCK)
    run, rounds = ascend.sorted_runs(blocks, device)
    keys, order = _numbers(indices, (rounds + 1) * blocks * BLOCK), _numbers(indices, (rounds + 1) * blocks * BLOCK)
    spec = index_spec(sort_launch, device, (("LONG", indices.dtype == torch.int64), wide))
    tensors, scalars = (indices.view(torch.int32), keys, order), (*gradient.numbers, run, rounds, block_steps)
    KERNELS.launch("ascend.sort", "sort_runs_kernel", spec, spec.launch.grid(-(-blocks // run)), tensors, scalars)
    keys, order = keys[rounds * blocks * BLOCK :], order[rounds * blocks * BLOCK :]
    spec = index_spec(sort_launch, device, (wide,))
    while run < blocks:
        merged = _numbers(keys, blocks * BLOCK), _numbers(keys, blocks * BLOCK)
        sizes = (blocks, run, search_steps(4 * run * BLOCK), block_steps)
        KERNELS.launch("ascend.sort", "merge_runs_kernel", spec, spec.launch.grid(blocks), (keys, order, *merged), sizes)
        keys, order = merged
        run *= 4
    return keys[:n], order[:n]


def _numbers(like: Tensor, count: int) -> Tensor:
    return allocate(like, (count,), torch.int32)


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
