"""From tensors to kernel launches: sorting, tiling, allocation."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import INT32_END
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference, tiling
from . import cuda
from .specs import KERNELS, index_spec, rows_side_by_side, spec_of

FIRST_KEY = 0x00800000  # of the keys that Ascend sorts, see kernels/sort.py
_MOST_KEYS = 2**31 - 2**24  # below infinity
_NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def forward(indices: Tensor, weight: Tensor, first: int, n_total: int, device: Device) -> Tensor:
    """Rows [..., D] of weight [V, D] for indices [...]: zeros for rows of other shards, NaN for what no shard has."""
    n_rows, width = weight.shape
    out = allocate(weight, (*indices.shape, width), weight.dtype)
    if not out.numel():
        return out
    if not n_rows:  # an empty shard; a kernel takes no tensor without elements
        known = (indices >= 0) & (indices.long() < n_total)  # PyTorch wraps a number that it compares int32 with
        return out.copy_(torch.where(known, 0.0, torch.nan).unsqueeze(-1).expand(out.shape))
    weight = rows_side_by_side(weight)
    flat = indices.reshape(-1).contiguous()
    scalars = (flat.numel(), first, first + n_rows, n_total, weight.stride(0))
    spec = spec_of(tiling.forward_launch, width, weight.dtype.itemsize, device, (("NAN", _NAN_BITS[weight.dtype]),))
    bits = torch.int16 if weight.dtype.itemsize == 2 else torch.int32
    tensors = (flat, weight.view(bits), out.view(bits))

    def run(spec: LaunchSpec) -> None:
        grid = spec.launch.grid(flat.numel())
        KERNELS.launch("kernels.forward", "gather_rows_kernel", spec, grid, tensors, scalars)

    launch_with_fallback("embedding forward", spec, run, tiling.smaller)
    return out


def backward(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_grad_by_freq: bool, first: int, device: Device
) -> Tensor:
    """dweight [n_rows, D] in dy's dtype."""
    flat = indices.reshape(-1).contiguous()
    dweight = allocate(dy, (n_rows, dy.shape[-1]), dy.dtype)
    if not dweight.numel() or not flat.numel():
        return dweight.zero_()
    last = first + n_rows
    padding = padding_idx - first if first <= padding_idx < last else -1
    if device.kind == "cuda":
        cuda.backward(dweight, dy, flat, padding, scale_grad_by_freq, first, device)
    else:
        ordered, order = _sorted_keys(flat, n_rows, -1, first, device)
        _sum_runs(dweight, dy, ordered, order, padding, scale_grad_by_freq, FIRST_KEY, device)
    return dweight


def sum_slots(dy: Tensor, ordered: Tensor, order: Tensor, scale_by_count: bool, device: Device) -> Tensor:
    """[n, D]: row r is the sum of dy's rows at `order`, where `ordered` [n] is r; zeros where it never is."""
    out = allocate(dy, (ordered.numel(), dy.shape[-1]), dy.dtype)
    if not out.numel():
        return out
    if device.kind == "cuda":
        cuda.sum_slots(out, dy, ordered, order, scale_by_count, device)
    else:
        _sum_runs(out, dy, ordered, order, -1, scale_by_count, 0, device)
    return out


def sparse_slots(indices: Tensor, n_rows: int, padding_idx: int, first: int, device: Device) -> tuple[Tensor, ...]:
    """`reference.slots`, of indices [n], without an operator that Ascend's vector cores do not have."""
    if device.kind == "cuda" or not indices.numel() or not n_rows:
        return reference.slots(indices, n_rows, padding_idx, first)
    padding = padding_idx - first if padding_idx >= first else -1
    ordered, order = _sorted_keys(indices.contiguous(), n_rows, padding, first, device)
    offsets = _offsets(ordered, n_rows, FIRST_KEY, device)
    rows = ordered - FIRST_KEY
    known = (rows >= 0) & (rows < n_rows)
    rows = torch.where(known, rows, 0)
    slot = torch.where(known, offsets.index_select(0, rows), ordered.numel())
    return slot, order, rows.long()


def _sorted_keys(indices: Tensor, n_rows: int, padding: int, first: int, device: Device) -> tuple[Tensor, Tensor]:
    """Indices [n] as keys, see kernels/sort.py, in ascending order, int32, and where each stood."""
    if n_rows >= _MOST_KEYS:
        raise ValueError(f"the table has {n_rows} rows and must have less than {_MOST_KEYS} on {device.name}.")
    n = indices.numel()
    keys = allocate(indices, (n,), torch.int32)
    spec = index_spec(tiling.keys_launch, device)
    scalars = (n, n_rows, first, padding)
    KERNELS.launch("kernels.sort", "sort_keys_kernel", spec, spec.launch.grid(n), (indices, keys), scalars)
    ordered, order = torch.sort(keys.view(torch.float32), stable=True)
    return ordered.view(torch.int32), order


def _offsets(ordered: Tensor, n_rows: int, first: int, device: Device) -> Tensor:
    """Offsets [n_rows + 1] of the runs: how many of `ordered` are less than first + r."""
    n = ordered.numel()
    offsets = allocate(ordered, (n_rows + 1,), torch.int32 if n < INT32_END else torch.int64)
    spec = index_spec(tiling.offsets_launch, device)
    scalars = (n, n_rows, first, n.bit_length())
    grid = spec.launch.grid(n_rows + 1)
    KERNELS.launch("kernels.sort", "find_runs_kernel", spec, grid, (ordered, offsets), scalars)
    return offsets


def _sum_runs(
    dweight: Tensor,
    dy: Tensor,
    ordered: Tensor,
    order: Tensor,
    padding: int,
    scale_by_count: bool,
    first: int,
    device: Device,
) -> None:
    """Writes every row r: the sum where `ordered` is first + r, zeros where it never is and in row `padding` (Ascend)."""
    (n_rows, width), n = dweight.shape, ordered.numel()
    rows = rows_side_by_side(dy.reshape(-1, width))
    offsets = _offsets(ordered, n_rows, first, device)
    itemsize = dy.dtype.itemsize
    flags = (("SCALE_BY_COUNT", scale_by_count),)
    numbers = (first, padding)

    def run(spec: LaunchSpec) -> Tensor:
        chunks = spec.launch.chunks(n)
        partials = allocate(dy, (2, chunks, width), torch.float32)
        tensors = (rows, order, ordered, offsets, dweight, partials)
        scalars = (n_rows, chunks, *numbers, rows.stride(0))
        grid = chunks * spec.launch.column_blocks
        KERNELS.launch("kernels.backward", "sum_runs_kernel", spec, grid, tensors, scalars)
        return partials

    spec = spec_of(tiling.runs_launch, width, itemsize, device, flags)
    partials = launch_with_fallback("embedding backward, sums", spec, run, tiling.smaller)
    chunks = partials.shape[1]

    def finish(spec: LaunchSpec) -> None:
        tensors = (partials, ordered, offsets, dweight)
        grid = spec.launch.grid(n_rows)
        KERNELS.launch("kernels.backward", "finish_rows_kernel", spec, grid, tensors, (n_rows, chunks, *numbers))

    spec = spec_of(tiling.finish_launch, width, itemsize, device, flags)
    launch_with_fallback("embedding backward, partial sums", spec, finish, tiling.smaller)
