"""From the targets' part of the weight's gradient to kernel launches."""

from __future__ import annotations

import functools

import torch
from npu_tiling import Device, LaunchSpec, device_for
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from ..both.tiling.target_rows import OrderLaunch, TargetRowsLaunch
from ..chunks import part
from ..partition import exactly
from ..rows import TargetGradients
from .chunk import KERNELS

_MODULE = "both.target_rows"
_TOKENS = 8192  # that are sorted together: compares grow with its square, roundings of dW with the number of groups


def add_target_rows(dweight: Tensor, x: Tensor, targets: TargetGradients) -> None:
    """dweight[target[t]] += g[t] x[t], in place and in the order of tokens; dweight [V, H], x [tokens, H]."""
    device = device_for(x.device)
    assert device is not None
    for tokens in exactly(x.shape[0], _TOKENS):
        _add(dweight, part(x, tokens), targets.part(tokens), device)


def _add(dweight: Tensor, x: Tensor, targets: TargetGradients, device: Device) -> None:
    (rows, width), columns = x.shape, dweight.shape[0]
    order, runs = allocate(x, (2, rows), torch.int32)
    spec = _order(columns, device)
    tensors, scalars = (targets.columns, order, runs), (rows, targets.first)
    KERNELS.launch(_MODULE, "cross_entropy_order_kernel", spec, spec.launch.grid(rows), tensors, scalars)
    spec = _target_rows(width, device)
    to_add = (x, targets.values, targets.columns, order, runs, dweight)
    sizes = (rows, x.stride(0), dweight.stride(0), targets.first)
    KERNELS.launch(_MODULE, "cross_entropy_target_rows_kernel", spec, spec.launch.grid(rows), to_add, sizes)


@functools.lru_cache(maxsize=64)
def _order(columns: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(OrderLaunch(columns=columns, device=device), {})


@functools.lru_cache(maxsize=64)
def _target_rows(width: int, device: Device) -> LaunchSpec:
    return LaunchSpec.of(TargetRowsLaunch(width=width, device=device), {})
