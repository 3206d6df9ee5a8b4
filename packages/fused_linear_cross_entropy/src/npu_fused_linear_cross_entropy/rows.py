"""Records of rows, vectors of [tokens]: facts of targets, statistics of logits, losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling.pytorch.exporting import exported
from torch import Tensor

# Rows of the tensor of statistics [7, tokens]: the largest z, the sum of exp(z - largest), the z of the target, the sum of
# w (z - largest) with w the columns' weights or 1, the sum of exp(z - largest) (z - largest), the column of the first
# largest z, and the sum of w. Where exponentials take the place of logits, the reference k takes that of the largest z.
MAXIMUM, SUM, TARGET, TOTAL, DOT, PLACE, WEIGHT = range(7)
STATISTICS = 7
SAVED, SAVED_ENTROPY = 3, 5  # how many of these, the first ones, the gradient needs: without and with an entropy
# Rows of the tensor of coefficients [5, tokens]: k, that of the statistics, and factors of the gradient, see formula.py.
REFERENCE, A, B, C, Q = range(5)
COEFFICIENTS = 5
# These stand for a column: the target is outside the vocabulary, or ignored.
NO_COLUMN, IGNORED = -1, -2
# Class weights are divided by their mean over the counted rows where fp16 gradients are left unfinished, or by more where
# there are many rows: none is then above this, and dx = g W is within fp16's range if elements of W are at most 8.
MAX_RELATIVE_WEIGHT = 4096.0


class TargetFacts(NamedTuple):
    """Columns, weights and factors of rows, which follow from the targets alone.

    Attributes:
        columns: int32 [tokens], the target's column; NO_COLUMN, IGNORED.
        target_weight: [tokens] or None: the class weight of the target.
        factors: begins with the factor of losses, that of z-losses, the sum of the class weights, how many rows are counted.
        gradient_factors: the same for the gradient.
        unfinished: [3], factors that the gradients of x, weight and bias still lack; None for 1.
    """

    columns: Tensor
    target_weight: Tensor | None
    factors: Tensor
    gradient_factors: Tensor
    unfinished: Tensor | None

    def part(self, tokens: slice) -> TargetFacts:
        """The facts of a chunk of tokens."""
        if tokens.stop - tokens.start == self.columns.shape[0]:
            return self
        weights = None if self.target_weight is None else self.target_weight[tokens]
        return self._replace(columns=self.columns[tokens], target_weight=weights)


class TargetGradients(NamedTuple):
    """g of formula.py: the gradient of the raw logit at each token's target, where E has a zero.

    Attributes:
        columns: int32 [tokens], targets in the whole vocabulary; negative: none.
        first: the target that the weight's first row stands for.
        values: fp32 [tokens], g; 0 where another rank has the target's row.
    """

    columns: Tensor
    first: int
    values: Tensor

    def part(self, tokens: slice) -> TargetGradients:
        """The same of a chunk of tokens."""
        if tokens.stop - tokens.start == self.columns.shape[0]:
            return self
        return self._replace(columns=self.columns[tokens], values=self.values[tokens])


@exported
class LinearCrossEntropyOutput(NamedTuple):
    """A loss and the extras that were asked for; the others are None.

    Attributes:
        loss: a scalar, or [...] with the reduction "none".
        z_loss: lse_square_scale times the squares of lse, reduced as the loss is.
        token_accuracy: the share of counted rows whose first largest logit is the target's.
        predicted_tokens: int64 [...], the first largest logit of every row; -1 where ignored.
        lse: [...], the logarithm of the sum of exponentials of the logits; 0 where ignored.
        entropy: [...], of the distribution over the vocabulary; 0 where ignored.
    """

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


def are_counted(target: Tensor, ignore_index: int) -> Tensor:
    """bool, of the targets' shape: not ignored."""
    limits = torch.iinfo(target.dtype)
    if not limits.min <= ignore_index <= limits.max:  # PyTorch would wrap it to another number
        return torch.ones_like(target, dtype=torch.bool)
    return target != ignore_index


def total_weight(weights: Tensor) -> Tensor:
    """The sum of weights, by which "mean" divides: 1 where all are 0, NaN where others add up to 0."""
    total = weights.sum()
    return torch.where(total != 0.0, total, torch.where(weights.any(), torch.nan, 1.0).to(total.dtype))


def typical_size(values: Tensor) -> Tensor:
    """The mean magnitude of the values that are not 0; of more than MAX_RELATIVE_WEIGHT values, their sum over that number.

    So none is above MAX_RELATIVE_WEIGHT times it.
    """
    sizes = values.abs()
    total, count = sizes.sum(), (sizes != 0.0).sum().to(sizes.dtype)
    return torch.where(total > 0.0, total / count.clamp_max(MAX_RELATIVE_WEIGHT), 1.0)


def rebased(maximum: Tensor, total: Tensor, dot: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of exp(z - maximum) and of exp(z - maximum) (z - maximum), for another maximum."""
    moved = maximum - top
    scale = torch.exp(moved)
    return total * scale, scale * (dot + moved * total)


def rebased_total(maximum: Tensor, total: Tensor, weight: Tensor, top: Tensor) -> Tensor:
    """The sum of w (z - maximum), for another maximum; `weight`: the sum of w."""
    return total + (maximum - top) * weight
