"""The launches of `phase1` and its gradient.

On CUDA the forward takes whole rows where they fit. Elsewhere one layer runs `attn_res`. All else takes blocks of columns.
"""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from .. import reference, tiling
from ..calls import Forward, Phase1, Phase1Backward
from ..shape import Task
from .columns import KernelPasses
from .forward import launch_forward
from .sources import follow
from .specs import KERNELS, launch_spec
from .weights import zeros


def launch_phase1(call: Phase1, device: Device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """o [T, S, D], lse [T, S], s [N, T, S] and r [N, T]; s and r may be None unless `save`."""
    n_layers, on_cuda = len(call.queries), device.kind == "cuda"
    if n_layers == 1 and not on_cuda:
        return _launch_layer(call, device)
    v = follow(call.blocks, device, stacked=call.stacked)
    like, n_tokens, width = v.like, v.n_tokens, v.width
    options = {"layers": n_layers, "row_stride": v.s_token, "aligned": v.at.aligned}
    spec = launch_spec(device, Task.LAYERS, width, like.dtype, **options) if on_cuda else None
    if spec is None and n_tokens:
        return reference.phase1(KernelPasses(v, device), call)
    o = allocate(like, (n_tokens, n_layers, width), torch.float32)
    lse = allocate(like, (n_tokens, n_layers), torch.float32)
    score = allocate(like, (v.n_blocks, n_tokens, n_layers), torch.float32) if call.save else None
    rstd = allocate(like, (v.n_blocks, n_tokens), torch.float32) if call.save else None
    if spec is None or not n_tokens:
        return o, lse, score, rstd
    queries, rms_weight = call.queries.contiguous(), call.rms_weight.contiguous()
    s_norm = 0 if rms_weight.dim() == 1 else width
    tensors = (*v.at[:2], queries, rms_weight, o, score, rstd, lse)
    scalars = (v.n_blocks, n_tokens, v.s_block, v.s_token, s_norm, call.eps)

    def run(spec: LaunchSpec) -> bool:
        chosen = spec.launch
        if chosen.has_whole_rows:
            KERNELS.launch(chosen.kernel.module, chosen.kernel.name, spec, chosen.grid(n_tokens), tensors, scalars)
        return chosen.has_whole_rows

    if launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller):
        return o, lse, score, rstd
    return reference.phase1(KernelPasses(v, device), call)


def _launch_layer(call: Phase1, device: Device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The first phase of one layer is `attn_res` with an h that is not rounded."""
    forward = Forward(
        blocks=call.blocks,
        stacked=call.stacked,
        n_blocks=call.blocks[0].shape[0] if call.stacked else len(call.blocks),
        device_count=None,
        prefix=None,
        layer_output=None,
        query=call.queries[0],
        rms_weight=call.rms_weight.view(-1),
        output_rms_weight=None,
        eps=call.eps,
        norm_eps=call.eps,
        dtype=torch.float32,
        save=True,
    )
    outputs = launch_forward(forward, device)
    assert outputs is not None and outputs.lse is not None and outputs.score is not None
    width = outputs.h.shape[-1]
    return outputs.h.view(-1, 1, width), outputs.lse.unsqueeze(-1), outputs.score.unsqueeze(-1), outputs.rstd


def launch_phase1_backward(call: Phase1Backward, device: Device) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """The gradients of blocks, queries and rms_weight, None for those that are not needed."""
    gradients = [allocate_like(block) if need else None for block, need in zip(call.blocks, call.need_blocks, strict=True)]
    if not call.score.numel():
        return gradients, *zeros(call.queries, call.rms_weight, call.need_weights)
    v = follow(call.blocks, device, gradients, stacked=call.stacked)
    return gradients, *reference.phase1_backward(KernelPasses(v, device, need_dg=any(call.need_weights)), call)
