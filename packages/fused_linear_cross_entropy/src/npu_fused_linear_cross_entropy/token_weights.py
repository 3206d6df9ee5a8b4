"""Weights of single tokens, as divisors of each token's loss in place of the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling.pytorch import arguments, collectives
from npu_tiling.pytorch.sharding import is_distributed
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from .options import Options
from .rows import are_counted


def checked_token_weight(token_weight: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
    """The weights of tokens of that shape in the dtype of the losses, without a gradient."""
    arguments.tensor("token_weight", token_weight)
    if not (token_weight.is_floating_point() or token_weight.dtype == torch.bool):
        raise TypeError(f"token_weight is {token_weight.dtype} and must be floating point or torch.bool.")
    arguments.shape("token_weight", token_weight, shape)
    arguments.device("token_weight", token_weight, x, "x's")
    if is_distributed((x, token_weight)):
        raise ValueError("token_weight must be left out where there are DTensors.")
    return token_weight.detach().to(statistics_dtype(x.dtype))


def divisors(
    token_weight: Tensor, target: Tensor, class_weight: Tensor | None, divisor: Tensor | None, options: Options
) -> Tensor:
    """[...], the divisors of the tokens' losses for the reduction; infinity where a token is ignored.

    Args:
        divisor: replaces the sum of the weights, by which "mean" divides.
    """
    weights = torch.where(are_counted(target, options.ignore_index), token_weight, 0.0)
    total: Tensor | float = 1.0
    if options.reduction == "mean":
        total = weights if class_weight is None else weights * _of_targets(class_weight, target, options).to(weights.dtype)
        total = total.sum() if divisor is None else divisor.to(weights.device, weights.dtype)
    return torch.where(weights == 0.0, torch.inf, total / weights)


def _of_targets(class_weight: Tensor, target: Tensor, options: Options) -> Tensor:
    """The class weights of the targets; 0 outside the vocabulary."""
    place = target.long() - options.vocab_first
    here = (place >= 0) & (place < class_weight.shape[0])
    chosen = torch.where(here, class_weight[place.clamp(0, class_weight.shape[0] - 1)], 0.0)
    if options.group:
        collectives.sum_(chosen, options.group)
    return chosen
