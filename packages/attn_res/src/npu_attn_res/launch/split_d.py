"""Launches of the kernels that take columns: for rows that do not fit on chip, and for the layers of `phase1`.

The functions are those of reference.py, by the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference, tiling
from .sources import KERNELS, Blocks, follow


def scores(blocks: Blocks, g: Tensor, eps: float, device: Device) -> tuple[Tensor, Tensor]:
    """s [N, T, S] and r [N, T] with g [S, D]."""
    dot, square = _products(blocks, g, 0, g.stride(0) if len(g) > 1 else 0, len(g), True, device)
    assert square is not None
    rstd = torch.rsqrt(_added(square) / blocks.width + eps)
    return _added(dot) * rstd.unsqueeze(-1), rstd


def _added(partials: Tensor) -> Tensor:
    """Partial sums [n, ...] over n, side by side: PyTorch adds in an order that is the same for any number of tokens."""
    return partials.movedim(0, -1).contiguous().sum(-1)


def normalise(h: Tensor, weight: Tensor, eps: float, device: Device) -> tuple[Tensor, Tensor]:
    """y and 1 / rms(h) of h [T, D]; the sums of a row do not depend on how many there are, as PyTorch's of long rows do."""
    rstd = scores(follow([h], False, device), reference.fuse_qk_weight(weight, weight).unsqueeze(0), eps, device)[1][0]
    return reference.scaled(h, weight, rstd), rstd


def products(blocks: Blocks, do: Tensor, device: Device) -> Tensor:
    """[N, T, S]: <do, v_i> of do [T, S, D]."""
    n_layers = do.shape[1]
    s_row = do.stride(1) if n_layers > 1 else do.stride(0)
    return _products(blocks, do, do.stride(0), s_row, n_layers, False, device)[0].sum(0)


def weighted_sum(blocks: Blocks, weights: Tensor, dtype: torch.dtype, device: Device) -> Tensor:
    """[T, S, D] in `dtype`: the sum of the blocks with weights [N, T, S]."""
    n_layers = weights.shape[2]
    o = allocate(weights, (blocks.n_tokens, n_layers, blocks.width), dtype)
    weights = weights.contiguous()

    def run(spec: LaunchSpec) -> None:
        tensors = (blocks.base, blocks.table, weights, o)
        scalars = (blocks.n_blocks, blocks.n_tokens, blocks.s_block, blocks.s_token)
        grid = spec.launch.grid(blocks.n_tokens)
        KERNELS.launch("kernels.split_d", "attn_res_weighted_sum_kernel", spec, grid, tensors, scalars)

    _run("weighted sum", blocks, n_layers, blocks.aligned, device, run)
    return o


def gradients(
    blocks: Blocks,
    do: Tensor,
    g: Tensor,
    weights: Tensor,
    ds_rstd: Tensor,
    dv_coef: Tensor,
    outputs: tuple[Any, Tensor | None, bool],
    need_dg: bool,
    device: Device,
) -> Tensor:
    """Writes dv to `outputs` (see `launch.gradient_pointers`) and returns dg [S, D], which is nothing unless `need_dg`."""
    n_layers = len(g)
    dv, dv_table, aligned = outputs
    s_row = do.stride(1) if n_layers > 1 else do.stride(0)
    rows = (g.contiguous(), weights.contiguous(), ds_rstd.contiguous(), dv_coef.contiguous())
    strides = (do.stride(0), s_row)

    def run(spec: LaunchSpec) -> Tensor | None:
        launch = spec.launch
        splits = launch.splits(blocks.n_tokens)
        partials = allocate(g, (splits, n_layers, blocks.width), torch.float32) if need_dg else None
        tensors = (blocks.base, blocks.table, do, *rows, dv, dv_table, partials)
        scalars = (blocks.n_blocks, blocks.n_tokens, splits, blocks.s_block, blocks.s_token, *strides)
        grid = splits * launch.column_blocks
        KERNELS.launch("kernels.split_d", "attn_res_gradient_kernel", spec, grid, tensors, scalars)
        return partials

    partials = _run("gradient", blocks, n_layers, aligned, device, run)
    return torch.empty(0, device=g.device) if partials is None else partials.sum(0)


def _products(
    blocks: Blocks, a: Tensor, s_token: int, s_row: int, n_layers: int, squares: bool, device: Device
) -> tuple[Tensor, Tensor | None]:
    """Partial sums, one for each block of columns, of <a, v_i> and, where asked for, <v_i, v_i>."""

    def run(spec: LaunchSpec) -> tuple[Tensor, Tensor | None]:
        shape = (spec.launch.column_blocks, blocks.n_blocks, blocks.n_tokens)
        dot = allocate(a, (*shape, n_layers), torch.float32)
        square = allocate(a, shape, torch.float32) if squares else None
        tensors = (blocks.base, blocks.table, a, dot, square)
        scalars = (blocks.n_blocks, blocks.n_tokens, blocks.s_block, blocks.s_token, s_token, s_row)
        grid = spec.launch.grid(blocks.n_tokens)
        KERNELS.launch("kernels.split_d", "attn_res_products_kernel", spec, grid, tensors, scalars)
        return dot, square

    return _run("products", blocks, n_layers, blocks.aligned, device, run)


def _run(
    kernel: str,
    blocks: Blocks,
    n_layers: int,
    aligned: bool,
    device: Device,
    run: Callable[[LaunchSpec], Any],
) -> Any:
    problem = tiling.Problem(kernel, blocks.width, blocks.dtype.itemsize, n_layers, blocks.s_token)
    spec = _spec(problem, aligned, device)
    return launch_with_fallback(f"attn_res {kernel}", spec, run, _smaller)


@functools.lru_cache(maxsize=4096)
def _spec(problem: tiling.Problem, aligned: bool, device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.columns_launch(problem, device), {"ALIGNED": aligned})


def _smaller(spec: LaunchSpec) -> LaunchSpec | None:
    return spec.smaller(tiling.smaller)
