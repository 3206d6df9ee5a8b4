"""The launches of `attn_res_backward`: whole rows, one kernel, and one that adds the partial sums of dg."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from .. import reference, tiling
from ..calls import Backward
from ..shape import Task
from .columns import KernelPasses
from .outputs import keeps_by_token, reads_h
from .sources import rows_of, sources_of
from .specs import KERNELS, launch_spec, widest
from .weights import add_partials

_Gradients = tuple[list[Tensor | None], Tensor | None, Tensor | None, Tensor | None]


def launch_backward(call: Backward, dh: Tensor, device: Device) -> _Gradients | None:
    """The gradients of blocks, prefix, query and rms_weight, from that of h; None for those that are not needed.

    None altogether where whole rows do not fit on chip and there is a prefix.
    """
    gradients = [allocate_like(block) if need else None for block, need in zip(call.blocks, call.need_blocks, strict=True)]
    if call.stacked and gradients[0] is not None and call.prefix is not None:
        uncounted = gradients[0] if call.device_count is not None else gradients[0][call.n_blocks :]
        uncounted.zero_()  # kernels write those of blocks that count
    dprefix_sum = allocate_like(call.prefix) if call.prefix is not None and call.need_prefix else None
    v = sources_of(call, device, gradients)
    if not v.n_tokens:
        return gradients, dprefix_sum, torch.zeros_like(call.query), torch.zeros_like(call.rms_weight)
    need_dg, width = call.need_weights[0] or call.need_weights[1], v.width
    h = call.h if call.h is not None and reads_h(call.h) else None
    query, norm = call.query.contiguous(), call.rms_weight.contiguous()
    dh, s_dh = rows_of(dh)
    dprefix, s_dprefix = (None, 0) if call.dprefix is None or dprefix_sum is None else rows_of(call.dprefix)
    (base, table, aligned, *_), (dv, dv_table, also_aligned, *_) = v.at, v.gradients_at
    has_prefix, dg = v.prefix.rows is not None, None

    def run(spec: LaunchSpec) -> bool:
        nonlocal dg
        chosen = spec.launch
        if not chosen.has_whole_rows:
            return False
        on_cuda = device.kind == "cuda"
        dg = allocate(dh, (chosen.partials(v.n_tokens), width), torch.float32) if need_dg else None
        statistics = (call.score.t(), call.rstd.t()) if chosen.shape.by_token else (call.score, call.rstd)
        score, rstd = [each.contiguous() for each in statistics]  # copied where they lie in the other order
        tensors: Any = (dh,) if on_cuda or chosen.shape.by_token else (dh, h)
        tensors += (base, table, query, norm, score, rstd, call.lse, dv, dv_table, dg, *v.prefix[:2], dprefix, dprefix_sum)
        scalars: Any = (v.n_blocks, v.n_tokens, v.s_block, v.s_token, s_dh, v.n_blocks, v.prefix.stride, s_dprefix)
        if on_cuda:
            if chosen.cooperating:
                tensors += (allocate(dh, (chosen.words(v.n_tokens),), torch.int64).zero_(),)
            tensors += (v.at.others, v.gradients_at.others)
            scalars += (v.gradients_at.needed,)
        KERNELS.launch(chosen.kernel.module, chosen.kernel.name, spec, chosen.grid(v.n_tokens), tensors, scalars)
        return True

    by_token = h is None and keeps_by_token(call, v.like.dtype, device)
    dtype = widest(dh, v.like, v.prefix.rows) if has_prefix else v.like.dtype
    for order in (True, False) if by_token else (False,):
        spec = launch_spec(
            device,
            Task.BACKWARD,
            width,
            # The kernel for statistics by token has no rows of sources in another dtype on chip.
            (dh.dtype if has_prefix else v.like.dtype) if order else dtype,
            row_stride=max(v.s_token, s_dh, v.prefix.stride, s_dprefix),
            n_sources=v.n_blocks,
            prefix=has_prefix,
            fp32_dh=dh.dtype == torch.float32,
            by_token=order,
            aligned=aligned and also_aligned,
        )
        if spec is not None and launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller):
            return gradients, dprefix_sum, *add_partials(dg, query, norm, call.need_weights, device)
    if has_prefix:
        return None
    passes = KernelPasses(v.in_tables(device), device, need_dg=need_dg)
    return gradients, dprefix_sum, *reference.backward(passes, call, dh)
