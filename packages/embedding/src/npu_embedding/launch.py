"""From tensors to kernel launches: sorting, tiling, allocation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch
from npu_tiling import Device, Kernels, Recipe, launch_with_fallback
from torch import Tensor

from . import tiling

KERNELS = Kernels(__package__, "npu-embedding")
_INT32_END = 2**31
_NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def forward(indices: Tensor, weight: Tensor, first: int, n_total: int, device: Device) -> Tensor:
    """Rows [..., D] of weight [V, D] for indices [...]: zeros for rows of other shards, NaN for what no shard has."""
    n_rows, width = weight.shape
    out = torch.empty((*indices.shape, width), dtype=weight.dtype, device=weight.device)
    if not out.numel():
        return out
    if not n_rows:  # an empty shard; a kernel takes no tensor without elements
        known = (indices >= 0) & (indices < n_total)
        return out.copy_(torch.where(known, 0.0, torch.nan).unsqueeze(-1).expand(out.shape))
    weight = _rows_side_by_side(weight)
    flat = indices.reshape(-1).contiguous()
    numbers = (flat.numel(), first, first + n_rows, n_total)
    scalars = (*numbers, weight.stride(0))
    kinds = (flat.dtype, weight.dtype, _kinds(*numbers), _specialised(weight.stride(0)))
    recipe = _recipe(tiling.forward_launch, width, weight.dtype.itemsize, device, (("NAN", _NAN_BITS[weight.dtype]),), kinds)
    bits = torch.int16 if weight.dtype.itemsize == 2 else torch.int32
    tensors = (flat, weight.view(bits), out.view(bits))

    def run(recipe: Recipe) -> None:
        grid = recipe.launch.grid(flat.numel())
        KERNELS.launch("kernels", "gather_rows_kernel", recipe, grid, tensors, scalars)

    launch_with_fallback("embedding forward", recipe, run, _smaller)
    return out


def backward(
    dy: Tensor, indices: Tensor, n_rows: int, padding_idx: int, scale_grad_by_freq: bool, first: int, device: Device
) -> Tensor:
    """dweight [n_rows, D] in dy's dtype."""
    flat = indices.reshape(-1)
    last = first + n_rows
    if flat.dtype == torch.int64 and last < _INT32_END:
        # Half the passes of a radix sort. What lies outside stays outside.
        flat = flat.clamp(first - 1, last).to(torch.int32)
    elif last >= _INT32_END:
        flat = flat.long()
    ordered, order = torch.sort(flat, stable=True)
    padding = padding_idx - first if first <= padding_idx < last else -1
    return sum_runs(dy, ordered, order, n_rows, padding, scale_grad_by_freq, first, device)


def sum_runs(
    dy: Tensor,
    ordered: Tensor,
    order: Tensor,
    n_rows: int,
    padding: int,
    scale_by_count: bool,
    first: int,
    device: Device,
) -> Tensor:
    """[n_rows, D]: row r is the sum of dy's rows at `order`, where `ordered` is first + r; zeros for row `padding`."""
    width, n = dy.shape[-1], ordered.numel()
    dweight = torch.empty((n_rows, width), dtype=dy.dtype, device=dy.device)
    if not dweight.numel() or not n:
        return dweight.zero_()
    rows = _rows_side_by_side(dy.reshape(-1, width))
    bounds = torch.arange(first, first + n_rows + 1, dtype=ordered.dtype, device=dy.device)
    offsets = torch.searchsorted(ordered, bounds, out_int32=n < _INT32_END)
    itemsize = dy.dtype.itemsize
    kinds = (dy.dtype, ordered.dtype, offsets.dtype, _kinds(n_rows, first))
    strided = (*kinds, _specialised(rows.stride(0)))
    modes = (("SCALE_BY_COUNT", scale_by_count),)
    runs = _recipe(tiling.runs_launch, width, itemsize, device, modes, strided)
    numbers = (first, padding)

    def run(recipe: Recipe) -> Tensor:
        chunks = recipe.launch.chunks(n)
        partials = torch.empty((2, chunks, width), dtype=torch.float32, device=dy.device)
        tensors = (rows, order, ordered, offsets, dweight, partials)
        scalars = (n_rows, chunks, *numbers, rows.stride(0))
        grid = chunks * recipe.launch.column_blocks
        KERNELS.launch("kernels_backward", "sum_runs_kernel", recipe, grid, tensors, scalars)
        return partials

    partials = launch_with_fallback("embedding backward, sums", runs, run, _smaller)
    finish = _recipe(tiling.finish_launch, width, itemsize, device, modes, kinds)

    def run_finish(recipe: Recipe) -> None:
        chunks = partials.shape[1]
        tensors = (partials, ordered, offsets, dweight)
        grid = recipe.launch.grid(n_rows, chunks)
        KERNELS.launch("kernels_backward", "finish_kernel", recipe, grid, tensors, (n_rows, chunks, *numbers))

    launch_with_fallback("embedding backward, zeros and partial sums", finish, run_finish, _smaller)
    return dweight


def _rows_side_by_side(rows: Tensor) -> Tensor:
    """The tensor [n, D], copied only if the elements of a row are not next to each other."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _kinds(*numbers: int) -> tuple[bool, ...]:
    """Which numbers the JIT takes as 64-bit."""
    return tuple([not -_INT32_END <= number < _INT32_END for number in numbers])


def _specialised(stride: int) -> tuple[bool, bool, bool]:
    """What the JIT compiles another kernel for."""
    return stride == 1, stride % 16 == 0, stride >= _INT32_END


@functools.lru_cache(maxsize=4096)
def _recipe(
    choose: Callable[[int, int, Device], tiling.Launch],
    width: int,
    itemsize: int,
    device: Device,
    modes: tuple[tuple[str, int], ...],
    kinds: Hashable,
) -> Recipe:
    return Recipe.of(choose(width, itemsize, device), dict(modes), kinds)


def _smaller(recipe: Recipe) -> Recipe | None:
    return recipe.smaller(tiling.smaller)
