"""Per-row arithmetic on vectors of [tokens], in plain PyTorch on every device: from statistics of logits to losses.

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
# Rows of the tensor of coefficients [5, tokens].
LSE, A, B, C, Q = range(5)
NO_COLUMN = -1


class Rows(NamedTuple):
    """What is known of rows before there are logits.

    Attributes:
        counted: bool [tokens], not ignored.
        columns: int32 [tokens], the target's column; NO_COLUMN where ignored or outside the vocabulary.
        factors: [3]: what losses are multiplied by, what z-losses are, and the sum of the class weights.
        target_weight: [tokens] or None: the class weight of the target.
        total: how many are not ignored.
    """

    counted: Tensor
    columns: Tensor
    factors: Tensor
    target_weight: Tensor | None
    total: Tensor


def probability_sized(rows: Rows) -> tuple[Rows, Tensor]:
    """Rows whose losses are multiplied by 1 instead of what they are, and that factor: of "mean", 1 / N.

    A gradient of theirs is of the size of a probability. With 1 / N in it, it would vanish in fp16, whose smallest number is
    6e-8, before anything that multiplies the loss, a gradient scaler, can prevent that.
    """
    factor = rows.factors[0].clone()
    factors = rows.factors.clone()
    factors[0] = 1.0
    factors[1] = torch.where(factor > 0, factors[1] / factor, 0.0)
    return rows._replace(factors=factors), factor


class Losses(NamedTuple):
    """Outputs, None where not asked for."""

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None


def prepare(
    target: Tensor, class_weight: Tensor | None, divisor: Tensor | None, options: Options, dtype: torch.dtype
) -> Rows:
    """Everything that the targets [tokens] alone decide; nothing waits for the device."""
    counted = are_counted(target, options.ignore_index)
    known = counted & (target >= 0) & (target < options.vocab_size)
    columns = torch.where(known, target, NO_COLUMN).to(torch.int32)
    count = counted.sum().to(dtype)
    factors = torch.ones(3, dtype=dtype, device=target.device)
    target_weight, weighted_count = None, count
    if class_weight is not None:
        wide = class_weight.to(dtype)
        place = columns - options.vocab_first
        here = (place >= 0) & (place < wide.shape[0])
        target_weight = torch.where(here, wide[place.clamp(0, wide.shape[0] - 1).long()], 0.0)
        factors[2] = wide.sum()
        if options.group:
            parallel.sum_(target_weight, options.group)
            parallel.sum_(factors[2:], options.group)
        weighted_count = target_weight.sum()
    if options.reduction == "mean":
        if divisor is not None:
            factors[:2] = 1.0 / divisor.to(device=target.device, dtype=dtype)
        else:
            some = count > 0
            factors[0] = torch.where(some, 1.0 / weighted_count, 0.0)
            factors[1] = torch.where(some, 1.0 / count, 0.0)
    return Rows(counted, columns, factors, target_weight, count)


def are_counted(target: Tensor, ignore_index: int) -> Tensor:
    """bool, of the targets' shape: not ignored."""
    limits = torch.iinfo(target.dtype)
    if not limits.min <= ignore_index <= limits.max:  # PyTorch would wrap it to another number
        return torch.ones_like(target, dtype=torch.bool)
    return target != ignore_index


def losses(rows: Rows, statistics: Tensor, options: Options, shape: torch.Size) -> Losses:
    """From the statistics of all rows to what the caller asked for; `shape` is that of the targets."""
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
    absent = torch.where(rows.counted, torch.nan, 0.0)  # ignored, or a target that no vocabulary has
    known = rows.columns != NO_COLUMN
    loss = torch.where(known, loss, absent)
    accuracy = predicted = entropy = None
    if options.argmax:
        place = statistics[PLACE]
        if options.return_token_accuracy:
            right = (place == rows.columns) & known
            accuracy = right.sum().to(loss.dtype) / rows.total.clamp_min(1)
        if options.return_predicted_tokens:
            inside = place.clamp(0, options.vocab_size - 1).long()  # of a row of NaN, no place is that of its maximum
            predicted = torch.where(rows.counted, inside, -1).view(shape)
    if options.return_entropy:
        entropy = torch.where(rows.counted, entropies(statistics), 0.0).view(shape)
    if options.return_z_loss:
        assert z_loss is not None
        z_loss = _reduced(torch.where(known, z_loss, absent), options, shape)
    kept = torch.where(rows.counted, lse, 0.0).view(shape) if options.return_lse else None
    return Losses(
        _reduced(loss, options, shape), z_loss if options.return_z_loss else None, accuracy, predicted, kept, entropy
    )


def entropies(statistics: Tensor) -> Tensor:
    """H of each row: log S - sum of exp(z - max) (z - max) / S."""
    return statistics[SUM].log() - statistics[DOT] / statistics[SUM]


def coefficients(rows: Rows, statistics: Tensor, options: Options, dloss: Tensor | None, dentropy: Tensor | None) -> Tensor:
    """[5, tokens]: L and the factors of the gradient, for gradients of the losses (a number or one for each row)."""
    lse = statistics[MAXIMUM] + statistics[SUM].log()
    result = lse.new_zeros(5, lse.shape[0])
    result[LSE] = lse
    if dloss is not None:
        on = (rows.columns != NO_COLUMN).to(lse.dtype) * dloss
        e, main = options.label_smoothing, on * rows.factors[0]
        b, c = main * (1.0 - e), main * (e / options.vocab_size)
        a = main
        if rows.target_weight is not None:
            b = b * rows.target_weight
            a = b + c * rows.factors[2]
        a = a + on * rows.factors[1] * (2.0 * options.lse_square_scale) * lse
        if options.token_scaling:
            probability = torch.exp(statistics[TARGET] - lse)
            a, b, c = a * probability, b * probability, c * probability
        result[A], result[B], result[C] = a, b, c
    if dentropy is not None:
        on = rows.counted.to(lse.dtype) * dentropy
        result[A] += on * (lse - entropies(statistics))
        result[Q] = -on
    return result


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
