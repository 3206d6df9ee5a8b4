"""The launch of `attn_res`: whole rows, one kernel. Where rows do not fit on chip and there is no prefix: columns.py."""

from __future__ import annotations

from typing import Any

from npu_tiling import Device, LaunchSpec, launch_with_fallback

from .. import reference, tiling
from ..calls import Forward
from . import pointers
from .columns import KernelPasses
from .outputs import Outputs, allocate_outputs, keeps_by_token
from .plan import plan_forward
from .sources import followed, followed_sources, sources_at
from .specs import KERNELS


def launch_forward(call: Forward, device: Device) -> Outputs | None:
    """The results of `attn_res`; None where whole rows do not fit on chip and there is a prefix."""
    blocks, stacked, prefix = followed_sources(call)
    x = None if call.layer_output is None else followed(call.layer_output)
    at, nowhere = pointers.find(blocks, (), device)
    by_token = call.save and keeps_by_token(call, call.dtype or call.like.dtype, device)
    plan = plan_forward(call, (blocks[0], prefix, x), (stacked, by_token, at.aligned), device)
    outputs = allocate_outputs(call, device, by_token=by_token)
    if not plan.n_tokens:
        return outputs
    h, y, new_prefix, *statistics = outputs
    norm_weight = None if call.output_rms_weight is None else call.output_rms_weight.contiguous()
    weights = (call.query.contiguous(), call.rms_weight.contiguous(), norm_weight)
    tensors: tuple[Any, ...] = (at.base, at.table, *weights, h, y, *statistics)
    tensors += (call.device_count, prefix, x, new_prefix, at.base if call.append else None)
    tensors += (at.others,) if device.kind == "cuda" else ()

    def run(spec: LaunchSpec) -> bool:
        chosen = spec.launch
        if chosen.has_whole_rows:
            grid = chosen.grid(plan.n_tokens)
            KERNELS.launch(chosen.kernel.module, chosen.kernel.name, spec, grid, tensors, plan.scalars)
        return chosen.has_whole_rows

    for spec in plan.specs:
        if launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller):
            return outputs
    if prefix is not None:
        return None
    found = (at, nowhere) if at.others is None else pointers.in_tables(blocks, (), device)
    passes = KernelPasses(sources_at(blocks, found, stacked=stacked), device)
    rows_h, rows_y, *statistics = reference.forward(passes, call)
    y = None if rows_y is None else rows_y.view(h.shape)
    return Outputs(rows_h.view(h.shape), y, None, *(statistics if call.save else ()))
