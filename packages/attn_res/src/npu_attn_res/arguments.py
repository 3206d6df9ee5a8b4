"""Checks of arguments: errors are one sentence with the argument's name, what it was and what it must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from npu_tiling import device_for
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_sources(blocks: Any, stacked: bool, weights: Mapping[str, Any], eps: float, norm_eps: float) -> None:
    """Blocks and the weights [D] that go with them."""
    first = check_blocks(blocks, stacked)
    for name, weight in weights.items():
        if weight is not None or name != "norm_weight":
            check_weight(name, weight, (first.shape[-1:],), first, "the blocks'")
    check_eps("eps", eps)
    check_eps("norm_eps", norm_eps)


def check_phase1(queries: Any, blocks: Any, stacked: bool, w_norm: Any, eps: float) -> Tensor:
    """The arguments of `attn_res_phase1`; returns one block, or all of them stacked."""
    first = check_blocks(blocks, stacked)
    width = first.shape[-1]
    n_layers = queries.shape[0] if isinstance(queries, Tensor) and queries.dim() == 2 else 0
    if isinstance(queries, Tensor) and not n_layers:
        raise ValueError(f"queries has shape {tuple(queries.shape)} and must have shape (S, {width}) with S at least 1.")
    check_weight("queries", queries, ((n_layers, width),), first, "the blocks'")
    check_weight("w_norm", w_norm, ((width,), (n_layers, width)), first, "the blocks'")
    check_eps("eps", eps)
    return first


def check_merge(
    state: Mapping[str, Any],
    partial: Any,
    layer_output: Any,
    weights: Mapping[str, Any],
    eps: float,
    norm_eps: float,
) -> None:
    """The arguments of `attn_res_merge`."""
    check_rows("partial", partial)
    wide = torch.float64 if partial.dtype == torch.float64 else torch.float32
    for name, tensor in state.items():
        shape = partial.shape if name == "o" else partial.shape[:-1]
        check_like(name, tensor, shape, wide, partial)
    if layer_output is not None:
        check_like("layer_output", layer_output, partial.shape, partial.dtype, partial)
    for name, weight in weights.items():
        if weight is not None or name != "norm_weight":
            check_weight(name, weight, (partial.shape[-1:],), partial, "partial's")
    check_eps("eps", eps)
    check_eps("norm_eps", norm_eps)


def check_blocks(blocks: Any, stacked: bool) -> Tensor:
    """`blocks`, a list of one stacked tensor or of every block; returns the first."""
    if not isinstance(blocks, (list, tuple)):
        raise TypeError(f"blocks is a {type(blocks).__name__} and must be a tensor, or a list or tuple of tensors.")
    if not blocks:
        raise ValueError("blocks is empty and must have at least one block.")
    first = blocks[0]
    if stacked:
        check_rows("blocks", first)
        if first.dim() < 2 or not first.shape[0]:
            raise ValueError(f"blocks has shape {tuple(first.shape)} and must have shape (N, ..., D) with N at least 1.")
        return first
    check_rows("blocks[0]", first)
    for i, block in enumerate(blocks[1:], 1):
        check_like(f"blocks[{i}]", block, first.shape, first.dtype, first, of="blocks[0]'s")
    return first


def check_rows(name: str, tensor: Any) -> None:
    """A tensor of rows of a dtype that there are kernels for."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__} and must be a tensor.")
    if tensor.dtype not in _DTYPES and not (tensor.dtype == torch.float64 and device_for(tensor.device) is None):
        allowed = "torch.float32, torch.bfloat16 or torch.float16"
        raise TypeError(f"{name} is {tensor.dtype} on {tensor.device.type} and must be {allowed}.")
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} and must have a last dimension of at least 1.")


def check_like(
    name: str, tensor: Any, shape: Sequence[int], dtype: torch.dtype, like: Tensor, of: str = "partial's"
) -> None:
    """A tensor of one shape, dtype and device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__} and must be a tensor.")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} and must have shape {tuple(shape)}.")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype} and must be {dtype}.")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device} and must be on {of} device, {like.device}.")


def check_weight(name: str, weight: Any, shapes: Sequence[Sequence[int]], like: Tensor, of: str) -> None:
    """A weight of one of some shapes, in the dtype of what it goes with or fp32."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} is a {type(weight).__name__} and must be a tensor.")
    if all(weight.shape != torch.Size(shape) for shape in shapes):
        allowed = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {tuple(weight.shape)} and must have shape {allowed}.")
    if weight.dtype not in (like.dtype, torch.float32):
        raise TypeError(f"{name} is {weight.dtype} and must be torch.float32 or {of} dtype, {like.dtype}.")
    if weight.device != like.device:
        raise ValueError(f"{name} is on {weight.device} and must be on {of} device, {like.device}.")


def check_eps(name: str, eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"{name} is {eps} and must be at least 0.")
