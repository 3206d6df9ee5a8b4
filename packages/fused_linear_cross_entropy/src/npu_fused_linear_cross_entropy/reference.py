"""The definition of the loss in plain PyTorch, and what runs on a CPU: of rows, and of chunks of their logits.

With z the logits, L = log sum exp z, y the target, e = label_smoothing, V the vocabulary's size, w class weights, w_y the
target's, W the sum of all w, N the rows that are not ignored and S the sum of w_y over them:

    unweighted    row = (1 - e) (L - z_y)     + e L - (e / V) sum z_i
    weighted      row = (1 - e) (L - z_y) w_y + (e / V) L W - (e / V) sum w_i z_i
    z-loss        lse_square_scale L^2
    loss          "mean": sum of row / N (weighted: / S) + z-loss / N      "sum", "none": row + z-loss
    token_scaling multiplies all of a row by exp(z_y - L), as a constant

The gradient of a row's loss with respect to z, for p = exp(z - L), is p (a + q z_i) - c w_i - b [i = y] with factors that
`coefficients` gives; q and a part of a belong to the entropy H = L - sum p z, whose gradient is -p (z - L + H).

All arithmetic is fp32 (fp64 for fp64 input); the gradient of the logits is rounded to x's dtype before it meets x and the
weight, as in the kernels. Source: torch.nn.functional.cross_entropy; for the z-loss, Chowdhery et al., "PaLM", arXiv
2204.02311.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import parallel
from .chunks import Chunk
from .options import Options
from .rows import (
    COEFFICIENTS,
    DOT,
    IGNORED,
    LSE,
    MAX_RELATIVE_WEIGHT,
    MAXIMUM,
    NO_COLUMN,
    PLACE,
    SUM,
    TARGET,
    TOTAL,
    A,
    B,
    C,
    Losses,
    Q,
    TargetFacts,
    are_counted,
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
        return TargetFacts(columns, target_weight, factors, factors, None)
    of_gradient, relative = factors.clone(), torch.ones_like(count)
    if target_weight is not None:
        relative = torch.where(weight_size > 0, count.clamp_max(MAX_RELATIVE_WEIGHT) / weight_size, 1.0)
    unfinished = factors[0] / relative / torch.tensor([1.0, dweight_scale, dweight_scale], dtype=dtype)
    of_gradient[0] = relative
    of_gradient[1] = torch.where(factors[0] > 0, factors[1] / factors[0] * relative, 0.0)
    return TargetFacts(columns, target_weight, factors, of_gradient, unfinished)


def losses(facts: TargetFacts, statistics: Tensor, options: Options, shape: torch.Size) -> Losses:
    """The outputs that the caller asked for, from the statistics of all rows; `shape`: of the targets."""
    lse = statistics[MAXIMUM] + statistics[SUM].log()
    nll = lse - statistics[TARGET]
    e = options.label_smoothing
    loss = nll if facts.target_weight is None else nll * facts.target_weight
    if options.smoothed:
        weights = options.vocab_size if facts.target_weight is None else facts.factors[2]
        loss = (1.0 - e) * loss + (e / options.vocab_size) * (lse * weights - statistics[TOTAL])
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
    absent = torch.where(counted, torch.nan, 0.0)  # NaN for a target outside the vocabulary, 0 if ignored
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
        z_loss = _reduced(torch.where(known, z_loss, absent), options, shape)
    kept = torch.where(counted, lse, 0.0).view(shape) if options.return_lse else None
    return Losses(
        _reduced(loss, options, shape), z_loss if options.return_z_loss else None, accuracy, predicted, kept, entropy
    )


def entropies(statistics: Tensor) -> Tensor:
    """H of each row: log S - sum of exp(z - max) (z - max) / S."""
    return statistics[SUM].log() - statistics[DOT] / statistics[SUM]


def coefficients(
    facts: TargetFacts, statistics: Tensor, options: Options, dloss: Tensor | float | None, dentropy: Tensor | None
) -> Tensor:
    """[5, tokens]: L and the factors of the gradient, for gradients of the losses and entropies (a number or [tokens])."""
    lse = statistics[MAXIMUM] + statistics[SUM].log()
    result = lse.new_zeros(COEFFICIENTS, lse.shape[0])
    result[LSE] = lse
    if dloss is not None:
        on = (facts.columns >= 0).to(lse.dtype) * dloss
        e, main = options.label_smoothing, on * facts.gradient_factors[0]
        b, c = main * (1.0 - e), main * (e / options.vocab_size)
        a = main
        if facts.target_weight is not None:
            b = b * facts.target_weight
            a = b + c * facts.gradient_factors[2]
        a = a + on * facts.gradient_factors[1] * (2.0 * options.lse_square_scale) * lse
        if options.token_scaling:
            probability = torch.exp(statistics[TARGET] - lse)
            a, b, c = a * probability, b * probability, c * probability
        result[A], result[B], result[C] = a, b, c
    if dentropy is not None:
        on = (facts.columns != IGNORED).to(lse.dtype) * dentropy
        result[A] += on * (lse - entropies(statistics))
        result[Q] = -on
    return result


def merge_statistics(first: Tensor, second: Tensor) -> Tensor:
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


class ReferenceRows:
    """The arithmetic on rows, as `launch.rows.RowKernels` has it."""

    target_facts = staticmethod(target_facts)
    losses = staticmethod(losses)
    coefficients = staticmethod(coefficients)


class ReferenceChunks:
    """The arithmetic on chunks of logits [rows, columns], as `launch.chunk.ChunkKernels` has it."""

    def __init__(self, bias: Tensor | None, class_weight: Tensor | None, options: Options) -> None:
        self._bias = bias
        self._class_weight = class_weight
        self._options = options

    def prepare(self, logits: Tensor, columns: slice) -> None:
        """Raw products become z, in place."""
        if self._bias is not None:
            logits += self._bias[columns]
        if self._options.logit_scale != 1.0:
            logits *= self._options.logit_scale
        if self._options.softcap is not None:
            logits.div_(self._options.softcap).tanh_().mul_(self._options.softcap)

    def statistics(self, chunk: Chunk, result: Tensor, *, merge: bool) -> None:
        """Writes statistics [6, rows] of z; `merge`: together with those of earlier columns, which `result` has."""
        z, columns, target, first = chunk
        found = torch.zeros_like(result)
        found[MAXIMUM], place = z.max(1)
        found[PLACE] = place + first  # of equal maxima, the first
        shifted = z - found[MAXIMUM].unsqueeze(1)
        exponential = shifted.exp()
        found[SUM] = exponential.sum(1)
        if self._options.return_entropy:
            found[DOT] = exponential.mul_(shifted.clamp_min_(torch.finfo(z.dtype).min)).sum(1)
        if self._options.smoothed:
            weights = None if self._class_weight is None else self._class_weight[columns].to(z.dtype)
            found[TOTAL] = z.sum(1) if weights is None else z @ weights
        place = target - first
        here = (place >= 0) & (place < z.shape[1])
        chosen = z.gather(1, place.clamp(0, z.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
        found[TARGET] = torch.where(here, chosen, 0.0)
        result.copy_(merge_statistics(result, found) if merge else found)

    def keep(self, chunk: Chunk, kept: Tensor, result: Tensor, largest: Tensor, *, merge: bool) -> None:
        """Statistics as `statistics` has them; the largest [rows] so far; and z less those, in other memory."""
        self.statistics(chunk, result, merge=merge)
        lowest = torch.finfo(largest.dtype).min  # minus infinity less itself is no number
        torch.clamp(result[MAXIMUM], min=lowest, out=largest)
        torch.sub(chunk.logits, largest.unsqueeze(1), out=kept)

    def gradient(self, chunk: Chunk, gradient: Tensor, coefficients: Tensor) -> None:
        """Writes the gradient of the raw products, which may share the memory of z, given coefficients [5, rows]."""
        z, columns, target, first = chunk
        lse, a, b, c, q = coefficients.unsqueeze(2).unbind(0)  # [rows, 1] each
        g = (z - lse).exp_()
        if self._options.return_entropy:
            g *= a + q * z
        else:
            g *= a
        if self._options.smoothed:
            g -= c if self._class_weight is None else c * self._class_weight[columns].to(z.dtype)
        place = (target - first).long().unsqueeze(1)
        here = (place >= 0) & (place < z.shape[1])
        g.scatter_add_(1, place.clamp(0, z.shape[1] - 1), torch.where(here, -b, 0.0))
        if self._options.softcap is not None:
            g *= 1.0 - (z / self._options.softcap).square()
        if self._options.logit_scale != 1.0:
            g *= self._options.logit_scale
        gradient.copy_(g)

    def statistics_and_gradient(self, chunk: Chunk, gradient: Tensor, facts: TargetFacts, result: Tensor) -> None:
        """Writes statistics [6, rows] of whole rows, and the gradient of the one loss that they give."""
        self.statistics(chunk, result, merge=False)
        self.gradient(chunk, gradient, coefficients(facts, result, self._options, 1.0, None))
