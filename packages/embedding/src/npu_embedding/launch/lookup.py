"""The look-up's launch, and the way to a gradient on each chip."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference, tiling
from ..shape import NO_ROW, Shape
from . import ascend, cuda
from .specs import KERNELS, dense_rows, row_spec

_NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def forward(indices: Tensor, weight: Tensor, first_row: int, n_total: int, device: Device) -> Tensor:
    """Rows [..., D] of weight [V, D] for indices [...]: zeros for rows of other shards, NaN for what no shard has."""
    n_rows, width = weight.shape
    out = allocate(weight, (*indices.shape, width), weight.dtype)
    if not out.numel():
        return out
    if not n_rows:  # an empty shard; a kernel takes no tensor without elements
        known = (indices >= 0) & (indices.long() < n_total)  # PyTorch wraps a number that it compares int32 with
        return out.copy_(torch.where(known, 0.0, torch.nan).unsqueeze(-1).expand(out.shape))
    weight = dense_rows(weight)
    flat = indices.reshape(-1).contiguous()
    n = flat.numel()
    scalars = (n, first_row, first_row + n_rows, n_total, weight.stride(0))
    spec = row_spec(tiling.gather_launch, width, weight.dtype.itemsize, device, "NAN", _NAN_BITS[weight.dtype])
    bits = torch.int16 if weight.dtype.itemsize == 2 else torch.int32
    tensors = (flat, weight.view(bits), out.view(bits))
    module = f"{device.kind}.gather"

    def run(spec: LaunchSpec) -> None:
        KERNELS.launch(module, "gather_rows_kernel", spec, spec.launch.grid(n), tensors, scalars)

    launch_with_fallback("embedding forward", spec, run, tiling.smaller)
    return out


def backward(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_by_count: bool, first_row: int, device: Device
) -> Tensor:
    """dweight [n_rows, D] in dy's dtype."""
    flat = indices.reshape(-1).contiguous()
    width = dy.shape[-1]
    dweight = allocate(dy, (n_rows, width), dy.dtype)
    if not dweight.numel() or not flat.numel():
        return dweight.zero_()
    padding = _padding(padding_idx, n_rows, first_row)
    way = tiling.choose(Shape(indices=flat.numel(), rows=n_rows, device=device)).way
    chip = cuda if device.kind == "cuda" else ascend
    chip.backward(dweight, dense_rows(dy.reshape(-1, width)), flat, way, padding, scale_by_count, first_row, device)
    return dweight


def sparse_backward(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_by_count: bool, first_row: int, device: Device
) -> tuple[Tensor, Tensor]:
    """An entry for each index: values [n, D] in dy's dtype, and rows [n], as `reference.slots` has them."""
    flat = indices.reshape(-1).contiguous()
    n, width = flat.numel(), dy.shape[-1]
    values = allocate(dy, (n, width), dy.dtype)
    if device.kind == "cuda" or not n or not n_rows:
        slot, order, rows = reference.slots(flat, n_rows, padding_idx, first_row)
    else:
        tiling.choose(Shape(indices=n, rows=n_rows, device=device))  # raises where the table has too many rows
        slot, order, rows = ascend.slots(flat, n_rows, _padding(padding_idx, n_rows, first_row), first_row, device)
    if values.numel():
        chip = cuda if device.kind == "cuda" else ascend
        chip.sum_slots(values, dense_rows(dy.reshape(-1, width)), slot, order, scale_by_count, device)
    return values, rows


def _padding(padding_idx: int, n_rows: int, first_row: int) -> int:
    """The padding row's place in the table at hand."""
    return padding_idx - first_row if first_row <= padding_idx < first_row + n_rows else NO_ROW
