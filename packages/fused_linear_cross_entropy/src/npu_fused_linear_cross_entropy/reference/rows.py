"""The arithmetic on rows, vectors of [tokens], in plain PyTorch. Formulas: the folder's docstring."""

from __future__ import annotations

import torch
from npu_tiling.pytorch import collectives
from torch import Tensor

from ..options import Options
from ..rows import (
    COEFFICIENTS,
    DOT,
    IGNORED,
    MAX_RELATIVE_WEIGHT,
    MAXIMUM,
    NO_COLUMN,
    PLACE,
    REFERENCE,
    SUM,
    TARGET,
    TOTAL,
    WEIGHT,
    A,
    B,
    C,
    LinearCrossEntropyOutput,
    Q,
    TargetFacts,
    are_counted,
    rebased,
    rebased_total,
)


def target_facts(
    target: Tensor,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    options: Options,
    dtype: torch.dtype,
    dweight_scale: float | None,
) -> TargetFacts:
    """Everything that follows from the targets [tokens] alone; nothing waits for the device.

    Args:
        divisor: replaces the number of counted rows, by which "mean" divides.
        dweight_scale: None, or the factor of the sums that become the gradients of the weight and the bias. Then gradients
            are computed without the 1 / N of "mean", and with class weights divided by their mean over the rows that count;
            both are left for later. The gradient of the logits is then as large as a probability: divided by N it would
            underflow in fp16, whose smallest number is 6e-8, before a gradient scaler's factor reaches it.
    """
    counted = are_counted(target, options.ignore_index)
    known = (target >= 0) & (target < options.vocab_size)
    columns = torch.where(counted, torch.where(known, target, NO_COLUMN), IGNORED).to(torch.int32)
    count = counted.sum().to(dtype)
    some = (count > 0).to(dtype)
    factors = torch.stack((some, some, torch.ones_like(count), count))
    target_weight, weighted_count, weight_size = None, count, count
    if class_weight is not None:
        wide = class_weight.to(dtype)
        place = columns - options.vocab_first
        here = (place >= 0) & (place < wide.shape[0])
        target_weight = torch.where(here, wide[place.clamp(0, wide.shape[0] - 1).long()], 0.0)
        factors[2] = wide.sum()
        if options.group:
            collectives.sum_(target_weight, options.group)
            collectives.sum_(factors[2:3], options.group)
        weighted_count, weight_size = target_weight.sum(), target_weight.abs().sum()
    if options.reduction == "mean":
        if divisor is not None:
            factors[:2] /= divisor.to(device=target.device, dtype=dtype)  # NaN for nothing of nothing
        else:
            factors[0] = torch.where(count > 0, 1.0 / weighted_count, 0.0)
            factors[1] = torch.where(count > 0, 1.0 / count, 0.0)
    if dweight_scale is None:
        return TargetFacts(columns, target_weight, factors, factors, None)
    of_gradient, relative = factors.clone(), torch.ones_like(count)
    if target_weight is not None:
        relative = torch.where(weight_size > 0, count.clamp_max(MAX_RELATIVE_WEIGHT) / weight_size, 1.0)
    of_all = torch.where(count > 0, factors[0] / relative, 0.0)
    unfinished = of_all / torch.tensor([1.0, dweight_scale, dweight_scale], dtype=dtype)
    of_gradient[0] = relative
    of_gradient[1] = torch.where(factors[0] != 0, factors[1] / factors[0] * relative, 0.0)
    return TargetFacts(columns, target_weight, factors, of_gradient, unfinished)


def losses(facts: TargetFacts, statistics: Tensor, options: Options, shape: torch.Size) -> LinearCrossEntropyOutput:
    """The outputs that the caller asked for, from the statistics of all rows; `shape`: of the targets."""
    maximum, log = statistics[MAXIMUM], statistics[SUM].log()
    lse, nll = maximum + log, (maximum - statistics[TARGET]) + log
    e = options.label_smoothing
    loss = nll if facts.target_weight is None else nll * facts.target_weight
    if options.smoothed:
        weights = options.vocab_size if facts.target_weight is None else facts.factors[2]
        loss = (1.0 - e) * loss + (e / options.vocab_size) * (log * weights - statistics[TOTAL])
    if options.reduction == "mean":
        loss = loss * facts.factors[0]
    z_loss = None
    if options.lse_square_scale or options.return_z_loss:
        z_loss = options.lse_square_scale * lse.square() * facts.factors[1]
        loss = loss + z_loss
    if options.token_scaling:
        probability = torch.exp(-nll)
        loss = loss * probability
        z_loss = None if z_loss is None else z_loss * probability
    counted, known = facts.columns != IGNORED, facts.columns >= 0
    absent = torch.where(counted, torch.nan, 0.0).to(loss.dtype)  # NaN for a target outside the vocabulary, 0 if ignored
    loss = torch.where(known, loss, absent)
    accuracy = predicted = entropy = None
    if options.argmax:
        place = statistics[PLACE]
        if options.return_token_accuracy:
            right = (place == facts.columns) & known
            accuracy = right.sum().to(loss.dtype) / facts.factors[3].clamp_min(1)
        if options.return_predicted_tokens:
            inside = place.clamp(0, options.vocab_size - 1).long()  # a row of NaN has no maximum
            predicted = torch.where(counted, inside, -1).view(shape)
    if options.return_entropy:
        entropy = torch.where(counted, entropies(statistics), 0.0).view(shape)
    if options.return_z_loss:
        assert z_loss is not None
        z_loss = _reduced(torch.where(known, z_loss, absent), facts.factors, options, shape)
    kept = torch.where(counted, lse, 0.0).view(shape) if options.return_lse else None
    loss = _reduced(loss, facts.factors, options, shape)
    return LinearCrossEntropyOutput(loss, z_loss if options.return_z_loss else None, accuracy, predicted, kept, entropy)


def entropies(statistics: Tensor) -> Tensor:
    """H of each row: log S - sum of exp(z - max) (z - max) / S."""
    return statistics[SUM].log() - statistics[DOT] / statistics[SUM]


def coefficients(
    facts: TargetFacts, statistics: Tensor, options: Options, dloss: Tensor | float | None, dentropy: Tensor | None
) -> Tensor:
    """[5, tokens]: k and the factors of the gradient, for gradients of the losses and entropies (a number or [tokens])."""
    maximum, total = statistics[MAXIMUM], statistics[SUM]
    result = statistics.new_zeros(COEFFICIENTS, statistics.shape[1])
    result[REFERENCE] = maximum
    if dloss is not None:
        known, e = facts.columns >= 0, options.label_smoothing
        main, of_z_loss = (torch.where(known, dloss * factor, 0.0) for factor in facts.gradient_factors[:2])
        b, c = main * (1.0 - e), main * (e / options.vocab_size)
        a = main
        if facts.target_weight is not None:
            b = b * facts.target_weight
            a = b + c * facts.gradient_factors[2]
        a = a + of_z_loss * (2.0 * options.lse_square_scale) * (maximum + total.log())
        if options.token_scaling:
            nll = (maximum - statistics[TARGET]) + total.log()
            probability = torch.exp(-nll.clamp_min(0.0))  # as formula.py's row_coefficients
            a, b, c = a * probability, b * probability, c * probability
        result[A], result[B], result[C] = a / total, b, c
    if dentropy is not None:
        on = (facts.columns != IGNORED).to(total.dtype) * dentropy / total
        result[A] += on * (statistics[DOT] / total)
        result[Q] = -on
    return result


def join(parts: Tensor, statistics: Tensor) -> None:
    """Joins the statistics of ranks, parts [ranks, 7, tokens], into those of all columns, [7, tokens]. Overwrites parts."""
    maxima, top = parts[:, MAXIMUM], statistics[MAXIMUM]
    torch.amax(maxima, 0, out=top)
    # Of a row with NaN any place will do: one of them is less than infinity.
    statistics[PLACE] = torch.where((maxima == top) | top.isnan(), parts[:, PLACE], torch.inf).amin(0)
    parts[:, SUM], parts[:, DOT] = rebased(maxima, parts[:, SUM], parts[:, DOT], top)
    parts[:, TOTAL] = rebased_total(maxima, parts[:, TOTAL], parts[:, WEIGHT], top)
    torch.sum(parts[:, SUM : DOT + 1], 0, out=statistics[SUM : DOT + 1])
    torch.sum(parts[:, WEIGHT], 0, out=statistics[WEIGHT])


def _reduced(values: Tensor, factors: Tensor, options: Options, shape: torch.Size) -> Tensor:
    if options.reduction == "none":
        return values.view(shape)
    return values.sum() + torch.where(factors[3] > 0, 0.0, factors[0])  # NaN where no row counts, and the divisor is 0


class ReferenceRows:
    """The arithmetic on rows, as `launch.rows.RowKernels` has it."""

    target_facts = staticmethod(target_facts)
    losses = staticmethod(losses)
    coefficients = staticmethod(coefficients)
    join = staticmethod(join)
