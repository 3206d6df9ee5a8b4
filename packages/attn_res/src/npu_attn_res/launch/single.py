"""From blocks to kernel launches: whole rows, one launch each way. Rows and layers that do not fit: split_d.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.budget.arithmetic import power_of_two
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference, tiling
from . import split_d
from .sources import KERNELS, Blocks, rows_of, table_of


def forward(
    blocks: Blocks,
    w_query: Tensor,
    w_norm: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
    device: Device,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """h [T, D]; y [T, D], None without a weight; s, r, lse and 1 / rms(h) where `save`."""
    like, n_blocks, n_tokens = blocks.tensors[0], blocks.n_blocks, blocks.n_tokens
    h = allocate(like, (n_tokens, blocks.width), blocks.dtype)
    y = None if norm_weight is None else allocate(h, h.shape, h.dtype)
    score, rstd, lse, norm_rstd = None, None, None, None
    if save:
        score, rstd = (allocate(h, (n_blocks, n_tokens), torch.float32) for _ in range(2))
        lse = allocate(h, (n_tokens,), torch.float32)
        norm_rstd = None if y is None else allocate(h, (n_tokens,), torch.float32)
    if not n_tokens:
        return h, y, score, rstd, lse, norm_rstd
    weights = w_query.contiguous(), w_norm.contiguous(), None if norm_weight is None else norm_weight.contiguous()
    name = "forward" if norm_weight is None else "forward, normalised"
    flags = (("NORMALISE", True), ("ALIGNED", blocks.aligned))
    spec = row_spec(name, blocks, blocks.s_token, flags, device)
    numbers = (n_blocks, n_tokens, blocks.s_block, blocks.s_token)

    def run(spec: LaunchSpec) -> bool:
        launch = spec.launch
        grid, common = launch.grid(n_tokens), (blocks.base, blocks.table, *weights, h, y, score, rstd, lse)
        if launch.block_n:
            tensors: tuple[Any, ...] = (*common, norm_rstd)
            scalars: tuple[Any, ...] = (*numbers, eps, norm_eps)
            KERNELS.launch("kernels.cuda", "attn_res_forward_sources_kernel", spec, grid, tensors, scalars)
        elif launch.whole_rows:
            tensors = (*common, None, norm_rstd)
            scalars = (*numbers, blocks.width, eps, norm_eps)
            module, kernel = launch.forward_kernel
            KERNELS.launch(module, kernel, spec, grid, tensors, scalars)
        return launch.whole_rows

    if spec is not None and launch_with_fallback("attn_res forward", spec, run, smaller):
        return h, y, score, rstd, lse, norm_rstd
    g = reference.fuse_qk_weight(w_query, w_norm).unsqueeze(0)
    scores, rstd = split_d.scores(blocks, g, eps, device)
    # One token's at a time: PyTorch adds in an order that is the same for any number of tokens.
    total = torch.logsumexp(scores.movedim(0, -1).contiguous(), -1)
    h = split_d.weighted_sum(blocks, torch.exp(scores - total), blocks.dtype, device).view(h.shape)
    if norm_weight is not None:
        y, norm_rstd = split_d.normalise(h, norm_weight, norm_eps, device)
    return h, y, scores.squeeze(-1), rstd, total.squeeze(-1), norm_rstd


def backward(
    dh: Tensor,
    h: Tensor | None,
    blocks: Blocks,
    w_query: Tensor,
    w_norm: Tensor,
    score: Tensor,
    rstd: Tensor,
    lse: Tensor,
    gradients: Sequence[Tensor | None],
    needed: tuple[bool, bool],
    device: Device,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes the gradients of the blocks to `gradients` and returns those of w_query and w_norm, where needed.

    h: the forward's, where it was not rounded (fp32).
    """
    if not blocks.n_tokens:
        return torch.zeros_like(w_query), torch.zeros_like(w_norm)
    dh, s_dh = rows_of(dh)
    w_query, w_norm = w_query.contiguous(), w_norm.contiguous()
    dv, dv_table, aligned = gradient_pointers(gradients, blocks.aligned, device)
    name = "backward from fp32" if dh.dtype == torch.float32 else "backward"
    spec = row_spec(name, blocks, max(blocks.s_token, s_dh), (("ALIGNED", aligned),), device)
    scalars = (blocks.n_blocks, blocks.n_tokens, blocks.s_block, blocks.s_token, s_dh)

    def run(spec: LaunchSpec) -> tuple[bool, Tensor | None]:
        launch = spec.launch
        if not launch.whole_rows:
            return False, None
        grid = launch.grid(blocks.n_tokens)
        dg = allocate(dh, (grid, blocks.width), torch.float32) if any(needed) else None
        common = (blocks.base, blocks.table, w_query, w_norm, score, rstd, lse, dv, dv_table, dg)
        if launch.block_n:
            KERNELS.launch("kernels.cuda", "attn_res_backward_sources_kernel", spec, grid, (dh, *common), scalars)
        else:
            KERNELS.launch("kernels.backward", "attn_res_backward_kernel", spec, grid, (dh, h, *common), scalars)
        return True, dg

    if spec is not None:
        done, partials = launch_with_fallback("attn_res backward", spec, run, smaller)
        if done:
            return weights_gradient(partials, w_query, w_norm, needed, device)
    g = reference.fuse_qk_weight(w_query, w_norm).unsqueeze(0)
    do = dh.reshape(blocks.n_tokens, 1, blocks.width)
    weights = torch.exp(score - lse).unsqueeze(-1)
    dscore = reference.softmax_backward(weights, split_d.products(blocks, do, device))
    ds_rstd, dv_coef = reference.score_gradients(score.unsqueeze(-1), rstd, dscore, blocks.width)
    dg = split_d.gradients(blocks, do, g, weights, ds_rstd, dv_coef, (dv, dv_table, aligned), any(needed), device)
    return reference.fuse_qk_weight_backward(dg, w_query, w_norm, needed)


def gradient_pointers(gradients: Sequence[Tensor | None], aligned: bool, device: Device) -> tuple[Any, Tensor | None, bool]:
    """Where a kernel writes the gradients of the blocks: pointer and table, None where there is nothing to write.

    And whether the entries of both tables, that of the blocks being `aligned`, are.
    """
    if all(gradient is None for gradient in gradients):
        return None, None, aligned
    dv, table, also = table_of(gradients, device)
    return dv, table, aligned and also


def weights_gradient(
    partials: Tensor | None, w_query: Tensor, w_norm: Tensor, needed: tuple[bool, bool], device: Device
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of w_query and w_norm, from partial sums of dg [n, D]."""
    if partials is None:
        return None, None
    dquery, dnorm = (
        allocate(w, w.shape, w.dtype) if need else None for w, need in zip((w_query, w_norm), needed, strict=True)
    )
    spec = _weights_spec(partials.shape[1], device)
    tensors = (partials, w_query, w_norm, dquery, dnorm)
    grid = spec.launch.grid
    KERNELS.launch("kernels.backward", "attn_res_weights_kernel", spec, grid, tensors, (partials.shape[0],))
    return dquery, dnorm


def row_spec(
    name: str, blocks: Blocks, row_stride: int, flags: tuple[tuple[str, bool], ...], device: Device
) -> LaunchSpec | None:
    """The launch of a kernel for whole rows of blocks; None where none fit."""
    if device.kind != "cuda":
        return cached_spec(name, blocks.width, blocks.dtype, 1, row_stride, 0, flags, device)
    number, listed = power_of_two(blocks.n_blocks), blocks.table is not None
    return cached_spec(name, blocks.width, blocks.dtype, 1, row_stride, number, flags, device, listed)


@functools.lru_cache(maxsize=4096)
def cached_spec(
    name: str,
    width: int,
    dtype: torch.dtype,
    layers: int,
    row_stride: int,
    n_blocks: int,
    flags: tuple[tuple[str, bool], ...],
    device: Device,
    listed: bool = False,
) -> LaunchSpec | None:
    """The launch of a kernel for whole rows; None where none fit."""
    problem = tiling.Problem(name, width, dtype.itemsize, layers, row_stride, n_blocks, listed)
    launch = tiling.row_launch(problem, device)
    if launch is None:
        return None
    chosen = dict(flags)
    if launch.block_n:
        chosen.pop("NORMALISE", None)
    return LaunchSpec.of(launch, chosen)


@functools.lru_cache(maxsize=4096)
def _weights_spec(width: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(tiling.weights_launch(width, device), {})


def smaller(spec: LaunchSpec) -> LaunchSpec | None:
    """For `launch_with_fallback`."""
    return spec.smaller(tiling.smaller)
