"""From tensors to kernel launches: the two phases of Block AttnRes, and the gradient of the RMSNorm that may follow.

`merge` and the RMSNorm take whole rows; where those do not fit on chip, reference.py's formulas run as PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import reference
from . import split_d
from .single import cached_spec, gradient_pointers, smaller, weights_gradient
from .sources import KERNELS, Blocks, rows_of


def phase1(
    blocks: Blocks, queries: Tensor, w_norm: Tensor, eps: float, save: bool, device: Device
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """o [T, S, D], max and sum [T, S]; s [N, T, S] and r [N, T] where `save`."""
    n_layers, width, n_blocks, n_tokens = len(queries), blocks.width, blocks.n_blocks, blocks.n_tokens
    like = blocks.tensors[0]
    o = allocate(like, (n_tokens, n_layers, width), torch.float32)
    maximum, total = (allocate(like, (n_tokens, n_layers), torch.float32) for _ in range(2))
    score = allocate(like, (n_blocks, n_tokens, n_layers), torch.float32) if save else None
    rstd = allocate(like, (n_blocks, n_tokens), torch.float32) if save else None
    if not n_tokens:
        return o, maximum, total, score, rstd
    queries, w_norm = queries.contiguous(), w_norm.contiguous()
    s_norm = 0 if w_norm.dim() == 1 and n_layers > 1 else width
    name = "phase 1" if n_layers == 1 and device.kind == "ascend" else "forward of layers"
    flags = (("NORMALISE", False), ("ALIGNED", blocks.aligned))
    spec = cached_spec(name, width, blocks.dtype, n_layers, blocks.s_token, 0, flags, device)
    scalars = (n_blocks, n_tokens, blocks.s_block, blocks.s_token, s_norm, eps, eps)

    def run(spec: LaunchSpec) -> bool:
        if spec.launch.whole_rows:
            tensors = (blocks.base, blocks.table, queries, w_norm, None, o, None, score, rstd, maximum, total, None)
            grid = spec.launch.grid(n_tokens)
            module, kernel = spec.launch.forward_kernel
            KERNELS.launch(module, kernel, spec, grid, tensors, scalars)
        return spec.launch.whole_rows

    if spec is not None and launch_with_fallback("attn_res phase 1", spec, run, smaller):
        return o, maximum, total, score, rstd
    score, rstd = split_d.scores(blocks, reference.fuse_qk_weight(queries, w_norm), eps, device)
    maximum = score.amax(0)
    weights = torch.exp(score - maximum)
    return split_d.weighted_sum(blocks, weights, torch.float32, device), maximum, weights.sum(0), score, rstd


def phase1_backward(
    do: Tensor | None,
    dmaximum: Tensor | None,
    dtotal: Tensor | None,
    blocks: Blocks,
    queries: Tensor,
    w_norm: Tensor,
    maximum: Tensor,
    score: Tensor,
    rstd: Tensor,
    gradients: Sequence[Tensor | None],
    needed: tuple[bool, bool],
    device: Device,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes the gradients of the blocks to `gradients` and returns those of the queries and of w_norm, where needed.

    do is [T, S, D], dmaximum and dtotal are [T, S], each None where there is none.
    """
    if do is None:
        do = torch.zeros(1, 1, 1, device=score.device).expand(*maximum.shape, blocks.width).contiguous()
    elif do.stride(2) != 1:
        do = do.contiguous()
    e = split_d.products(blocks, do, device)
    weights, dscore = reference.exponentials_backward(score, maximum, e, dmaximum, dtotal)
    ds_rstd, dv_coef = reference.score_gradients(score, rstd, dscore, blocks.width)
    outputs = gradient_pointers(gradients, blocks.aligned, device)
    g = reference.fuse_qk_weight(queries, w_norm)
    dg = split_d.gradients(blocks, do, g, weights, ds_rstd, dv_coef, outputs, any(needed), device)
    return reference.fuse_qk_weight_backward(dg, queries, w_norm, needed)


def merge(
    o: Tensor,
    maximum: Tensor,
    total: Tensor,
    partial: Tensor,
    x: Tensor | None,
    w_query: Tensor,
    w_norm: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
    save: bool,
    device: Device,
) -> Sequence[Tensor | None]:
    """h, y, partial + x, then s, r, lse and 1 / rms(h) [T] where `save`; o and partial are [..., D], max and sum [...]."""
    width = partial.shape[-1]
    n_tokens = maximum.numel()
    h = allocate(partial, partial.shape, partial.dtype)
    y = None if norm_weight is None else allocate(h, h.shape, h.dtype)
    joined = None if x is None else allocate(h, h.shape, h.dtype)
    kept = (save, save, save, save and norm_weight is not None)  # s, r, lse, 1 / rms(h)
    statistics = [allocate(h, (n_tokens,), torch.float32) if there else None for there in kept]
    if not n_tokens:
        return h, y, joined, *statistics
    (o, s_o), (partial, s_partial) = rows_of(o), rows_of(partial)
    (x, s_x) = (None, 0) if x is None else rows_of(x)
    maximum, total = maximum.contiguous(), total.contiguous()
    weights = w_query.contiguous(), w_norm.contiguous(), None if norm_weight is None else norm_weight.contiguous()

    def run(spec: LaunchSpec) -> bool:
        if spec.launch.whole_rows:
            tensors = (o, maximum, total, partial, x, *weights, h, y, joined, *statistics)
            scalars = (n_tokens, s_o, s_partial, s_x, eps, norm_eps)
            grid = spec.launch.grid(n_tokens)
            KERNELS.launch("kernels.merge", "attn_res_merge_kernel", spec, grid, tensors, scalars)
        return spec.launch.whole_rows

    if _whole_rows("merge", width, partial.dtype, (s_o, s_partial, s_x), device, run):
        return h, y, joined, *statistics
    return merge_formula(o, maximum, total, partial, x, w_query, w_norm, norm_weight, eps, norm_eps)


def merge_formula(
    o: Tensor,
    maximum: Tensor,
    total: Tensor,
    partial: Tensor,
    x: Tensor | None,
    w_query: Tensor,
    w_norm: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    norm_eps: float,
) -> Sequence[Tensor | None]:
    """The same by PyTorch's operators, on any device, in fp64 too."""
    joined = y = norm_rstd = None
    if x is not None:
        joined = partial = (partial.to(o.dtype) + x).to(partial.dtype)
    flat = (o.reshape(-1, o.shape[-1]), maximum.reshape(-1), total.reshape(-1), partial.reshape(-1, o.shape[-1]))
    wide, *found = reference.merge(*flat, reference.fuse_qk_weight(w_query, w_norm, o.dtype), eps)
    h = wide.to(partial.dtype).view(partial.shape)
    if norm_weight is not None:
        y, norm_rstd = reference.normalise(h, norm_weight, norm_eps)
        norm_rstd = norm_rstd.view(-1)
    return h, y, joined, *found, norm_rstd


def merge_backward(
    dh: Tensor,
    dpartial: Tensor | None,
    o: Tensor,
    maximum: Tensor,
    total: Tensor,
    partial: Tensor,
    w_query: Tensor,
    w_norm: Tensor,
    score: Tensor,
    rstd: Tensor,
    lse: Tensor,
    needed: tuple[bool, bool],
    device: Device,
) -> Sequence[Tensor | None]:
    """do, dmax, dsum, the gradient of the (new) partial sum with `dpartial` added, and those of w_query and w_norm."""
    width, n_tokens = partial.shape[-1], maximum.numel()
    do, dblock = allocate(o, o.shape, torch.float32), allocate(o, partial.shape, partial.dtype)
    dmaximum, dtotal = (allocate(o, maximum.shape, torch.float32) for _ in range(2))
    if not n_tokens:
        return do, dmaximum, dtotal, dblock, *(torch.zeros_like(w) for w in (w_query, w_norm))
    (dh, s_dh), (o, s_o), (partial, s_partial) = rows_of(dh), rows_of(o), rows_of(partial)
    (dpartial, s_dpartial) = (None, 0) if dpartial is None else rows_of(dpartial)
    maximum, total = maximum.contiguous(), total.contiguous()
    w_query, w_norm = w_query.contiguous(), w_norm.contiguous()
    strides = (s_dh, s_dpartial, s_o, s_partial)
    found: list[Tensor | None] = []

    def run(spec: LaunchSpec) -> bool:
        launch = spec.launch
        if launch.whole_rows:
            grid = launch.grid(n_tokens)
            dg = allocate(o, (grid, width), torch.float32) if any(needed) else None
            read = (dh, dpartial, o, maximum, total, partial, w_query, w_norm, score, rstd, lse)
            tensors = (*read, do, dmaximum, dtotal, dblock, dg)
            scalars = (n_tokens, *strides)
            KERNELS.launch("kernels.merge", "attn_res_merge_backward_kernel", spec, grid, tensors, scalars)
            found[:] = weights_gradient(dg, w_query, w_norm, needed, device)
        return launch.whole_rows

    if _whole_rows("merge backward", width, partial.dtype, strides, device, run):
        return do, dmaximum, dtotal, dblock, *found
    return merge_backward_formula(dh, dpartial, o, maximum, total, partial, w_query, w_norm, score, rstd, lse, needed)


def merge_backward_formula(
    dh: Tensor,
    dpartial: Tensor | None,
    o: Tensor,
    maximum: Tensor,
    total: Tensor,
    partial: Tensor,
    w_query: Tensor,
    w_norm: Tensor,
    score: Tensor,
    rstd: Tensor,
    lse: Tensor,
    needed: tuple[bool, bool],
) -> Sequence[Tensor | None]:
    """The same by PyTorch's operators, on any device, in fp64 too."""
    flat = lambda rows: rows.reshape(-1, rows.shape[-1])  # noqa: E731
    read = (flat(dh), None if dpartial is None else flat(dpartial), flat(o), maximum.reshape(-1), total.reshape(-1))
    g = reference.fuse_qk_weight(w_query, w_norm, o.dtype)
    do, dmaximum, dtotal, wide, dg = reference.merge_backward(*read, flat(partial), g, score, rstd, lse)
    statistics = dmaximum.view(maximum.shape), dtotal.view(maximum.shape)
    block = wide.to(partial.dtype).view(partial.shape)
    return do.view(o.shape), *statistics, block, *reference.fuse_qk_weight_backward(dg, w_query, w_norm, needed)


def normalise_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, norm_rstd: Tensor, need_dweight: bool, device: Device
) -> tuple[Tensor, Tensor | None]:
    """The whole gradient of h, fp32, contiguous, and that of the weight, where needed."""
    width, n_tokens = h.shape[-1], norm_rstd.numel()
    whole = allocate(h, h.shape, torch.float32)
    if not n_tokens:
        return whole, torch.zeros_like(weight)
    dy, s_dy = rows_of(dy)
    (dh, s_dh) = (None, 0) if dh is None else rows_of(dh)
    weight = weight.contiguous()
    found: list[Tensor | None] = []

    def run(spec: LaunchSpec) -> bool:
        if spec.launch.whole_rows:
            grid = spec.launch.grid(n_tokens)
            dweight = allocate(h, (grid, width), torch.float32) if need_dweight else None
            tensors, scalars = (dy, dh, h, weight, norm_rstd, whole, dweight), (n_tokens, s_dy, s_dh)
            KERNELS.launch("kernels.merge", "attn_res_norm_backward_kernel", spec, grid, tensors, scalars)
            found[:] = [None if dweight is None else dweight.sum(0).to(weight.dtype)]
        return spec.launch.whole_rows

    if _whole_rows("norm backward", width, h.dtype, (s_dy, s_dh), device, run):
        return whole, found[0]
    return reference.normalise_backward(dy, dh, h, weight, norm_rstd.view(h.shape[:-1]))


def _whole_rows(
    name: str,
    width: int,
    dtype: torch.dtype,
    strides: tuple[int, ...],
    device: Device,
    run: Callable[[LaunchSpec], bool],
) -> bool:
    """Whether a kernel for whole rows did it."""
    spec = cached_spec(name, width, dtype, 1, max(strides), 0, (), device)
    return spec is not None and launch_with_fallback(f"attn_res {name}", spec, run, smaller)
