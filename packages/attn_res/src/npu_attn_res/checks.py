"""What Attention Residuals ask of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from npu_tiling.pytorch import arguments
from torch import Tensor


def check_sources(
    blocks: Any, stacked: bool, weights: Mapping[str, Any], eps: float, norm_eps: float
) -> tuple[float, float]:
    """Blocks and the weights [D] that go with them; returns eps and norm_eps, as floats."""
    first = check_blocks(blocks, stacked)
    for name, weight in weights.items():
        arguments.parameter(name, weight, (first.shape[-1:],), first, "the blocks'", or_none=name == "norm_weight")
    return check_eps("eps", eps), check_eps("norm_eps", norm_eps)


def check_phase1(queries: Any, blocks: Any, stacked: bool, w_norm: Any, eps: float) -> tuple[Tensor, float]:
    """The arguments of `attn_res_phase1`; returns one block, or all of them stacked, and eps as a float."""
    first = check_blocks(blocks, stacked)
    width = first.shape[-1]
    n_layers = queries.shape[0] if isinstance(queries, Tensor) and queries.dim() == 2 else 0
    if isinstance(queries, Tensor) and not n_layers:
        raise ValueError(f"queries has shape {tuple(queries.shape)} and must have shape (S, {width}) with S at least 1.")
    arguments.parameter("queries", queries, ((n_layers, width),), first, "the blocks'")
    arguments.parameter("w_norm", w_norm, ((width,), (n_layers, width)), first, "the blocks'")
    return first, check_eps("eps", eps)


def check_merge(
    state: Mapping[str, Any],
    partial: Any,
    layer_output: Any,
    weights: Mapping[str, Any],
    eps: float,
    norm_eps: float,
) -> tuple[float, float]:
    """The arguments of `attn_res_merge`; returns eps and norm_eps, as floats."""
    arguments.rows("partial", partial)
    wide = torch.float64 if partial.dtype == torch.float64 else torch.float32
    for name, tensor in state.items():
        shape = partial.shape if name == "o" else partial.shape[:-1]
        check_like(name, tensor, shape, wide, partial)
    if layer_output is not None:
        check_like("layer_output", layer_output, partial.shape, partial.dtype, partial)
    for name, weight in weights.items():
        arguments.parameter(name, weight, (partial.shape[-1:],), partial, "partial's", or_none=name == "norm_weight")
    return check_eps("eps", eps), check_eps("norm_eps", norm_eps)


def check_blocks(blocks: Any, stacked: bool) -> Tensor:
    """`blocks`, a list of one stacked tensor or of every block; returns the first."""
    if not isinstance(blocks, (list, tuple)):
        raise TypeError(f"blocks is a {type(blocks).__name__} and must be a tensor, or a list or tuple of tensors.")
    if not blocks:
        raise ValueError("blocks is empty and must have at least one block.")
    first = blocks[0]
    if stacked:
        arguments.rows("blocks", first)
        if first.dim() < 2 or not first.shape[0]:
            raise ValueError(f"blocks has shape {tuple(first.shape)} and must have shape (N, ..., D) with N at least 1.")
        return first
    arguments.rows("blocks[0]", first)
    shape, dtype, device = first.shape, first.dtype, first.device
    for i, block in enumerate(blocks):
        alike = isinstance(block, Tensor) and block.shape == shape and block.dtype == dtype and block.device == device
        if not alike:
            check_like(f"blocks[{i}]", block, shape, dtype, first, of="blocks[0]'s")
    return first


def check_like(
    name: str, tensor: Any, shape: Sequence[int], dtype: torch.dtype, like: Tensor, of: str = "partial's"
) -> None:
    """A tensor of one shape, dtype and device."""
    arguments.tensor(name, tensor)
    arguments.shape(name, tensor, shape)
    arguments.dtype(name, tensor, dtype)
    arguments.device(name, tensor, like, of)


def check_eps(name: str, eps: float) -> float:
    """Zero or more, as a float."""
    if type(eps) is float and eps >= 0:  # most are
        return eps
    found: float = arguments.number(name, eps, least=0, finite=False)
    return found
