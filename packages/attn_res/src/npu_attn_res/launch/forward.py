"""The launch of `attn_res`: whole rows, one kernel. Where rows do not fit on chip and there is no prefix: columns.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from torch import Tensor

from .. import reference, tiling
from ..calls import Forward
from ..shape import Task
from .columns import KernelPasses
from .outputs import Outputs, allocate_outputs, keeps_by_token
from .sources import Sources, rows_of, sources_of
from .specs import KERNELS, launch_spec, widest


def launch_forward(call: Forward, device: Device) -> Outputs | None:
    """The results of `attn_res`; None where whole rows do not fit on chip and there is a prefix."""
    by_token = call.save and keeps_by_token(call, call.dtype or call.like.dtype, device)
    outputs, v = allocate_outputs(call, device, by_token=by_token), sources_of(call, device)
    if not v.n_tokens:
        return outputs
    h, x, eps = outputs.h, call.layer_output, (call.eps, call.norm_eps)
    dtype = widest(h, v.like, v.prefix.rows, x)
    append_to = v.at.base if call.append else None
    norm_weight = call.output_rms_weight
    weights = (
        call.query.contiguous(),
        call.rms_weight.contiguous(),
        None if norm_weight is None else norm_weight.contiguous(),
    )
    if launch_rows(v, weights, outputs, eps, dtype, device, x=x, append_to=append_to, by_token=by_token):
        return outputs
    if v.prefix.rows is not None:
        return None
    h, y, *statistics = reference.forward(KernelPasses(v.in_tables(device), device), call)
    y = None if y is None else y.view(v.shape)
    return Outputs(h.view(v.shape), y, None, *(statistics if call.save else ()))


def launch_rows(
    v: Sources,
    weights: Sequence[Tensor | None],
    outputs: Outputs,
    eps: tuple[float, float],
    dtype: torch.dtype,
    device: Device,
    *,
    task: Task = Task.FORWARD,
    x: Tensor | None = None,
    append_to: Tensor | None = None,
    by_token: bool = False,
) -> bool:
    """Fills the outputs by a kernel for whole rows; False where they do not fit on chip.

    Args:
        v: the sources.
        weights: query, rms_weight and output_rms_weight, contiguous.
        outputs: where results go.
        eps: of the scores, and of the RMSNorm of h.
        dtype: whose elements a tile is sized for.
        device: the chip.
        task: FORWARD, or PHASE1.
        x: [..., D], is added to the prefix.
        append_to: the first block of a bank that takes the new prefix; None: none does.
        by_token: score and rstd lie [T, sources] in memory.
    """
    h, y, new_prefix, score, rstd, lse, norm_rstd = outputs
    x, s_x = (None, 0) if x is None else rows_of(x)
    new_prefix, s_new = (None, 0) if new_prefix is None else rows_of(new_prefix)
    base, table, aligned, others, _ = v.at
    device_count, prefix, s_prefix = v.prefix
    spec = launch_spec(
        device,
        task,
        v.width,
        dtype,
        row_stride=max(v.s_token, s_prefix, s_x, s_new),
        n_sources=v.n_blocks,
        prefix=prefix is not None,
        normalised=y is not None,
        by_token=by_token,
        aligned=aligned,
    )
    if spec is None:
        return False
    tensors: tuple[Any, ...] = (base, table, *weights, h, y, score, rstd, lse, norm_rstd)
    tensors += (device_count, prefix, x, new_prefix, append_to, *((others,) if device.kind == "cuda" else ()))
    scalars = (v.n_blocks, v.n_tokens, v.s_block, v.s_token, *eps, v.n_blocks, s_prefix, s_x, s_new)

    def run(spec: LaunchSpec) -> bool:
        chosen = spec.launch
        if chosen.has_whole_rows:
            KERNELS.launch(chosen.kernel.module, chosen.kernel.name, spec, chosen.grid(v.n_tokens), tensors, scalars)
        return chosen.has_whole_rows

    return launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller)
