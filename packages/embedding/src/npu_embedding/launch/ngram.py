"""The launch of the n-gram look-up."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import tiling
from .specs import KERNELS, NAN_BITS, as_bits, dense_rows, row_spec

MAX_ROWS = 2**30  # of a table: sizes below are what the remainder on Ascend takes


def forward(
    ids: Tensor,
    history: Tensor | None,
    table: Tensor,
    multipliers: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    eos: int,
    fill: int,
    add: bool,
    concat: bool,
    device: Device,
) -> tuple[Tensor, Tensor]:
    """[B, T, H * D], or [B, T, D] for the sum over heads, and the rows, int32 [H, B, T], -1 where the table has none."""
    (n_rows, width), heads, context = table.shape, sizes.numel(), multipliers.shape[-1] - 1
    if n_rows >= MAX_ROWS:
        raise ValueError(f"table has {n_rows} rows and must have fewer than {MAX_ROWS} on {device.name}.")
    out = allocate(table, (*ids.shape, heads * width if concat else width), table.dtype)
    rows = allocate(ids, (heads, *ids.shape), torch.int32)
    if not rows.numel() or not width:
        return out, rows.fill_(-1)
    if not n_rows:  # a kernel takes no tensor without elements
        return out.fill_(torch.nan), rows.fill_(-1)
    table = dense_rows(table)
    history = None if history is None else history.contiguous()
    before = ids if history is None else history
    # fmt: off
    tensors = (
        ids.contiguous(), before, multipliers.contiguous(), sizes.contiguous(), offsets.contiguous(),
        as_bits(table) if concat else table, as_bits(out) if concat else out, rows,
    )
    # fmt: on
    n_batches, n_tokens = ids.shape
    first = n_batches * n_tokens if device.kind == "cuda" else n_batches
    scalars = (first, n_tokens, n_rows, eos, fill, table.stride(0))
    choose = tiling.ngram_launch if concat else tiling.ngram_sum_launch
    flags = {"CONTEXT": context, "HEADS": heads // context, "HISTORY": history is not None, "ADD": add, "CONCAT": concat}
    flags["OWN"] = multipliers.dim() == 2
    flags["NAN"] = NAN_BITS[table.dtype]
    spec = row_spec(choose, width, table.dtype.itemsize, device, **flags)
    module = f"{device.kind}.ngram"

    def run(spec: LaunchSpec) -> None:
        grid = tiling.ngram_grid(spec.launch, n_batches, n_tokens, heads if concat else 1)
        KERNELS.launch(module, "ngram_rows_kernel", spec, grid, tensors, scalars)

    launch_with_fallback("n-gram embedding", spec, run, tiling.smaller)
    return out, rows
