"""The gradient of h through the RMSNorm that follows it."""

from __future__ import annotations

import torch
from npu_tiling import Device, LaunchSpec, launch_with_fallback
from npu_tiling.launching.partials import add_partials
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from .. import reference, tiling
from ..calls import Backward, MergeBackward
from ..shape import Task
from .sources import rows_of
from .specs import KERNELS, launch_spec


def gradient_of_h(call: Backward | MergeBackward, device: Device | None) -> tuple[Tensor, Tensor | None]:
    """The whole gradient of h, and that of output_rms_weight. The first has what comes through the RMSNorm, in fp32 then."""
    dh, dy, h, weight, rstd = call.dh, call.dy, call.h, call.output_rms_weight, call.norm_rstd
    if dy is None:
        assert dh is not None
        return dh, None
    assert h is not None and weight is not None and rstd is not None
    if device is None:
        return reference.normalise_backward(dy, dh, h, weight, rstd.view(h.shape[:-1]))
    return _launch(dy, dh, h, weight, rstd, device, need_dweight=call.need_weights[2])


def _launch(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor, rstd: Tensor, device: Device, *, need_dweight: bool
) -> tuple[Tensor, Tensor | None]:
    width, n_tokens = h.shape[-1], rstd.numel()
    total, partials = allocate(h, h.shape, torch.float32), None
    if not n_tokens:
        return total, torch.zeros_like(weight) if need_dweight else None
    (dy_rows, s_dy), (dh_rows, s_dh) = rows_of(dy), (None, 0) if dh is None else rows_of(dh)
    spec = launch_spec(device, Task.NORM_BACKWARD, width, h.dtype, row_stride=max(s_dy, s_dh))

    def run(spec: LaunchSpec) -> bool:
        nonlocal partials
        chosen = spec.launch
        if chosen.has_whole_rows:
            grid = chosen.grid(n_tokens)
            partials = allocate(h, (grid, width), torch.float32) if need_dweight else None
            tensors = (dy_rows, dh_rows, h.contiguous(), weight.contiguous(), rstd.contiguous(), total, partials)
            KERNELS.launch(chosen.kernel.module, chosen.kernel.name, spec, grid, tensors, (n_tokens, s_dy, s_dh))
        return chosen.has_whole_rows

    if spec is None or not launch_with_fallback(spec.launch.shape, spec, run, tiling.smaller):
        return reference.normalise_backward(dy, dh, h, weight, rstd.view(h.shape[:-1]))
    if partials is None:
        return total, None
    dweight = allocate_like(weight)
    add_partials(partials, dweight, device)
    return total, dweight
