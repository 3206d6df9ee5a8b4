"""From tensors to kernel launches: sorting, tiling, allocation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from npu_tiling import Device, Kernels, Recipe, launch_with_fallback
from torch import Tensor

from . import tiling

KERNELS = Kernels(__package__, "npu-embedding")
_INT32_END = 2**31
_BESIDE_BYTES = 2**26  # zeros for a table of this size take as long as a sort of its indices
_NAN_BITS = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def forward(indices: Tensor, weight: Tensor, first: int, n_total: int, device: Device) -> Tensor:
    """Rows [..., D] of weight [V, D] for indices [...]: zeros for rows of other shards, NaN for what no shard has."""
    n_rows, width = weight.shape
    out = torch.empty((*indices.shape, width), dtype=weight.dtype, device=weight.device)
    if not out.numel():
        return out
    if not n_rows:  # an empty shard; a kernel takes no tensor without elements
        known = (indices >= 0) & (indices.long() < n_total)  # PyTorch wraps a number that it compares int32 with
        return out.copy_(torch.where(known, 0.0, torch.nan).unsqueeze(-1).expand(out.shape))
    weight = _rows_side_by_side(weight)
    flat = indices.reshape(-1).contiguous()
    scalars = (flat.numel(), first, first + n_rows, n_total, weight.stride(0))
    recipe = _recipe(tiling.forward_launch, width, weight.dtype.itemsize, device, (("NAN", _NAN_BITS[weight.dtype]),))
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
    flat = indices.reshape(-1).contiguous()
    dweight = torch.empty((n_rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)
    if not dweight.numel() or not flat.numel():
        return dweight.zero_()
    last = first + n_rows
    padding = padding_idx - first if first <= padding_idx < last else -1
    # 32 bits are half the passes of a radix sort.
    key_dtype = torch.int32 if last < _INT32_END else torch.int64
    if device.kind != "cuda":
        keys = flat.clamp(first - 1, last) if flat.dtype.itemsize > key_dtype.itemsize else flat
        ordered, order = torch.sort(keys.to(key_dtype), stable=True)
        offsets = _sum_runs(dweight, dy, ordered, order, padding, scale_grad_by_freq, first, device)
        _store_zeros(dweight, offsets, padding, device)
        return dweight
    keys = torch.empty_like(flat, dtype=key_dtype)
    marks = _mark_rows(flat, keys, n_rows, padding, first, device)
    # The gradient of a large table is mostly zeros, and a sort leaves the memory idle.
    with _beside(dweight) as beside:
        _store_zeros(dweight, marks, padding, device)
        with beside:
            ordered, order = torch.sort(keys, stable=True)
            _sum_runs(dweight, dy, ordered, order, padding, scale_grad_by_freq, first, device)
    return dweight


def sum_slots(dy: Tensor, ordered: Tensor, order: Tensor, scale_by_count: bool, device: Device) -> Tensor:
    """[n, D]: row r is the sum of dy's rows at `order`, where `ordered` [n] is r; zeros where it never is."""
    out = torch.empty((ordered.numel(), dy.shape[-1]), dtype=dy.dtype, device=dy.device)
    if out.numel():
        offsets = _sum_runs(out, dy, ordered, order, -1, scale_by_count, 0, device)
        marks = _mark_rows(ordered, None, out.shape[0], -1, 0, device) if device.kind == "cuda" else offsets
        _store_zeros(out, marks, -1, device)
    return out


def _sum_runs(
    dweight: Tensor,
    dy: Tensor,
    ordered: Tensor,
    order: Tensor,
    padding: int,
    scale_by_count: bool,
    first: int,
    device: Device,
) -> Tensor:
    """Writes the rows that have a run: r, but for `padding`, where `ordered` is first + r. Returns the runs' offsets."""
    (n_rows, width), n = dweight.shape, ordered.numel()
    rows = _rows_side_by_side(dy.reshape(-1, width))
    bounds = torch.arange(first, first + n_rows + 1, dtype=ordered.dtype, device=dy.device)
    offsets = torch.searchsorted(ordered, bounds, out_int32=n < _INT32_END)
    itemsize = dy.dtype.itemsize
    modes = (("SCALE_BY_COUNT", scale_by_count),)
    numbers = (first, padding)

    def run(recipe: Recipe) -> Tensor:
        chunks = recipe.launch.chunks(n)
        partials = torch.empty((2, chunks, width), dtype=torch.float32, device=dy.device)
        tensors = (rows, order, ordered, offsets, dweight, partials)
        scalars = (n_rows, chunks, *numbers, rows.stride(0))
        grid = chunks * recipe.launch.column_blocks
        KERNELS.launch("kernels_backward", "sum_runs_kernel", recipe, grid, tensors, scalars)
        return partials

    recipe = _recipe(tiling.runs_launch, width, itemsize, device, modes)
    partials = launch_with_fallback("embedding backward, sums", recipe, run, _smaller)
    chunks = partials.shape[1]

    def run_partials(recipe: Recipe) -> None:
        tensors = (partials, ordered, offsets, dweight)
        grid = recipe.launch.grid(chunks)
        KERNELS.launch("kernels_backward", "add_partials_kernel", recipe, grid, tensors, (n_rows, chunks, *numbers))

    if chunks > 1:
        recipe = _recipe(tiling.partials_launch, width, itemsize, device, modes)
        launch_with_fallback("embedding backward, partial sums", recipe, run_partials, _smaller)
    return offsets


def _store_zeros(dweight: Tensor, rows: Tensor, padding: int, device: Device) -> None:
    """Writes the rows of dweight that have no run, by their marks or offsets."""
    n_rows, width = dweight.shape

    def run(recipe: Recipe) -> None:
        grid = recipe.launch.grid(n_rows)
        KERNELS.launch("kernels_backward", "store_zeros_kernel", recipe, grid, (dweight, rows), (n_rows, padding))

    recipe = _recipe(tiling.zeros_launch, width, dweight.dtype.itemsize, device, ())
    launch_with_fallback("embedding backward, zeros", recipe, run, _smaller)


def _mark_rows(indices: Tensor, keys: Tensor | None, n_rows: int, padding: int, first: int, device: Device) -> Tensor:
    """Marks [n_rows] of the rows that `indices` name, and `keys` to sort by: `indices`, with less outside the table."""
    marks = torch.zeros(n_rows, dtype=torch.int8, device=indices.device)
    n = indices.numel()
    recipe = _mark_recipe(device, keys is not None)
    scalars = (n, n_rows, first, padding)
    grid = recipe.launch.grid(n)
    KERNELS.launch("kernels_backward", "mark_rows_kernel", recipe, grid, (indices, keys, marks), scalars)
    return marks


@contextlib.contextmanager
def _beside(written: Tensor) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """A context for launches that run beside those outside it until the end of this one, if that pays.

    They go to a stream of high priority: the others, however many programs they have, leave them room.
    """
    if written.nbytes < _BESIDE_BYTES:
        yield contextlib.nullcontext()
        return
    main, side = torch.cuda.current_stream(written.device), _side_stream(written.device)
    side.wait_stream(main)
    try:
        yield torch.cuda.stream(side)
    finally:
        main.wait_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _rows_side_by_side(rows: Tensor) -> Tensor:
    """The tensor [n, D], copied only if the elements of a row are not next to each other."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


@functools.lru_cache(maxsize=4096)
def _recipe(
    choose: Callable[[int, int, Device], tiling.Launch],
    width: int,
    itemsize: int,
    device: Device,
    modes: tuple[tuple[str, int], ...],
) -> Recipe:
    return Recipe.of(choose(width, itemsize, device), dict(modes))


@functools.lru_cache(maxsize=256)
def _mark_recipe(device: Device, keys: bool) -> Recipe:
    return Recipe.of(tiling.MarkLaunch(device), {"KEYS": keys})


def _smaller(recipe: Recipe) -> Recipe | None:
    return recipe.smaller(tiling.smaller)
