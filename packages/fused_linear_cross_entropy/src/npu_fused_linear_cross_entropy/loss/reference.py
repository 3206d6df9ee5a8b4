"""The definition of the loss in plain PyTorch, which runs on a CPU: arithmetic on rows and on chunks of logits.

With z the logits, L = log sum exp z, y the target, e = label_smoothing, V the vocabulary's size, w class weights, w_y the
target's, W the sum of all w, N the rows that are not ignored and S the sum of w_y over them:

    unweighted    row = (1 - e) (L - z_y)     + e L - (e / V) sum z_i
    weighted      row = (1 - e) (L - z_y) w_y + (e / V) L W - (e / V) sum w_i z_i
    z-loss        lse_square_scale L^2
    loss          "mean": sum of row / N (weighted: / S) + z-loss / N      "sum", "none": row + z-loss
    token_scaling multiplies all of a row by exp(z_y - L), as a constant

The gradient of a row's loss with respect to z is exp(z - k) (a + q (z_i - k)) - c w_i - b [i = y] with factors of
`coefficients_of`, 1 / S in a and q, for k the largest z and S = sum exp(z - k); q and a part of a belong to the entropy
H = L - sum p z, p = exp(z - k) / S, whose gradient is -p (z - L + H). Differences from k come first: L is rounded.

All arithmetic is fp32 (fp64 for fp64 input); the gradient of the logits is rounded to x's dtype before it meets x and the
weight, as in the kernels. Source: torch.nn.functional.cross_entropy; for the z-loss, Chowdhery et al., "PaLM", arXiv
2204.02311.

The functions at the end add this arithmetic to a plan, as kernels.py adds launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling import collectives
from npu_tiling.calls import Empty
from npu_tiling.plans import Plan
from torch import Tensor

from ..call import (
    COEFFICIENTS,
    DOT,
    IGNORED,
    MAXIMUM,
    NO_COLUMN,
    PLACE,
    SUM,
    TARGET,
    TOTAL,
    WEIGHT,
    A,
    B,
    C,
    K,
    Options,
    Q,
)
from ..head import row
from ..tokens import MAX_RELATIVE_WEIGHT, are_counted
from . import Chunk, TargetFacts

_LANES = 8  # numbers of a row of factors, as kernels have it


def write_target_facts(
    target: Tensor,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    columns: Tensor,
    target_weight: Tensor | None,
    factors: Tensor,
    unfinished: Tensor | None,
    options: Options,
    dweight_scale: float | None,
) -> None:
    """Everything that follows from the targets [tokens] alone; nothing waits for the device.

    Args:
        divisor: replaces the number of counted rows, by which "mean" divides.
        columns, target_weight, factors, unfinished: are written; see `TargetFacts`. Of factors [2, 8] the second row is the
            gradient's.
        dweight_scale: None, or the factor of the sums that become the gradients of the weight and the bias. Then gradients
            are computed without the 1 / N of "mean", and with class weights divided by their mean over the rows that count;
            both are left for later. The gradient of the logits is then as large as a probability: divided by N it would
            underflow in fp16, whose smallest number is 6e-8, before a gradient scaler's factor reaches it.
    """
    dtype = factors.dtype
    counted = are_counted(target, options.ignore_index)
    known = (target >= 0) & (target < options.vocab_size)
    columns.copy_(torch.where(counted, torch.where(known, target, NO_COLUMN), IGNORED))
    count = counted.sum().to(dtype)
    some = (count > 0).to(dtype)
    of_loss = torch.stack((some, some, torch.ones_like(count), count))
    weighted_count, weight_size = count, count
    if class_weight is not None and target_weight is not None:
        wide = class_weight.to(dtype)
        place = columns - options.vocab_first
        here = (place >= 0) & (place < wide.shape[0])
        target_weight.copy_(torch.where(here, wide[place.clamp(0, wide.shape[0] - 1).long()], 0.0))
        of_loss[2] = wide.sum()
        if options.group:
            collectives.sum_(target_weight, options.group)
            collectives.sum_(of_loss[2:3], options.group)
        weighted_count, weight_size = target_weight.sum(), target_weight.abs().sum()
    if options.reduction == "mean":
        if divisor is not None:
            of_loss[:2] /= divisor.to(device=target.device, dtype=dtype)  # NaN for nothing of nothing
        else:
            of_loss[0] = torch.where(count > 0, 1.0 / weighted_count.where(weighted_count != 0, torch.nan), 0.0)
            of_loss[1] = torch.where(count > 0, 1.0 / count, 0.0)
    factors[0, :4] = factors[1, :4] = of_loss
    if unfinished is None:
        return
    relative = torch.ones_like(count)
    if target_weight is not None:
        relative = torch.where(weight_size > 0, count.clamp_max(MAX_RELATIVE_WEIGHT) / weight_size, 1.0)
    of_all = torch.where(count > 0, of_loss[0] / relative, 0.0)
    unfinished.copy_(of_all / torch.tensor([1.0, dweight_scale, dweight_scale], dtype=dtype))
    factors[1, 0] = relative
    factors[1, 1] = torch.where(of_loss[0] != 0, of_loss[1] / of_loss[0] * relative, 0.0)


def write_losses(statistics: Tensor, facts: TargetFacts, options: Options, loss: Tensor, *others: Tensor | None) -> None:
    """Writes the outputs that the caller asked for, from the statistics of all rows; see `LinearCrossEntropyOutput`."""
    z_loss, token_accuracy, predicted_tokens, lse, entropy = others
    columns, target_weight, factors = facts.columns, facts.target_weight, facts.factors[0]
    maximum, log = statistics[MAXIMUM], statistics[SUM].log()
    of_lse, nll = maximum + log, (maximum - statistics[TARGET]) + log
    e = options.label_smoothing
    of_loss = nll if target_weight is None else nll * target_weight
    if options.smoothed:
        weights = options.vocab_size if target_weight is None else factors[2]
        of_loss = (1.0 - e) * of_loss + (e / options.vocab_size) * (log * weights - statistics[TOTAL])
    if options.reduction == "mean":
        of_loss = of_loss * factors[0]
    of_z_loss = None
    if options.lse_square_scale or options.return_z_loss:
        of_z_loss = options.lse_square_scale * of_lse.square() * factors[1]
        of_loss = of_loss + of_z_loss
    if options.token_scaling:
        probability = torch.exp(-nll)
        of_loss = of_loss * probability
        of_z_loss = None if of_z_loss is None else of_z_loss * probability
    counted, known = columns != IGNORED, columns >= 0
    absent = torch.where(counted, torch.nan, 0.0).to(of_loss.dtype)  # NaN for a target outside the vocabulary, 0 if ignored
    place = statistics[PLACE]
    if token_accuracy is not None:
        right = (place == columns) & known
        token_accuracy.copy_(right.sum().to(of_loss.dtype) / factors[3].clamp_min(1))
    if predicted_tokens is not None:
        inside = place.clamp(0, options.vocab_size - 1).long()  # a row of NaN has no maximum
        predicted_tokens.copy_(torch.where(counted, inside, -1).view(predicted_tokens.shape))
    if entropy is not None:
        of_rows = log - statistics[DOT] / statistics[SUM]
        entropy.copy_(torch.where(counted, of_rows, 0.0).view(entropy.shape))
    if z_loss is not None:
        assert of_z_loss is not None
        z_loss.copy_(_reduced(torch.where(known, of_z_loss, absent), factors, options, z_loss.shape))
    if lse is not None:
        lse.copy_(torch.where(counted, of_lse, 0.0).view(lse.shape))
    loss.copy_(_reduced(torch.where(known, of_loss, absent), factors, options, loss.shape))


def _reduced(values: Tensor, factors: Tensor, options: Options, shape: torch.Size) -> Tensor:
    if options.reduction == "none":
        return values.view(shape)
    return values.sum() + torch.where(factors[3] > 0, 0.0, factors[0])  # NaN where no row counts, and the divisor is 0


def coefficients_of(
    statistics: Tensor, facts: TargetFacts, dloss: Tensor | float | None, dentropy: Tensor | None, options: Options
) -> Tensor:
    """[5, tokens]: k and the factors of the gradient, for gradients of the losses and entropies (a number or [tokens])."""
    columns, target_weight, factors = facts.columns, facts.target_weight, facts.gradient_factors
    maximum, total = statistics[MAXIMUM], statistics[SUM]
    result = statistics.new_zeros(COEFFICIENTS, statistics.shape[1])
    result[K] = maximum
    if dloss is not None:
        known, e = columns >= 0, options.label_smoothing
        main, of_z_loss = (torch.where(known, dloss * factor, 0.0) for factor in factors[:2])
        b, c = main * (1.0 - e), main * (e / options.vocab_size)
        a = main
        if target_weight is not None:
            b = b * target_weight
            a = b + c * factors[2]
        a = a + of_z_loss * (2.0 * options.lse_square_scale) * (maximum + total.log())
        if options.token_scaling:
            nll = (maximum - statistics[TARGET]) + total.log()
            probability = torch.exp(-nll.clamp_min(0.0))  # as formula.py's row_coefficients
            a, b, c = a * probability, b * probability, c * probability
        result[A], result[B], result[C] = a / total, b, c
    if dentropy is not None:
        on = (columns != IGNORED).to(total.dtype) * dentropy / total
        result[A] += on * (statistics[DOT] / total)
        result[Q] = -on
    return result


def join_statistics(parts: Tensor, statistics: Tensor) -> None:
    """Joins statistics of parts of the columns, [parts, 7, tokens], into those of all, [7, tokens]. Overwrites `parts`."""
    maxima, top = parts[:, MAXIMUM], statistics[MAXIMUM]
    torch.amax(maxima, 0, out=top)
    # Of a row with NaN any place will do: one of them is less than infinity.
    statistics[PLACE] = torch.where((maxima == top) | top.isnan(), parts[:, PLACE], torch.inf).amin(0)
    parts[:, SUM], parts[:, DOT] = rebased(maxima, parts[:, SUM], parts[:, DOT], top)
    parts[:, TOTAL] = rebased_total(maxima, parts[:, TOTAL], parts[:, WEIGHT], top)
    torch.sum(parts[:, SUM : DOT + 1], 0, out=statistics[SUM : DOT + 1])
    torch.sum(parts[:, WEIGHT], 0, out=statistics[WEIGHT])


def merge_statistics(first: Tensor, second: Tensor) -> Tensor:
    """Statistics of earlier columns and of later ones together, [7, tokens] each."""
    top = torch.maximum(first[MAXIMUM], second[MAXIMUM])
    result = first + second  # the target's z and the sum of weights; the others follow
    result[MAXIMUM] = top
    (sum1, dot1), (sum2, dot2) = (rebased(one[MAXIMUM], one[SUM], one[DOT], top) for one in (first, second))
    result[SUM], result[DOT] = sum1 + sum2, dot1 + dot2
    result[TOTAL] = sum(rebased_total(one[MAXIMUM], one[TOTAL], one[WEIGHT], top) for one in (first, second))
    result[PLACE] = torch.where(second[MAXIMUM] > first[MAXIMUM], second[PLACE], first[PLACE])
    return result


def rebased(maximum: Tensor, total: Tensor, dot: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of exp(z - maximum) and of exp(z - maximum) (z - maximum), for another maximum."""
    moved = maximum - top
    scale = torch.exp(moved)
    return total * scale, scale * (dot + moved * total)


def rebased_total(maximum: Tensor, total: Tensor, weight: Tensor, top: Tensor) -> Tensor:
    """The sum of w (z - maximum), for another maximum; `weight`: the sum of w."""
    return total + (maximum - top) * weight


def write_logits(logits: Tensor, bias: Tensor | None, options: Options) -> None:
    """Raw products become z, in place."""
    if bias is not None:
        logits += bias
    if options.logit_scale != 1.0:
        logits *= options.logit_scale
    if options.softcap is not None:
        logits.div_(options.softcap).tanh_().mul_(options.softcap)


def write_statistics(
    z: Tensor, target: Tensor, class_weight: Tensor | None, result: Tensor, first: int, options: Options, merge: bool
) -> None:
    """Writes statistics [7, rows] of z; `merge`: merged with the statistics of earlier columns in `result`."""
    found = torch.zeros_like(result)
    found[MAXIMUM], place = z.max(1)
    found[MAXIMUM].clamp_min_(torch.finfo(z.dtype).min)  # minus infinity less itself is no number
    found[PLACE] = place + first  # of equal maxima, the first
    shifted = z - found[MAXIMUM].unsqueeze(1)
    exponential = shifted.exp()
    found[SUM] = exponential.sum(1)
    if options.smoothed:
        weights = None if class_weight is None else class_weight.to(z.dtype)
        found[TOTAL] = shifted.sum(1) if weights is None else shifted @ weights
        found[WEIGHT] = z.shape[1] if weights is None else weights.sum()
    if options.return_entropy:
        found[DOT] = exponential.mul_(shifted.clamp_min_(torch.finfo(z.dtype).min)).sum(1)
    place = target - first
    here = (place >= 0) & (place < z.shape[1])
    chosen = z.gather(1, place.clamp(0, z.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
    found[TARGET] = torch.where(here, chosen, 0.0)
    result.copy_(merge_statistics(result, found) if merge else found)


def write_gradient(
    z: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    gradient: Tensor,
    coefficients: Tensor,
    first: int,
    options: Options,
) -> None:
    """Writes the gradient of the raw products, which may share the memory of z, given coefficients [5, rows]."""
    reference, a, b, c, q = coefficients.unsqueeze(2).unbind(0)  # [rows, 1] each
    g = z - reference
    if options.return_entropy:
        g = g.exp() * (a + q * g.clamp_min_(-1e30))  # 0 times minus infinity is no number
    else:
        g.exp_().mul_(a)
    if options.smoothed:
        g -= c if class_weight is None else c * class_weight.to(z.dtype)
    place = (target - first).long().unsqueeze(1)
    here = (place >= 0) & (place < z.shape[1])
    g.scatter_add_(1, place.clamp(0, z.shape[1] - 1), torch.where(here, -b, 0.0))
    if options.softcap is not None:
        g *= 1.0 - (z / options.softcap).square()
    if options.logit_scale != 1.0:
        g *= options.logit_scale
    gradient.copy_(g)


# The same as steps of a plan.


def target_facts(
    p: Plan, target: Any, class_weight: Any, divisor: Any, options: Options, exact: torch.dtype, dweight_scale: float | None
) -> TargetFacts:
    columns = p.new(Empty(target.shape, torch.int32))
    target_weight = None if class_weight is None else p.new(Empty(target.shape, exact))
    factors = p.new(Empty((2, _LANES), exact))
    unfinished = None if dweight_scale is None else p.new(Empty((3,), exact))
    written = (columns, target_weight, factors, unfinished)
    given = (target, class_weight, divisor, *written, options, dweight_scale)
    p.torch(write_target_facts, *given, writes=written)
    return TargetFacts(columns, target_weight, factors, row(p, factors, 0 if unfinished is None else 1), unfinished)


def losses(p: Plan, facts: TargetFacts, statistics: Any, options: Options, outputs: Sequence[Any]) -> None:
    p.torch(write_losses, statistics, facts, options, *outputs, writes=outputs)


def coefficients(p: Plan, facts: TargetFacts, statistics: Any, options: Options, dloss: Any, dentropy: Any) -> Any:
    makes = Empty((COEFFICIENTS, statistics.shape[1]), statistics.dtype)
    return p.torch(coefficients_of, statistics, facts, dloss, dentropy, options, makes=makes)


def join(p: Plan, parts: Any, statistics: Any) -> None:
    p.torch(join_statistics, parts, statistics, writes=[parts, statistics])


def prepare(p: Plan, chunk: Chunk, options: Options) -> None:
    """Raw products become z, in place."""
    p.torch(write_logits, chunk.logits, chunk.bias, options, writes=[chunk.logits])


def statistics(p: Plan, chunk: Chunk, options: Options, result: Any, *, merge: bool) -> None:
    given = (chunk.logits, chunk.target, chunk.class_weight, result)
    p.torch(write_statistics, *given, chunk.first, options, merge, writes=[result])


def gradient(p: Plan, chunk: Chunk, options: Options, gradient: Any, coefficients: Any) -> None:
    given = (chunk.logits, chunk.target, chunk.class_weight, gradient, coefficients)
    p.torch(write_gradient, *given, chunk.first, options, writes=[gradient])


def statistics_and_gradient(
    p: Plan, chunk: Chunk, options: Options, gradient_: Any, facts: TargetFacts, result: Any
) -> None:
    statistics(p, chunk, options, result, merge=False)
    gradient(p, chunk, options, gradient_, coefficients(p, facts, result, options, 1.0, None))
