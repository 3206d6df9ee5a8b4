"""The look-up's launch, and the way to a gradient on each chip."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference, tiling
from ..shape import NO_ROW, Shape
from . import ascend, cuda
from .specs import KERNELS, NAN_BITS, Gradient, as_bits, dense_rows, row_spec


def forward(indices: Tensor, weight: Tensor, first_row: int, n_total: int, device: Device) -> Tensor:
    """Rows [..., D] of weight [V, D] for indices [...]: -0.0 for rows of other shards, NaN for what no shard has."""
    n_rows, width = weight.shape
    out = allocate(weight, (*indices.shape, width), weight.dtype)
    if not out.numel():
        return out
    if not n_rows:  # an empty shard; a kernel takes no tensor without elements
        known = (indices >= 0) & (indices.long() < n_total)  # PyTorch wraps a number that it compares int32 with
        return out.copy_(torch.where(known, -0.0, torch.nan).unsqueeze(-1).expand(out.shape))
    weight = dense_rows(weight)
    indices, n = indices.contiguous(), indices.numel()
    scalars = (n, first_row, first_row + n_rows, n_total, weight.stride(0))
    spec = row_spec(tiling.gather_launch, width, weight.dtype.itemsize, device, NAN=NAN_BITS[weight.dtype])
    tensors = (indices, as_bits(weight), as_bits(out))
    module = f"{device.kind}.gather"

    def run(spec: LaunchSpec) -> None:
        KERNELS.launch(module, "gather_rows_kernel", spec, spec.launch.grid(n), tensors, scalars)

    launch_with_fallback("embedding forward", spec, run, tiling.smaller)
    return out


def backward(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_by_count: bool, first_row: int, device: Device
) -> Tensor:
    """dweight [n_rows, D] in dy's dtype."""
    gradient = _gradient(dy, indices, n_rows, padding_idx, scale_by_count, first_row, device)
    dweight = allocate(dy, (n_rows, dy.shape[-1]), dy.dtype)
    n = indices.numel()
    if not dweight.numel() or not n:
        return dweight.zero_()
    way = tiling.choose(Shape(n, n_rows, dy.shape[-1], device)).way
    if device.kind == "cuda":
        cuda.backward(dweight, gradient, way)
    else:
        ascend.backward(dweight, gradient)
    return dweight


def sparse_backward(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_by_count: bool, first_row: int, device: Device
) -> tuple[Tensor, Tensor]:
    """An entry for each index: values [n, D] in dy's dtype, and rows [n], as `reference.slots` has them."""
    gradient = _gradient(dy, indices, n_rows, padding_idx, scale_by_count, first_row, device)
    n = indices.numel()
    values = allocate(dy, (n, dy.shape[-1]), dy.dtype)
    if device.kind == "cuda" or not n or not n_rows:
        slot, order, rows = reference.slots(gradient.indices, n_rows, padding_idx, first_row)
    else:
        tiling.choose(Shape(n, n_rows, dy.shape[-1], device))  # raises where the table has too many rows
        slot, order, rows = ascend.slots(gradient)
    if values.numel():
        (cuda if device.kind == "cuda" else ascend).sum_slots(values, gradient, slot, order)
    return values, rows


def _gradient(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_by_count: bool, first_row: int, device: Device
) -> Gradient:
    padding = padding_idx - first_row if first_row <= padding_idx < first_row + n_rows else NO_ROW
    flat = indices.reshape(-1).contiguous()
    in_parts = dy.dim() == 3 and min(dy.shape[:2]) > 1 and dy.stride(0) != dy.shape[1] * dy.stride(1)
    rows = dense_rows(dy if in_parts else dy.reshape(flat.numel(), dy.shape[-1]))
    return Gradient(rows, flat, n_rows, padding, scale_by_count, first_row, device)
