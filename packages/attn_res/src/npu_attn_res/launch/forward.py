"""The launch of `attn_res`: whole rows, one kernel. Where rows do not fit on chip and there is no prefix: columns.py."""

from __future__ import annotations

from typing import Any

from npu_tiling import Device, LaunchSpec, launch_with_fallback

from .. import reference, tiling
from ..calls import Forward
from ..shape import Task
from .columns import KernelPasses
from .outputs import Outputs, allocate_outputs, keeps_by_token
from .sources import rows_of, sources_of
from .specs import KERNELS, launch_spec, widest


def launch_forward(call: Forward, device: Device) -> Outputs | None:
    """The results of `attn_res`; None where whole rows do not fit on chip and there is a prefix."""
    by_token = call.save and keeps_by_token(call, call.dtype or call.like.dtype, device)
    outputs, v = allocate_outputs(call, device, by_token=by_token), sources_of(call, device)
    if not v.n_tokens:
        return outputs
    h, y, new_prefix, score, rstd, lse, norm_rstd = outputs
    base, table, aligned, others, _ = v.at
    device_count, prefix, s_prefix = v.prefix
    x, s_x = (None, 0) if call.layer_output is None else rows_of(call.layer_output)
    new_prefix, s_new = (None, 0) if new_prefix is None else rows_of(new_prefix)
    query, rms_weight, norm_weight = call.query.contiguous(), call.rms_weight.contiguous(), call.output_rms_weight
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    spec = launch_spec(
        device,
        Task.FORWARD,
        v.width,
        widest(h, v.like, prefix, x),
        row_stride=max(v.s_token, s_prefix, s_x, s_new),
        n_sources=v.n_blocks,
        prefix=prefix is not None,
        normalised=y is not None,
        by_token=by_token,
        aligned=aligned,
    )
    tensors: tuple[Any, ...] = (base, table, query, rms_weight, norm_weight, h, y, score, rstd, lse, norm_rstd)
    tensors += (device_count, prefix, x, new_prefix, base if call.append else None)
    tensors += (others,) if device.kind == "cuda" else ()
    scalars = (v.n_blocks, v.n_tokens, v.s_block, v.s_token, call.eps, call.norm_eps, v.n_blocks, s_prefix, s_x, s_new)

    def run(spec: LaunchSpec) -> bool:
        chosen = spec.launch
        if chosen.has_whole_rows:
            KERNELS.launch(chosen.kernel.module, chosen.kernel.name, spec, chosen.grid(v.n_tokens), tensors, scalars)
        return chosen.has_whole_rows

    if spec is not None and launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller):
        return outputs
    if prefix is not None:
        return None
    h, y, *statistics = reference.forward(KernelPasses(v.in_tables(device), device), call)
    y = None if y is None else y.view(v.shape)
    return Outputs(h.view(v.shape), y, None, *(statistics if call.save else ()))
