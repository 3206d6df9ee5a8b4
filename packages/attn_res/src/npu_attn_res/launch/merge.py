"""The launches of `merge` and its gradient: whole rows. Where those do not fit on chip: the definition's formulas."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from .. import reference, tiling
from ..calls import Merge, MergeBackward
from ..shape import Task
from .sources import rows_of
from .specs import KERNELS, launch_spec, widest
from .weights import add_partials, zeros


def launch_merge(call: Merge, device: Device) -> tuple[Tensor | None, ...]:
    """h, its RMSNorm and the new prefix [..., D], and s, r and 1 / rms(h) [T]; None for what was not asked for."""
    prefix, x, n_tokens = call.prefix, call.layer_output, call.lse.numel()
    h = allocate_like(prefix)
    y = None if call.output_rms_weight is None else allocate_like(h)
    new_prefix = None if x is None else allocate_like(h)
    asked = (call.save, call.save, call.save and y is not None)
    statistics = [allocate(h, (n_tokens,), torch.float32) if each else None for each in asked]
    if not n_tokens:
        return h, y, new_prefix, *statistics
    (o, s_o), (rows, s_prefix), (x, s_x) = rows_of(call.o), rows_of(prefix), (None, 0) if x is None else rows_of(x)
    norm_weight = call.output_rms_weight
    weights = (
        call.query.contiguous(),
        call.rms_weight.contiguous(),
        None if norm_weight is None else norm_weight.contiguous(),
    )
    tensors = (o, call.lse.contiguous(), rows, x, *weights, h, y, new_prefix, *statistics)
    scalars = (n_tokens, s_o, s_prefix, s_x, call.eps, call.norm_eps)
    dtype = prefix.dtype if x is None else widest(prefix.dtype, x.dtype)
    spec = launch_spec(device, Task.MERGE, prefix.shape[-1], dtype, row_stride=max(s_o, s_prefix, s_x))

    def run(spec: LaunchSpec) -> bool:
        chosen = spec.launch
        if chosen.has_whole_rows:
            KERNELS.launch(chosen.kernel.module, chosen.kernel.name, spec, chosen.grid(n_tokens), tensors, scalars)
        return chosen.has_whole_rows

    if spec is not None and launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller):
        return h, y, new_prefix, *statistics
    return reference.merge(call)


def launch_merge_backward(call: MergeBackward, dh: Tensor, device: Device) -> tuple[Tensor | None, ...]:
    """Computes do, dlse and the gradients of prefix, query and rms_weight from dh, the gradient of h."""
    prefix, width, n_tokens = call.prefix, call.prefix.shape[-1], call.lse.numel()
    do, dlse = allocate(dh, call.o.shape, torch.float32), allocate(dh, call.lse.shape, torch.float32)
    dprefix_sum, dg = allocate_like(prefix), None
    if not n_tokens:
        return do, dlse, dprefix_sum, *zeros(call.query, call.rms_weight, call.need_weights)
    (rows, s_dh), (o, s_o), (p, s_prefix) = rows_of(dh), rows_of(call.o), rows_of(prefix)
    dprefix, s_dprefix = (None, 0) if call.dprefix is None else rows_of(call.dprefix)
    query, norm, lse = call.query.contiguous(), call.rms_weight.contiguous(), call.lse.contiguous()
    score, rstd = call.score.contiguous(), call.rstd.contiguous()
    scalars = (n_tokens, s_dh, s_dprefix, s_o, s_prefix)
    spec = launch_spec(device, Task.MERGE_BACKWARD, width, prefix.dtype, row_stride=max(s_dh, s_dprefix, s_o, s_prefix))

    def run(spec: LaunchSpec) -> bool:
        nonlocal dg
        chosen = spec.launch
        if chosen.has_whole_rows:
            grid = chosen.grid(n_tokens)
            needs_dg = call.need_weights[0] or call.need_weights[1]
            dg = allocate(dh, (grid, width), torch.float32) if needs_dg else None
            tensors = (rows, dprefix, o, lse, p, query, norm, score, rstd, do, dlse, dprefix_sum, dg)
            KERNELS.launch(chosen.kernel.module, chosen.kernel.name, spec, grid, tensors, scalars)
        return chosen.has_whole_rows

    if spec is None or not launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller):
        return reference.merge_backward(call, dh)
    return do, dlse, dprefix_sum, *add_partials(dg, query, norm, call.need_weights, device)
