"""The gradient's launches on Ascend: keys, a sort, where the indices of each row lie, sums, zeros and partial sums."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import INT32_END
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from ..ascend.tiling import KEY_OF_ROW_0, chunks, finish_launch, keys_launch, offsets_launch, sums_launch
from ..both.tiling import Way
from ..shape import NO_ROW
from .specs import KERNELS, Gradient, index_spec, row_spec


def backward(dweight: Tensor, gradient: Gradient, way: Way) -> None:
    """Writes dweight [n_rows, D]."""
    assert way is Way.SORTED_AS_FP32
    keys, order = sorted_keys(gradient)
    offsets = _offsets(keys, gradient.n_rows, KEY_OF_ROW_0, gradient.device)
    _sum_runs(dweight, gradient, keys, order, offsets, KEY_OF_ROW_0, gradient.padding)


def slots(gradient: Gradient) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.slots` without an operator that Ascend's vector cores do not have."""
    keys, order = sorted_keys(gradient)
    offsets = _offsets(keys, gradient.n_rows, KEY_OF_ROW_0, gradient.device)
    rows = keys - KEY_OF_ROW_0
    known = (rows >= 0) & (rows < gradient.n_rows)
    rows = torch.where(known, rows, torch.where(known[:1], rows[:1], max(gradient.padding, 0)))
    return torch.where(known, offsets.index_select(0, rows), keys.numel()), order, rows.long()


def sum_slots(values: Tensor, gradient: Gradient, slot: Tensor, order: Tensor) -> None:
    """Writes values [n, D]: row r is the sum of dy's rows at `order`, where `slot` [n] is r; zeros where it never is."""
    offsets = _offsets(slot, values.shape[0], 0, gradient.device)
    _sum_runs(values, gradient, slot, order, offsets, 0, NO_ROW)


def sorted_keys(gradient: Gradient) -> tuple[Tensor, Tensor]:
    """Indices as keys (see ascend/keys.py) in ascending order, int32 [n], and where each stood."""
    indices = gradient.indices
    keys = allocate(indices, (indices.numel(),), torch.int32)
    spec = index_spec(keys_launch, gradient.device)
    grid = spec.launch.grid(indices.numel())
    KERNELS.launch("ascend.keys", "make_keys_kernel", spec, grid, (indices, keys), gradient.numbers)
    ordered, order = torch.sort(keys.view(torch.float32), stable=True)
    return ordered.view(torch.int32), order


def _offsets(keys: Tensor, n_rows: int, key_of_row_0: int, device: Device) -> Tensor:
    """Offsets [n_rows + 1] of the runs: how many of the sorted keys [n] are below key_of_row_0 + r."""
    n = keys.numel()
    offsets = allocate(keys, (n_rows + 1,), torch.int32 if n < INT32_END else torch.int64)
    spec = index_spec(offsets_launch, device)
    scalars = (n, n_rows, key_of_row_0, n.bit_length())
    KERNELS.launch("ascend.keys", "find_runs_kernel", spec, spec.launch.grid(n_rows + 1), (keys, offsets), scalars)
    return offsets


def _sum_runs(
    dweight: Tensor, gradient: Gradient, keys: Tensor, order: Tensor, offsets: Tensor, key_of_row_0: int, padding: int
) -> None:
    """Writes every row r: the sum of the run of key_of_row_0 + r, zeros where it has none and in row `padding`."""
    (n_rows, width), n, dy = dweight.shape, keys.numel(), gradient.dy
    options, by_count = (width, dy.dtype.itemsize, gradient.device), gradient.scale_by_count

    def run(spec: LaunchSpec) -> Tensor:
        n_chunks = chunks(spec.launch, n)
        partials = allocate(dy, (2, n_chunks, width), torch.float32)
        tensors = (dy, order, keys, offsets, dweight, partials)
        scalars = (n_rows, n_chunks, key_of_row_0, padding, *gradient.dy_strides)
        KERNELS.launch("ascend.sums", "sum_runs_kernel", spec, n_chunks * spec.launch.column_blocks, tensors, scalars)
        return partials

    spec = row_spec(sums_launch, *options, SCALE_BY_COUNT=by_count, IN_PARTS=gradient.in_parts)
    partials = launch_with_fallback("embedding backward, sums", spec, run, tiling.smaller)
    tensors = (partials, keys, offsets, dweight)
    scalars = (n_rows, partials.shape[1], key_of_row_0, padding)

    def finish(spec: LaunchSpec) -> None:
        KERNELS.launch("ascend.sums", "finish_rows_kernel", spec, spec.launch.grid(n_rows), tensors, scalars)

    spec = row_spec(finish_launch, *options, SCALE_BY_COUNT=by_count)
    launch_with_fallback("embedding backward, partial sums", spec, finish, tiling.smaller)
