"""The loss with probabilities as targets, which the caller has in memory: from checked options to the plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from npu_tiling import arguments, collectives
from npu_tiling.calls import Empty
from npu_tiling.dtensor import is_distributed
from npu_tiling.plans import Plan
from torch import Tensor

from ..call import LinearCrossEntropyOutput, Needs, Options, ProbabilityTargetGradients, ProbabilityTargets, whole_shape
from ..checks import check_loss
from ..decide import Task
from ..head import part
from ..tokens import checked_token_weight, total_weight
from .operator import PROBABILITY_TARGETS
from .plan import begin
from .reference import MAXIMUM, STATISTICS, SUM, logits_of, merged, slopes_of

_REFUSED = ("token_scaling", "return_token_accuracy", "return_predicted_tokens", "return_entropy")
_PIECE = 2**22  # fp32 elements of a chunk's targets in memory at a time: 16 MiB


def probability_loss(call: ProbabilityTargets, token_weight: Tensor | None) -> LinearCrossEntropyOutput:
    """The loss of x [..., H] and probabilities [..., V], with options that were checked."""
    options = call.options
    x, weight, target = call.x, call.weight, call.probs
    for name in _REFUSED:
        if getattr(options, name):
            raise ValueError(f"{name} is True and must be False where target has probabilities.")
    if options.ignore_index >= 0:
        raise ValueError(f"ignore_index is {options.ignore_index} and must be negative where target has probabilities.")
    shape = torch.Size(whole_shape(x, options))
    if target.dim() == len(shape):
        allowed = f"must be torch.int64 or torch.int32, or have shape {(*shape, weight.shape[0])}"
        raise ValueError(f"target is {target.dtype} with shape {tuple(target.shape)} and {allowed}.")
    arguments.shape("target", target, (*shape, weight.shape[0]))
    check_loss(x, weight, target.new_zeros(shape, dtype=torch.int64), call.bias, call.class_weight, call.frozen, options)
    arguments.device("target", target, x, "x's")
    if target.requires_grad:
        raise ValueError("target requires a gradient, which it does not get, and must be detached.")
    if is_distributed((x, weight, target, call.bias, call.class_weight)):
        raise ValueError("target has probabilities and must be int64 or int32 where there are DTensors.")
    flat = call._replace(x=x.reshape(-1, x.shape[-1]), probs=target.reshape(-1, target.shape[-1]))
    loss, lse, *_ = PROBABILITY_TARGETS(flat)
    z_loss = options.lse_square_scale * lse.square()
    weights = None if token_weight is None else checked_token_weight(token_weight, x, shape).reshape(-1)
    if options.lse_square_scale:
        loss = loss + z_loss
    loss, z_loss = (_reduced(one, weights, options.reduction, shape) for one in (loss, z_loss))
    known = lse.detach().view(shape) if options.return_lse else None
    return LinearCrossEntropyOutput(loss, z_loss if options.return_z_loss else None, None, None, known, None)


def _reduced(rows: Tensor, weights: Tensor | None, reduction: str, shape: torch.Size) -> Tensor:
    rows = rows if weights is None else rows * weights
    if reduction == "none":
        return rows.view(shape)
    if reduction == "sum":
        return rows.sum()
    if weights is None:
        return rows.sum() / max(1, rows.numel())
    return rows.sum() / total_weight(weights)


# Plans. c = w ((1 - e) probs + e / V), with class weights w and label_smoothing e, is the target.


def forward(p: Plan, call: ProbabilityTargets) -> tuple[Any, ...]:
    """See `ProbabilityTargets`."""
    options = call.options
    head, on = begin(p, call, Task.DISTRIBUTIONS, Needs(False, False, False))
    rows, exact = head.x.shape[0], head.tiling.exact
    statistics, sums = (p.new(Empty((count, rows), exact)) for count in (STATISTICS, 2))
    for tokens in head.tiling.chunks.tokens:
        result, of_targets = part(p, statistics, tokens, 1), part(p, sums, tokens, 1)
        p.torch(torch.Tensor.zero_, of_targets, writes=[of_targets])
        maximum = p.view(result, result.shape[1:], (1,), MAXIMUM * result.strides[0])
        for columns in head.tiling.chunks.columns:
            logits, before = head.products(tokens, columns, bias=True), None
            if columns.start:
                before = p.torch(torch.Tensor.clone, maximum, makes=Empty(maximum.shape, exact))
            on.statistics(p, logits, None, options, result, merge=columns.start > 0)
            probs, weight = _targets_of(p, call, tokens, columns)
            given = (logits, probs, weight, before, maximum, of_targets)
            p.torch(_add_sums, *given, call.bias is not None, options, writes=[of_targets])
        if options.group:
            p.torch(_join, result, of_targets, options.group, writes=[result, of_targets])
    found = {name: p.new(each) for name, each in call.results().items()}
    p.torch(_write_results, statistics, sums, *found.values(), writes=[*found.values()])
    return tuple(found.values())


def backward(p: Plan, call: ProbabilityTargetGradients) -> tuple[Any, ...]:
    """The gradients of x, weight and bias."""
    options = call.options
    head, on = begin(p, call, Task.DISTRIBUTION_GRADIENTS, call.needs)
    for tokens in head.tiling.chunks.tokens:
        own, factors = part(p, call.coefficients, tokens, 1), part(p, call.factors, tokens)
        for columns in head.tiling.chunks.columns:
            logits = head.products(tokens, columns, bias=True)
            gradient = head.gradient_memory(logits)
            if factors is None:
                on.gradient(p, logits, None, options, gradient, own, None)
            else:
                probs, weight = _targets_of(p, call, tokens, columns)
                for piece in _pieces(*logits.shape):  # each overwrites its own logits
                    some, into, of_rows = (part(p, each, piece) for each in (logits, gradient, factors))
                    given = (some, part(p, probs, piece), weight, of_rows, options)
                    of_targets = p.torch(_gradient_of_targets, *given, makes=Empty(some.shape, own.dtype))
                    on.gradient(p, some, None, options, into, part(p, own, piece, 1), None)
                    p.torch(torch.Tensor.sub_, into, of_targets, writes=[into])
            head.add(tokens, columns, gradient)
    return head.finished()


def _targets_of(p: Plan, call: Any, tokens: slice, columns: slice) -> tuple[Any, Any]:
    """Probabilities and class weights of a chunk."""
    return part(p, part(p, call.probs, tokens), columns, 1), part(p, call.class_weight, columns)


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    """Rows of a chunk whose targets are in memory at a time."""
    count = max(1, _PIECE // columns)
    return (slice(first, min(first + count, rows)) for first in range(0, rows, count))


def _targets(probs: Tensor, class_weight: Tensor | None, dtype: torch.dtype, options: Options) -> Tensor:
    """c of some rows."""
    e, targets = options.label_smoothing, probs.to(dtype)
    if e:
        targets = targets * (1.0 - e) + e / options.vocab_size
    return targets if class_weight is None else targets * class_weight.to(dtype)


def _add_sums(
    logits: Tensor,
    probs: Tensor,
    class_weight: Tensor | None,
    before: Tensor | None,
    maximum: Tensor,
    sums: Tensor,
    is_biased: bool,
    options: Options,
) -> None:
    """Adds a chunk's sums of c (k - z) and of c, [2, rows]; `before`: k of the columns before."""
    if before is not None:
        sums[0] += sums[1] * (maximum - before)
    for piece in _pieces(*logits.shape):
        targets = _targets(probs[piece], class_weight, maximum.dtype, options)
        terms = targets * (maximum[piece].unsqueeze(1) - logits_of(logits[piece].to(maximum.dtype), None, options))
        if is_biased:  # a bias may rule columns out
            terms.masked_fill_(targets == 0.0, 0.0)
        sums[0, piece] += terms.sum(1)
        sums[1, piece] += targets.sum(1)


def _join(statistics: Tensor, sums: Tensor, group: str) -> None:
    before = statistics[MAXIMUM].clone()
    statistics.copy_(merged(collectives.gather(statistics, group)))
    sums[0] += sums[1] * (statistics[MAXIMUM] - before)
    collectives.sum_(sums, group)


def _write_results(
    statistics: Tensor,
    sums: Tensor,
    cross_entropy: Tensor,
    lse: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    of_targets: Tensor,
) -> None:
    """Writes rows' cross entropies, L, its parts k and log S, and the sums of their targets, [N] each."""
    maximum.copy_(statistics[MAXIMUM])
    torch.log(statistics[SUM], out=log_sum)
    of_targets.copy_(sums[1])
    torch.add(sums[0], log_sum * of_targets, out=cross_entropy)
    torch.add(maximum, log_sum, out=lse)


def _gradient_of_targets(
    logits: Tensor, probs: Tensor, class_weight: Tensor | None, factors: Tensor, options: Options
) -> Tensor:
    """What the gradient of raw logits lacks of the targets."""
    targets = _targets(probs, class_weight, factors.dtype, options)
    z = logits_of(logits.to(targets.dtype), None, options)
    return targets * slopes_of(z, None, options) * factors.unsqueeze(1)
