"""The gradient's launches on Ascend: keys, a sort, where each row's indices lie, sums, zeros and partial sums."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import INT32_END
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from ..ascend.tiling import KEY_OF_ROW_0, finish_launch, keys_launch, offsets_launch, sums_launch
from ..both.tiling import Way
from ..shape import NO_ROW
from .specs import KERNELS, index_spec, row_spec


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
    assert way is Way.SORTED_AS_FP32
    keys, order = sorted_keys(indices, dweight.shape[0], padding, first_row, device)
    offsets = _offsets(keys, dweight.shape[0], KEY_OF_ROW_0, device)
    _sum_runs(dweight, dy, keys, order, offsets, KEY_OF_ROW_0, padding, scale_by_count, device)


def slots(indices: Tensor, n_rows: int, padding: int, first_row: int, device: Device) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.slots`, of indices [n], without an operator that Ascend's vector cores do not have."""
    keys, order = sorted_keys(indices, n_rows, padding, first_row, device)
    offsets = _offsets(keys, n_rows, KEY_OF_ROW_0, device)
    rows = keys - KEY_OF_ROW_0
    known = (rows >= 0) & (rows < n_rows)
    rows = torch.where(known, rows, 0)
    return torch.where(known, offsets.index_select(0, rows), keys.numel()), order, rows.long()


def sum_slots(values: Tensor, dy: Tensor, slot: Tensor, order: Tensor, scale_by_count: bool, device: Device) -> None:
    """Writes values [n, D]: row r is the sum of dy's rows at `order`, where `slot` [n] is r; zeros where it never is."""
    offsets = _offsets(slot, values.shape[0], 0, device)
    _sum_runs(values, dy, slot, order, offsets, 0, NO_ROW, scale_by_count, device)


def sorted_keys(indices: Tensor, n_rows: int, padding: int, first_row: int, device: Device) -> tuple[Tensor, Tensor]:
    """Indices [n] as keys (see ascend/keys.py) in ascending order, int32, and where each stood."""
    n = indices.numel()
    keys = allocate(indices, (n,), torch.int32)
    spec = index_spec(keys_launch, device)
    scalars = (n, n_rows, first_row, padding)
    KERNELS.launch("ascend.keys", "sort_keys_kernel", spec, spec.launch.grid(n), (indices, keys), scalars)
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
    dweight: Tensor,
    dy: Tensor,
    keys: Tensor,
    order: Tensor,
    offsets: Tensor,
    key_of_row_0: int,
    padding: int,
    scale_by_count: bool,
    device: Device,
) -> None:
    """Writes every row r: the sum of the run of key_of_row_0 + r, zeros where it has none and in row `padding`."""
    (n_rows, width), n, itemsize = dweight.shape, keys.numel(), dy.dtype.itemsize

    def run(spec: LaunchSpec) -> Tensor:
        chunks = spec.launch.chunks(n)
        partials = allocate(dy, (2, chunks, width), torch.float32)
        tensors = (dy, order, keys, offsets, dweight, partials)
        scalars = (n_rows, chunks, key_of_row_0, padding, dy.stride(0))
        KERNELS.launch("ascend.sums", "sum_runs_kernel", spec, chunks * spec.launch.column_blocks, tensors, scalars)
        return partials

    spec = row_spec(sums_launch, width, itemsize, device, "SCALE_BY_COUNT", scale_by_count)
    partials = launch_with_fallback("embedding backward, sums", spec, run, tiling.smaller)
    tensors = (partials, keys, offsets, dweight)
    scalars = (n_rows, partials.shape[1], key_of_row_0, padding)

    def finish(spec: LaunchSpec) -> None:
        KERNELS.launch("ascend.sums", "finish_rows_kernel", spec, spec.launch.grid(n_rows), tensors, scalars)

    spec = row_spec(finish_launch, width, itemsize, device, "SCALE_BY_COUNT", scale_by_count)
    launch_with_fallback("embedding backward, partial sums", spec, finish, tiling.smaller)
