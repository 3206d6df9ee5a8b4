"""From tensors to kernel launches: sorting, tiling, allocation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from npu_tiling import Device, Kernels, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import INT32_END
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from . import reference, tiling

KERNELS = Kernels(__package__, "npu-embedding")
FIRST_KEY = 0x00800000  # of the keys that Ascend sorts, see kernels/sort.py
_MOST_KEYS = 2**31 - 2**24  # below infinity
_FEW = 256  # indices that each program of a launch looks through, instead of a sort (CUDA)
_BESIDE_BYTES = 2**26  # zeros for a table of this size take as long as a sort of its indices
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
    weight = _rows_side_by_side(weight)
    flat = indices.reshape(-1).contiguous()
    scalars = (flat.numel(), first, first + n_rows, n_total, weight.stride(0))
    spec = _spec(tiling.forward_launch, width, weight.dtype.itemsize, device, (("NAN", _NAN_BITS[weight.dtype]),))
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
    if device.kind != "cuda":
        ordered, order = _sorted_keys(flat, n_rows, -1, first, device)
        _sum_runs(dweight, dy, ordered, order, padding, scale_grad_by_freq, FIRST_KEY, device)
        return dweight
    if flat.numel() <= _FEW:
        _sum_few(dweight.zero_(), dy, flat, padding, scale_grad_by_freq, first, device)
        return dweight
    # 32 bits are half the passes of a radix sort.
    key_dtype = torch.int32 if last < INT32_END else torch.int64
    keys = allocate(flat, flat.shape, key_dtype)
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
    out = allocate(dy, (ordered.numel(), dy.shape[-1]), dy.dtype)
    if out.numel():
        _sum_runs(out, dy, ordered, order, -1, scale_by_count, 0, device)
        if device.kind == "cuda":
            _store_zeros(out, _mark_rows(ordered, None, out.shape[0], -1, 0, device), -1, device)
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
    spec = _index_spec(tiling.keys_launch, device)
    scalars = (n, n_rows, first, padding)
    KERNELS.launch("kernels.sort", "sort_keys_kernel", spec, spec.launch.grid(n), (indices, keys), scalars)
    ordered, order = torch.sort(keys.view(torch.float32), stable=True)
    return ordered.view(torch.int32), order


def _offsets(ordered: Tensor, n_rows: int, first: int, device: Device) -> Tensor:
    """Offsets [n_rows + 1] of the runs: how many of `ordered` are less than first + r."""
    n = ordered.numel()
    dtype = torch.int32 if n < INT32_END else torch.int64
    if device.kind == "cuda":
        bounds = torch.arange(first, first + n_rows + 1, dtype=ordered.dtype, device=ordered.device)
        return torch.searchsorted(ordered, bounds, out_int32=dtype == torch.int32)
    offsets = allocate(ordered, (n_rows + 1,), dtype)
    spec = _index_spec(tiling.offsets_launch, device)
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
    """Writes the rows that have a run: r, but for `padding`, where `ordered` is first + r. On Ascend zeros in the others."""
    (n_rows, width), n = dweight.shape, ordered.numel()
    rows = _rows_side_by_side(dy.reshape(-1, width))
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

    spec = _spec(tiling.runs_launch, width, itemsize, device, flags)
    partials = launch_with_fallback("embedding backward, sums", spec, run, tiling.smaller)
    chunks = partials.shape[1]

    on_cuda = device.kind == "cuda"
    kernel = "add_partials_kernel" if on_cuda else "finish_rows_kernel"

    def finish(spec: LaunchSpec) -> None:
        tensors = (partials, ordered, offsets, dweight)
        grid = spec.launch.grid(chunks) if on_cuda else spec.launch.grid(n_rows)
        KERNELS.launch("kernels.backward", kernel, spec, grid, tensors, (n_rows, chunks, *numbers))

    if chunks > 1 or not on_cuda:
        spec = _spec(tiling.partials_launch if on_cuda else tiling.finish_launch, width, itemsize, device, flags)
        launch_with_fallback("embedding backward, partial sums", spec, finish, tiling.smaller)


def _sum_few(
    dweight: Tensor, dy: Tensor, indices: Tensor, padding: int, scale_by_count: bool, first: int, device: Device
) -> None:
    """Writes the rows that `_FEW` indices [n] or less name."""
    (n_rows, width), n = dweight.shape, indices.numel()
    rows = _rows_side_by_side(dy.reshape(-1, width))
    scalars = (n, n_rows, first, padding, rows.stride(0))

    def run(spec: LaunchSpec) -> None:
        grid = n * spec.launch.column_blocks
        KERNELS.launch("kernels.cuda", "sum_few_kernel", spec, grid, (rows, indices, dweight), scalars)

    flags = (("SCALE_BY_COUNT", scale_by_count), ("BLOCK_M", _FEW))
    spec = _spec(tiling.runs_launch, width, dy.dtype.itemsize, device, flags)
    launch_with_fallback("embedding backward, few indices", spec, run, tiling.smaller)


def _store_zeros(dweight: Tensor, rows: Tensor, padding: int, device: Device) -> None:
    """Writes the rows of dweight that have no run, by their marks (CUDA)."""
    n_rows, width = dweight.shape

    def run(spec: LaunchSpec) -> None:
        grid = spec.launch.grid(n_rows)
        KERNELS.launch("kernels.backward", "store_zeros_kernel", spec, grid, (dweight, rows), (n_rows, padding))

    spec = _spec(tiling.zeros_launch, width, dweight.dtype.itemsize, device, ())
    launch_with_fallback("embedding backward, zeros", spec, run, tiling.smaller)


def _mark_rows(indices: Tensor, keys: Tensor | None, n_rows: int, padding: int, first: int, device: Device) -> Tensor:
    """Marks [n_rows] of the rows that `indices` name, and `keys` to sort by: `indices`, with less outside the table."""
    marks = torch.zeros(n_rows, dtype=torch.int8, device=indices.device)
    n = indices.numel()
    spec = _index_spec(tiling.mark_launch, device, (("KEYS", keys is not None),))
    scalars = (n, n_rows, first, padding)
    grid = spec.launch.grid(n)
    KERNELS.launch("kernels.cuda", "mark_rows_kernel", spec, grid, (indices, keys, marks), scalars)
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
def _spec(
    choose: Callable[[int, int, Device], tiling.Launch],
    width: int,
    itemsize: int,
    device: Device,
    flags: tuple[tuple[str, int], ...],
) -> LaunchSpec:
    return LaunchSpec.of(choose(width, itemsize, device), dict(flags))


@functools.lru_cache(maxsize=256)
def _index_spec(
    choose: Callable[[Device], tiling.IndexLaunch], device: Device, flags: tuple[tuple[str, int], ...] = ()
) -> LaunchSpec:
    return LaunchSpec.of(choose(device), dict(flags))
