"""A low-rank adapter of the head's weight, as LoRA trains: its factors are more columns of x and of the weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from .checks import autocast


class Joined(NamedTuple):
    """A linear layer's tensors. With a frozen weight its logits are x[..., :H] frozen^T + x[..., H:] weight^T + bias."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    frozen: Tensor | None


def joined(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: tuple[Tensor, Tensor] | None,
    weight_grad: Tensor | None,
) -> Joined:
    """The tensors as autocast casts them. With an adapter (u [..., R], b [V, R]) x is [x, u], and the weight b."""
    if adapter is None:
        return Joined(*autocast(x, weight, bias), None)
    u, b = arguments.pair("adapter", adapter, "(u, b)")
    arguments.floating("x", x)
    arguments.floating("adapter[0]", u)
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("weight requires a gradient and must not where there is an adapter: detach it.")
    if weight_grad is not None:
        raise ValueError("weight_grad must be left out where there is an adapter.")
    if is_distributed((x, weight, u, b)):
        raise ValueError("adapter must be left out where there are DTensors.")
    rank = u.shape[-1] if u.dim() else 1
    arguments.shape("adapter[0]", u, (*x.shape[:-1], rank))
    arguments.device("adapter[0]", u, x, "x's")
    x, weight, bias = autocast(x, weight, bias)
    _, b, _ = autocast(x, b, None)
    arguments.parameter("adapter[1]", b, ((weight.shape[0], rank),), x, "x's")
    return Joined(torch.cat((x, u.to(x.dtype)), -1), b, bias, weight)
