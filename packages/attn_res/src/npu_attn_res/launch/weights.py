"""The launch that makes the gradients of query and rms_weight from partial sums of dg."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling import Device
from npu_tiling.launching.partials import sum_spec
from torch import Tensor

from .specs import KERNELS


def add_partials(
    partials: Tensor | None, query: Tensor, rms_weight: Tensor, needed: Sequence[bool], device: Device
) -> tuple[Tensor | None, Tensor | None]:
    """dquery and drms_weight, where needed, from partial sums of dg [n, D]; both weights are contiguous."""
    if partials is None:
        return None, None
    dquery = torch.empty_like(query) if needed[0] else None
    dnorm = torch.empty_like(rms_weight) if needed[1] else None
    n_partials, width = partials.shape
    spec = sum_spec(width, device)
    tensors = (partials, query, rms_weight, dquery, dnorm)
    KERNELS.launch("both.weights", "attn_res_add_partials_kernel", spec, spec.launch.grid, tensors, (n_partials,))
    return dquery, dnorm


def zeros(query: Tensor, rms_weight: Tensor, needed: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """dquery and drms_weight, where needed, if there are no tokens."""
    return torch.zeros_like(query) if needed[0] else None, torch.zeros_like(rms_weight) if needed[1] else None
