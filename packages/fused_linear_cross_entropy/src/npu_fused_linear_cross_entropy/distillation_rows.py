"""Facts of a distillation's tokens, vectors of [tokens], which follow from its targets and weights alone."""

from __future__ import annotations

import torch
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from . import ids, rows
from .calls import DistillationInputs
from .options import DistillationOptions
from .rows import NO_COLUMN


class DistilledRows:
    """Which tokens count, and their targets' columns.

    Attributes:
        columns: int32 [N] where targets have cross entropies, negative: none; else None.
        counted: bool [N]; None: all.
        known: bool [N]: counted, and within the vocabulary where targets have cross entropies; None: all.
        weights: [N], of the losses; None: 1.
        divisor: how many count, at least 1, or the sum of their weights, where the loss is a mean; else 1.
        size: what the weights are divided by where fp16 gradients are left unfinished: see `reference.rows.target_facts`.
    """

    def __init__(self, inputs: DistillationInputs, options: DistillationOptions) -> None:
        target, self.weights, self._tokens = inputs.target, inputs.token_weight, inputs.x.shape[0]
        self.columns = self.counted = self.known = None
        self.divisor: Tensor | int = 1
        self.size: Tensor | int = 1
        if target is not None:
            self.counted = self.known = rows.are_counted(target, options.ignore_index)
            if options.hard_weight:
                self.known = self.counted & ids.are_columns(target, 0, options.vocab_size)
                self.columns = torch.where(self.known, target, NO_COLUMN).to(torch.int32)
            if self.weights is not None:
                self.weights = torch.where(self.counted, self.weights, 0.0)
        if self.weights is not None and inputs.x.dtype == torch.float16 and options.reduction != "none":
            self.size = rows.typical_size(self.weights)
        if options.reduction != "mean":
            return
        if self.weights is not None:
            self.divisor = rows.total_weight(self.weights)
        elif self.counted is not None:
            self.divisor = self.counted.sum().to(statistics_dtype(inputs.x.dtype)).clamp_min_(1)
        else:
            self.divisor = max(1, self._tokens)

    def factors(self, dloss: Tensor, divisor: Tensor | float) -> Tensor:
        """Factors [N] of the tokens' gradients, given the upstream gradient, [], [1] or [N]."""
        value = dloss / divisor
        if self.weights is not None:
            value = value * self.weights
        if self.known is not None:
            return torch.where(self.known, value, 0.0)
        return value.expand(self._tokens).contiguous()

    def masked(self, values: Tensor) -> Tensor:
        """Losses [N] times their weights: 0 where ignored, NaN where the target is outside the vocabulary."""
        if self.weights is not None:
            values = torch.where(self.weights == 0.0, 0.0, values * self.weights)  # whatever such a token's teacher holds
        if self.known is None or self.counted is None:
            return values
        absent = torch.where(self.counted, torch.nan, 0.0).to(values.dtype)  # PyTorch's default dtype may be a wider one
        return torch.where(self.known, values, absent)
