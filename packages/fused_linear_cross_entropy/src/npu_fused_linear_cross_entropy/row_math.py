"""Per-row arithmetic on vectors of [tokens]: from statistics of logits to losses, in plain PyTorch.

This is the definition, and what runs on a CPU; kernels/targets.py and kernels/losses.py are the same for accelerators.

With z the logits, L = log sum exp z, y the target, e = label_smoothing, V the vocabulary's size, w class weights, w_y the
target's, W the sum of all w, N the rows that are not ignored and S the sum of w_y over them:

    unweighted    row = (1 - e) (L - z_y)     + e L - (e / V) sum z_i
    weighted      row = (1 - e) (L - z_y) w_y + (e / V) L W - (e / V) sum w_i z_i
    z-loss        lse_square_scale L^2
    loss          "mean": sum of row / N (weighted: / S) + z-loss / N      "sum", "none": row + z-loss
    token_scaling multiplies all of a row by exp(z_y - L), as a constant

The gradient of a row's loss with respect to z, for p = exp(z - L), is p (a + q z_i) - c w_i - b [i = y] with factors that
`coefficients` gives; q and a part of a belong to the entropy H = L - sum p z, whose gradient is -p (z - L + H).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import parallel
from .options import Options

# Rows of the tensor of statistics [6, tokens].
MAXIMUM, SUM, TARGET, TOTAL, DOT, PLACE = range(6)
STATISTICS = 6
SAVED, SAVED_ENTROPY = 3, 5  # of these, what `coefficients` reads: the first ones, without and with an entropy
# Rows of the tensor of coefficients [5, tokens].
LSE, A, B, C, Q = range(5)
# Class weights are divided by their mean over the counted rows where fp16 gradients are left unfinished, or by more where
# there are many rows: none is then above this, and dx = g W is within fp16's range if elements of W are at most 8.
MAX_RELATIVE_WEIGHT = 4096.0
# What stands for a column where there is none: the target is outside the vocabulary, or ignored.
NO_COLUMN, IGNORED = -1, -2


class Rows(NamedTuple):
    """What the targets alone say about rows.

    Attributes:
        columns: int32 [tokens], the target's column; NO_COLUMN, IGNORED.
        target_weight: [tokens] or None: the class weight of the target.
        factors: the factor of losses, that of z-losses, the sum of the class weights, how many rows are counted.
        gradient_factors: the same for the gradient.
        left: [3], factors of the gradients of x, weight and bias that are left for later; None for 1.
    """

    columns: Tensor
    target_weight: Tensor | None
    factors: Tensor
    gradient_factors: Tensor
    left: Tensor | None

    def part(self, tokens: slice) -> Rows:
        """Those of a chunk."""
        if tokens.stop - tokens.start == self.columns.shape[0]:
            return self
        weights = None if self.target_weight is None else self.target_weight[tokens]
        return self._replace(columns=self.columns[tokens], target_weight=weights)


class Losses(NamedTuple):
    """Outputs, None where not asked for."""

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


def prepare(
    target: Tensor,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    options: Options,
    dtype: torch.dtype,
    dweight_scale: float | None,
) -> Rows:
    """Everything that follows from the targets [tokens] alone; nothing waits for the device.

    Args:
        divisor: what "mean" divides by instead of the number of counted rows.
        dweight_scale: None, or the factor of the sums that become the gradients of the weight and the bias. Then gradients
            are computed without the 1 / N of "mean", and with class weights divided by their mean over the rows that count;
            both are left for later. The gradient of the logits is then as large as a probability: divided by N it would
            underflow in fp16, whose smallest number is 6e-8, before a gradient scaler's factor reaches it.
    """
    counted = are_counted(target, options.ignore_index)
    known = (target >= 0) & (target < options.vocab_size)
    columns = torch.where(counted, torch.where(known, target, NO_COLUMN), IGNORED).to(torch.int32)
    count = counted.sum().to(dtype)
    factors = torch.ones(4, dtype=dtype, device=target.device)
    factors[3] = count
    target_weight, weighted_count, weight_size = None, count, count
    if class_weight is not None:
        wide = class_weight.to(dtype)
        place = columns - options.vocab_first
        here = (place >= 0) & (place < wide.shape[0])
        target_weight = torch.where(here, wide[place.clamp(0, wide.shape[0] - 1).long()], 0.0)
        factors[2] = wide.sum()
        if options.group:
            parallel.sum_(target_weight, options.group)
            parallel.sum_(factors[2:3], options.group)
        weighted_count, weight_size = target_weight.sum(), target_weight.abs().sum()
    if options.reduction == "mean":
        if divisor is not None:
            factors[:2] = 1.0 / divisor.to(device=target.device, dtype=dtype)
        else:
            some = count > 0
            factors[0] = torch.where(some, 1.0 / weighted_count, 0.0)
            factors[1] = torch.where(some, 1.0 / count, 0.0)
    if dweight_scale is None:
        return Rows(columns, target_weight, factors, factors, None)
    of_gradient, relative = factors.clone(), torch.ones_like(count)
    if target_weight is not None:
        relative = torch.where(weight_size > 0, count.clamp_max(MAX_RELATIVE_WEIGHT) / weight_size, 1.0)
    left = factors[0] / relative / torch.tensor([1.0, dweight_scale, dweight_scale], dtype=dtype)
    of_gradient[0] = relative
    of_gradient[1] = torch.where(factors[0] > 0, factors[1] / factors[0] * relative, 0.0)
    return Rows(columns, target_weight, factors, of_gradient, left)


def are_counted(target: Tensor, ignore_index: int) -> Tensor:
    """bool, of the targets' shape: not ignored."""
    limits = torch.iinfo(target.dtype)
    if not limits.min <= ignore_index <= limits.max:  # PyTorch would wrap it to another number
        return torch.ones_like(target, dtype=torch.bool)
    return target != ignore_index


def losses(rows: Rows, statistics: Tensor, options: Options, shape: torch.Size) -> Losses:
    """The outputs that the caller asked for, from the statistics of all rows; `shape`: of the targets."""
    lse = statistics[MAXIMUM] + statistics[SUM].log()
    nll = lse - statistics[TARGET]
    e = options.label_smoothing
    loss = nll if rows.target_weight is None else nll * rows.target_weight
    if options.smoothed:
        weights = options.vocab_size if rows.target_weight is None else rows.factors[2]
        loss = (1.0 - e) * loss + (e / options.vocab_size) * (lse * weights - statistics[TOTAL])
    if options.reduction == "mean":
        loss = loss * rows.factors[0]
    z_loss = None
    if options.lse_square_scale or options.return_z_loss:
        z_loss = options.lse_square_scale * lse.square() * rows.factors[1]
        loss = loss + z_loss
    if options.token_scaling:
        probability = torch.exp(-nll)
        loss = loss * probability
        z_loss = None if z_loss is None else z_loss * probability
    counted, known = rows.columns != IGNORED, rows.columns >= 0
    absent = torch.where(counted, torch.nan, 0.0)  # NaN for a target outside the vocabulary, 0 if ignored
    loss = torch.where(known, loss, absent)
    accuracy = predicted = entropy = None
    if options.argmax:
        place = statistics[PLACE]
        if options.return_token_accuracy:
            right = (place == rows.columns) & known
            accuracy = right.sum().to(loss.dtype) / rows.factors[3].clamp_min(1)
        if options.return_predicted_tokens:
            inside = place.clamp(0, options.vocab_size - 1).long()  # a row of NaN has no maximum
            predicted = torch.where(counted, inside, -1).view(shape)
    if options.return_entropy:
        entropy = torch.where(counted, entropies(statistics), 0.0).view(shape)
    if options.return_z_loss:
        assert z_loss is not None
        z_loss = _reduced(torch.where(known, z_loss, absent), options, shape)
    kept = torch.where(counted, lse, 0.0).view(shape) if options.return_lse else None
    return Losses(
        _reduced(loss, options, shape), z_loss if options.return_z_loss else None, accuracy, predicted, kept, entropy
    )


def entropies(statistics: Tensor) -> Tensor:
    """H of each row: log S - sum of exp(z - max) (z - max) / S."""
    return statistics[SUM].log() - statistics[DOT] / statistics[SUM]


def coefficients(
    rows: Rows, statistics: Tensor, options: Options, dloss: Tensor | float | None, dentropy: Tensor | None
) -> Tensor:
    """[5, tokens]: L and the factors of the gradient, for gradients of the losses and entropies (a number or [tokens])."""
    lse = statistics[MAXIMUM] + statistics[SUM].log()
    result = lse.new_zeros(5, lse.shape[0])
    result[LSE] = lse
    if dloss is not None:
        on = (rows.columns >= 0).to(lse.dtype) * dloss
        e, main = options.label_smoothing, on * rows.gradient_factors[0]
        b, c = main * (1.0 - e), main * (e / options.vocab_size)
        a = main
        if rows.target_weight is not None:
            b = b * rows.target_weight
            a = b + c * rows.gradient_factors[2]
        a = a + on * rows.gradient_factors[1] * (2.0 * options.lse_square_scale) * lse
        if options.token_scaling:
            probability = torch.exp(statistics[TARGET] - lse)
            a, b, c = a * probability, b * probability, c * probability
        result[A], result[B], result[C] = a, b, c
    if dentropy is not None:
        on = (rows.columns != IGNORED).to(lse.dtype) * dentropy
        result[A] += on * (lse - entropies(statistics))
        result[Q] = -on
    return result


class RowMath:
    """The three as methods, as `launch.rows.RowKernels` has them."""

    prepare = staticmethod(prepare)
    losses = staticmethod(losses)
    coefficients = staticmethod(coefficients)


def merge(first: Tensor, second: Tensor) -> Tensor:
    """Statistics of earlier columns and of later ones together, [6, tokens] each."""
    top = torch.maximum(first[MAXIMUM], second[MAXIMUM])
    result = first + second  # the target's z and the sum of z; the others follow
    result[MAXIMUM] = top
    (sum1, dot1), (sum2, dot2) = (rebased(part, top) for part in (first, second))
    result[SUM], result[DOT] = sum1 + sum2, dot1 + dot2
    result[PLACE] = torch.where(second[MAXIMUM] > first[MAXIMUM], second[PLACE], first[PLACE])
    return result


def rebased(statistics: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of exp, and of exp times z, for another maximum."""
    return parallel.rebased(statistics[MAXIMUM], statistics[SUM], statistics[DOT], top)


def _reduced(values: Tensor, options: Options, shape: torch.Size) -> Tensor:
    return values.view(shape) if options.reduction == "none" else values.sum()
