"""The launches of `attn_res_backward`: whole rows, one kernel, and one that adds the partial sums of dg."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from .. import reference, tiling
from ..calls import Backward
from . import pointers
from .columns import KernelPasses
from .outputs import keeps_by_token, reads_h
from .plan import plan_backward
from .sources import followed, followed_sources, sources_at
from .specs import KERNELS
from .weights import add_partials, zeros

_Gradients = tuple[list[Tensor | None], Tensor | None, Tensor | None, Tensor | None]


def launch_backward(call: Backward, dh: Tensor, device: Device) -> _Gradients | None:
    """Computes the gradients of blocks, prefix, query and rms_weight from dh, the gradient of h; None: it is not needed.

    Returns None in place of all where whole rows do not fit on chip and there is a prefix.
    """
    gradients = [allocate_like(block) if need else None for block, need in zip(call.blocks, call.need_blocks, strict=True)]
    if call.stacked and gradients[0] is not None and call.prefix is not None:
        cleared = gradients[0] if call.device_count is not None else gradients[0][call.n_blocks :]
        cleared.zero_()  # kernels write the gradients of blocks that count alone
    dprefix_sum = allocate_like(call.prefix) if call.prefix is not None and call.need_prefix else None
    blocks, stacked, prefix = followed_sources(call)
    at, to = pointers.find(blocks, gradients, device)
    dh, dprefix = followed(dh), None if call.dprefix is None or dprefix_sum is None else followed(call.dprefix)
    first, h = blocks[0], call.h.contiguous() if call.h is not None and reads_h(call.h) else None
    by_token = h is None and keeps_by_token(call, first.dtype, device)
    options = (stacked, by_token, at.aligned and to.aligned)
    plan = plan_backward(call, (first, prefix, dh, dprefix), options, device)
    n_tokens, width, on_cuda = plan.n_tokens, dh.shape[-1], device.kind == "cuda"
    if not n_tokens:
        return gradients, dprefix_sum, *zeros(call.query, call.rms_weight, call.need_weights)
    need_dg, dg = call.need_weights[0] or call.need_weights[1], None
    query, norm = call.query.contiguous(), call.rms_weight.contiguous()

    def run(spec: LaunchSpec) -> bool:
        nonlocal dg
        chosen = spec.launch
        if not chosen.has_whole_rows:
            return False
        dg = allocate(dh, (chosen.partials(n_tokens), width), torch.float32) if need_dg else None
        statistics = (call.score.t(), call.rstd.t()) if chosen.shape.by_token else (call.score, call.rstd)
        score, rstd = [each.contiguous() for each in statistics]  # copied where they lie in the other order
        tensors: Any = (dh,) if on_cuda or chosen.shape.by_token else (dh, h)
        tensors += (at.base, at.table, query, norm, score, rstd, call.lse.contiguous(), to.base, to.table, dg)
        tensors += (call.device_count, prefix, dprefix, dprefix_sum)
        scalars = plan.scalars
        if on_cuda:
            if chosen.cooperating:
                tensors += (allocate(dh, (chosen.words(n_tokens),), torch.int64).zero_(),)
            tensors += (at.others, to.others)
            scalars += (to.needed,)
        KERNELS.launch(chosen.kernel.module, chosen.kernel.name, spec, chosen.grid(n_tokens), tensors, scalars)
        return True

    for spec in plan.specs:
        if launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller):
            return gradients, dprefix_sum, *add_partials(dg, query, norm, call.need_weights, device)
    if prefix is not None:
        return None
    found = (at, to) if at.others is None else pointers.in_tables(blocks, gradients, device)
    passes = KernelPasses(sources_at(blocks, found, stacked=stacked), device, need_dg=need_dg)
    return gradients, dprefix_sum, *reference.backward(passes, call, dh)
