"""Allocates the results of `attn_res`, for the launch and for the fake function: both have the same shapes and strides."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from npu_tiling import Device, device_for
from npu_tiling.chips.detection import dry_runs
from npu_tiling.pytorch.tensors import allocate, allocate_like
from torch import Tensor

from .. import tiling
from ..calls import Backward, Forward


class Outputs(NamedTuple):
    """The results of `attn_res`, in the operator's order; None for what was not asked for.

    Attributes:
        h, y: [..., D], and its RMSNorm.
        new_prefix: [..., D], the prefix with the layer's output.
        score, rstd: s and r of the sources, [sources, T].
        lse: log(sum(exp(s))) [T].
        norm_rstd: 1 / rms(h) [T].
    """

    h: Tensor
    y: Tensor | None
    new_prefix: Tensor | None
    score: Tensor | None = None
    rstd: Tensor | None = None
    lse: Tensor | None = None
    norm_rstd: Tensor | None = None


def allocate_outputs(call: Forward, device: Device | None, *, by_token: bool) -> Outputs:
    """Memory for the results; `by_token`: score and rstd lie [T, sources] in memory."""
    like, prefix = call.like, call.prefix
    shape = like.shape[1:] if call.stacked and prefix is None else like.shape
    h = allocate(like, shape, call.dtype or like.dtype)
    y = None if call.output_rms_weight is None else allocate_like(h)
    new_prefix = None
    if prefix is not None and call.layer_output is not None:
        new_prefix = prefix if call.in_place else allocate(prefix, shape, prefix.dtype)
    if not call.save:
        return Outputs(h, y, new_prefix)
    dtype = torch.float32
    if device is None and torch.float64 in [source.dtype for source in (*call.blocks, like)]:
        dtype = torch.float64
    n_tokens, n_rows = prod(shape[:-1]), call.n_blocks + (prefix is not None)
    score = allocate(h, (n_tokens, n_rows), dtype).t() if by_token else allocate(h, (n_rows, n_tokens), dtype)
    lse = allocate(h, (n_tokens,), dtype)
    return Outputs(h, y, new_prefix, score, torch.empty_like(score), lse, None if y is None else torch.empty_like(lse))


def keeps_by_token(call: Forward | Backward, dtype: torch.dtype, device: Device) -> bool:
    """Whether score and rstd lie [T, sources] in memory, where h has this dtype."""
    if device.kind != "ascend":
        return False
    prefix = call.prefix
    source = call.blocks[0] if len(call.blocks) else prefix
    assert source is not None
    itemsize, n_rows = max(source.dtype.itemsize, dtype.itemsize), call.n_blocks + (prefix is not None)
    return tiling.statistics_by_token(int(source.shape[-1]), itemsize, n_rows, device)


def reads_h(h: Tensor) -> bool:
    """Whether the backward computes delta from h: on Ascend where h is fp32. Otherwise it sums delta over the sources."""
    if h.dtype != torch.float32:
        return False
    device = None if h.is_meta and not dry_runs else device_for(h.device)
    return device is not None and device.kind == "ascend"
