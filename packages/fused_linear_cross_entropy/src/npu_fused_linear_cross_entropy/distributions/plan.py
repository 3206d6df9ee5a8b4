"""The plans of distributions: statistics of rows, logits of ids, the largest logits, and gradients.

Logits are in memory a chunk at a time: some columns of the vocabulary, or all of them. What concerns ids and the largest
logits is PyTorch's gather, scatter, max and topk. Where a row names a column twice both places hold the same gradient, the
sum, so that the order in which they are scattered does not matter.

At the end: the loss with probabilities as targets, which the caller has in memory, from checked options to its plans.
Experimental: PyTorch's cross entropy has it, and no trainer that we know calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from npu_tiling import arguments, collectives
from npu_tiling.calls import Empty
from npu_tiling.dtensor import is_distributed
from npu_tiling.plans import Plan
from torch import Tensor

from ..call import (
    NOTHING,
    DistributionGradients,
    Distributions,
    LinearCrossEntropyOutput,
    Needs,
    Options,
    ProbabilityTargetGradients,
    ProbabilityTargets,
    whole_shape,
)
from ..checks import check_loss
from ..decide import Task, choose
from ..head import Head, check_columns, linear, part, shape_of
from ..loss.reference import write_logits
from ..tokens import are_columns, checked_token_weight, total_weight
from . import MOMENTS, PROBABILITY_TARGETS, are_known
from .reference import MAXIMUM, STATISTICS, SUM, logits_of, merged, slopes_of, write_moments

_PAIRS = 2**24  # of ids that are compared at a time


def begin(p: Plan, call: Any, task: Task, needs: Needs) -> tuple[Head, ModuleType]:
    """The head of a call, and the functions for its chunks: kernels.py, or reference.py where there is no chip."""
    layer = linear(p, call)
    tiling = choose(shape_of(p, call, layer, task, needs, unfinished=False, is_readable=False))
    if p.chip is None:
        from . import reference

        return Head(p, call, layer, tiling), reference
    from . import kernels

    return Head(p, call, layer, tiling), kernels


def forward(p: Plan, call: Distributions) -> tuple[Any, ...]:
    """See `Distributions`."""
    options, ids, group = call.options, call.ids, call.options.group
    check_columns(p, "ids", ids, options)
    head, steps = begin(p, call, Task.DISTRIBUTIONS, NOTHING)
    chunks, exact, rows = head.tiling.chunks, head.tiling.exact, head.x.shape[0]
    results = {name: p.new(each) for name, each in call.results().items()}
    statistics = p.new(Empty((STATISTICS, rows), exact))
    of_ids, of_top, top_ids, first = (results[name] for name in ("ids_log_probs", "top_log_probs", "top_ids", "first"))
    counts = [min(call.top_k, columns.stop - columns.start) for columns in chunks.columns]
    for tokens in chunks.tokens:
        rates, chunk_ids, result = part(p, call.rates, tokens), part(p, ids, tokens), part(p, statistics, tokens, 1)
        id_logits, count = part(p, of_ids, tokens), tokens.stop - tokens.start
        tops = [p.new(Empty((count, sum(counts)), each) if call.top_k else None) for each in (exact, torch.int64)]
        of_parts = (len(chunks.columns), count)
        firsts = [p.new(Empty(of_parts, each) if call.find_first else None) for each in (exact, torch.int64)]
        for i, columns in enumerate(chunks.columns):
            logits = head.products(tokens, columns, bias=True)
            column = options.vocab_first + columns.start
            steps.statistics(p, logits, rates, options, result, merge=i > 0)
            if id_logits is not None:
                p.torch(_gather, logits, chunk_ids, id_logits, column, i > 0, writes=[id_logits])
            if call.top_k:
                place = slice(sum(counts[:i]), sum(counts[: i + 1]))
                found = [part(p, each, place, 1) for each in tops]
                p.torch(_find_largest, logits, rates, *found, column, options, writes=found)
            if first is not None:
                found = [part(p, each, slice(i, i + 1)) for each in firsts]
                p.torch(_find_first, logits, *found, column, options, p.chip is None, writes=[logits, *found])
        if group:
            p.torch(_join, result, group, writes=[result])
        maximum = p.view(result, (count,), (1,), MAXIMUM * result.strides[0])
        if id_logits is not None:
            if group:
                p.torch(collectives.sum_, id_logits, group, writes=[id_logits])
            p.torch(_subtract, id_logits, rates, maximum, options, writes=[id_logits])
        if call.top_k:
            found = [part(p, each, tokens) for each in (of_top, top_ids)]
            p.torch(_write_largest, *tops, maximum, *found, group, writes=found)
        if first is not None:
            found = part(p, first, tokens)
            p.torch(_write_first, *firsts, found, group, writes=[found])
    moments = [results[name] for name in MOMENTS]
    p.torch(write_moments, statistics, options.vocab_size, *moments, writes=moments)
    if of_ids is not None:
        p.torch(_less_log_sum_of_ids, of_ids, results["log_sum"], ids, options, writes=[of_ids])
    if of_top is not None:
        p.torch(_less_log_sum, of_top, results["log_sum"], writes=[of_top])
    return tuple(results.values())


def backward(p: Plan, call: DistributionGradients) -> tuple[Any, ...]:
    """The gradients of x, weight, bias and rates."""
    options, group = call.options, call.options.group
    head, steps = begin(p, call, Task.DISTRIBUTION_GRADIENTS, call.needs)
    drates = p.new(Empty((head.x.shape[0],), call.coefficients.dtype) if call.need_drates else None)
    for tokens in head.tiling.chunks.tokens:
        coefficients = part(p, call.coefficients, tokens, 1)
        rates, chunk_ids = part(p, p.contiguous(call.rates), tokens), part(p, call.ids, tokens)
        values, dots = None, None
        if chunk_ids is not None:
            given = (part(p, call.log_probs, tokens), part(p, call.did_log_probs, tokens))
            values, dots = (p.new(Empty(each, coefficients.dtype)) for each in (chunk_ids.shape, chunk_ids.shape[:1]))
            p.torch(_of_ids, coefficients, chunk_ids, *given, rates, values, dots, options, writes=[values, dots])
        chunk_drates = part(p, drates, tokens)
        for columns in head.tiling.chunks.columns:
            logits = head.products(tokens, columns, bias=True)
            gradient = head.gradient_memory(logits)
            of_columns = p.new(None if drates is None else Empty(coefficients.shape[1:], coefficients.dtype))
            steps.gradient(p, logits, rates, options, gradient, coefficients, of_columns)
            if chunk_ids is not None:
                p.torch(_scatter, gradient, chunk_ids, values, options.vocab_first + columns.start, writes=[gradient])
            head.add(tokens, columns, gradient)
            if chunk_drates is not None:
                p.torch(_add, of_columns, chunk_drates, columns.start > 0, writes=[chunk_drates])
        if chunk_drates is not None:
            if group:
                p.torch(collectives.sum_, chunk_drates, group, writes=[chunk_drates])
            p.torch(_end_drates, chunk_drates, coefficients, dots, writes=[chunk_drates])
    if drates is not None:
        p.torch(torch.Tensor.div_, drates, call.rates, writes=[drates])
    return *head.finished(), drates


def _gather(logits: Tensor, ids: Tensor, into: Tensor, first: int, adds: bool) -> None:
    """Writes the logits [rows, ids] of ids in a chunk whose first column is `first`, 0 for others; `adds`: adds them."""
    count = logits.shape[1]
    chosen = logits.gather(1, (ids - first).clamp(0, count - 1))
    chosen = torch.where(are_columns(ids, first, count), chosen, 0.0).to(into.dtype)
    into.copy_(into + chosen if adds else chosen)


def _find_largest(logits: Tensor, rates: Tensor | None, values: Tensor, ids: Tensor, first: int, options: Options) -> None:
    """Writes the largest z of each row of a chunk, and their columns."""
    found, places = logits.topk(values.shape[1], dim=1, largest=options.logit_scale >= 0.0)
    values.copy_(logits_of(found.to(values.dtype), rates, options))
    ids.copy_(places + first)


def _find_first(logits: Tensor, values: Tensor, ids: Tensor, first: int, options: Options, on_cpu: bool) -> None:
    """Writes the largest z of each row of a chunk, at rate 1, and the first column that has it. May overwrite the logits."""
    found, places = _capped(logits, values.dtype, options, on_cpu).max(1)
    values.copy_(found)
    ids.copy_(places + first)


def _capped(logits: Tensor, dtype: torch.dtype, options: Options, on_cpu: bool) -> Tensor:
    """z of raw logits, all rates 1, with the roundings of the loss: of its kernels, or of its definition on a CPU."""
    if options.softcap is None and options.logit_scale == 1.0:
        return logits
    z = logits.to(dtype)
    if on_cpu or options.softcap is None:
        write_logits(z, None, options)
        return z
    z *= options.logit_scale
    e = z.abs().mul_(-2.0 / options.softcap).exp_()  # as `formula.logits_of_raw`
    return torch.copysign((1.0 - e).div_(1.0 + e), z).mul_(options.softcap)


def _join(statistics: Tensor, group: str) -> None:
    statistics.copy_(merged(collectives.gather(statistics, group)))


def _subtract(id_logits: Tensor, rates: Tensor | None, maximum: Tensor, options: Options) -> None:
    torch.sub(logits_of(id_logits, rates, options), maximum.unsqueeze(1), out=id_logits)


def _write_largest(of_all: Tensor, all_ids: Tensor, maximum: Tensor, top_logits: Tensor, ids: Tensor, group: str) -> None:
    """Writes the largest of all parts' logits [rows, count], less the row's largest, and their columns."""
    values, places = _largest(of_all, all_ids, ids.shape[1], group)
    torch.sub(values, maximum.unsqueeze(1), out=top_logits)
    ids.copy_(places)


def _largest(of_all: Tensor, all_ids: Tensor, count: int, group: str) -> tuple[Tensor, Tensor]:
    lowest = torch.finfo(of_all.dtype).min
    if not group:
        return largest(of_all, all_ids, count)
    lacking = max(0, count - of_all.shape[1])  # of a rank that has fewer columns
    # A column that is ruled out, minus infinity, comes before what a rank lacks.
    of_all = torch.nn.functional.pad(of_all.clamp_min(lowest), (0, lacking), value=-torch.inf)
    own = largest(of_all, torch.nn.functional.pad(all_ids, (0, lacking)), count)
    of_all, all_ids = (collectives.gather(one, group).transpose(0, 1).flatten(1) for one in own)
    values, places = largest(of_all, all_ids, count)
    return values.masked_fill(values == lowest, -torch.inf), places


def _write_first(values: Tensor, ids: Tensor, first: Tensor, group: str) -> None:
    """Writes the first column that has a row's largest z, of parts [parts, rows]."""
    values, ids = first_largest(values, ids)
    if group:
        _, ids = first_largest(collectives.gather(values, group), collectives.gather(ids, group))
    first.copy_(ids)


def _less_log_sum(logits: Tensor, log_sum: Tensor) -> None:
    torch.sub(logits, log_sum.unsqueeze(1), out=logits)


def _less_log_sum_of_ids(below: Tensor, log_sum: Tensor, ids: Tensor, options: Options) -> None:
    absent = torch.where(ids == options.ignore_index, 0.0, torch.nan).to(below.dtype)
    torch.where(are_known(ids, options), below - log_sum.unsqueeze(1), absent, out=below)


def _of_ids(
    coefficients: Tensor,
    named: Tensor,
    log_probs: Tensor,
    did: Tensor,
    rates: Tensor | None,
    values: Tensor,
    dots: Tensor,
    options: Options,
) -> None:
    """Writes the gradient of raw logits of ids, [rows, K], and the sum of (z - k) times the upstream gradient, [rows]."""
    maximum, log, a, b, c, d, _ = coefficients.unsqueeze(2).unbind(0)
    p = log_probs.exp()
    log_probs = log_probs.masked_fill(log_probs == -torch.inf, 0.0)  # of a column that is ruled out, at any temperature
    of_z, below = p * (a + b * log_probs + c * p) + d + sums_of_equals(named, did), log_probs + log
    torch.mul(of_z, slopes_of(below + maximum, rates, options), out=values)
    torch.sum(did * below, 1, out=dots)


def _add(of_columns: Tensor, whole: Tensor, adds: bool) -> None:
    whole.copy_(of_columns + whole if adds else of_columns)


def _end_drates(whole: Tensor, coefficients: Tensor, dots: Tensor | None) -> None:
    whole.add_(coefficients[-1]).add_(0.0 if dots is None else dots)


def _scatter(gradient: Tensor, ids: Tensor, values: Tensor, first: int) -> None:
    """Writes values [rows, ids] to the ids' columns of a chunk [rows, columns]; equal ids have equal values."""
    count = gradient.shape[1]
    here, places = are_columns(ids, first, count), (ids - first).clamp(0, count - 1)
    # An id outside the chunk repeats the write of an id inside, or writes back the row's first column.
    some, which = here.to(torch.float32).max(1, keepdim=True)
    spare = torch.where(some > 0, places.gather(1, which), 0)
    kept = torch.where(some > 0, values.gather(1, which), gradient[:, :1])
    gradient.scatter_(1, torch.where(here, places, spare), torch.where(here, values, kept).to(gradient.dtype))


def sums_of_equals(ids: Tensor, values: Tensor) -> Tensor:
    """[rows, ids]: for each id, the sum of the values of all equal ids in its row."""
    rows, count = ids.shape
    if count == 1:
        return values
    step = max(1, _PAIRS // count**2)
    found = [
        torch.where(some.unsqueeze(2) == some.unsqueeze(1), theirs.unsqueeze(1), 0.0).sum(2)
        for some, theirs in zip(ids.split(step), values.split(step), strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def largest(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row, the largest first, at most `count`, and their ids; all [rows, ...]."""
    values, places = values.topk(min(count, values.shape[1]), dim=1)
    return values, ids.gather(1, places)


def first_largest(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of parts [parts, rows] in ascending order of ids, the largest value of each row and the first of its ids."""
    top, part = values.max(0, keepdim=True)
    return top.squeeze(0), ids.gather(0, part).squeeze(0)


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


def forward_of_targets(p: Plan, call: ProbabilityTargets) -> tuple[Any, ...]:
    """See `ProbabilityTargets`."""
    options = call.options
    head, steps = begin(p, call, Task.DISTRIBUTIONS, NOTHING)
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
            steps.statistics(p, logits, None, options, result, merge=columns.start > 0)
            probs, weight = _targets_of(p, call, tokens, columns)
            given = (logits, probs, weight, before, maximum, of_targets)
            p.torch(_add_sums, *given, call.bias is not None, options, writes=[of_targets])
        if options.group:
            p.torch(_join_targets, result, of_targets, options.group, writes=[result, of_targets])
    found = {name: p.new(each) for name, each in call.results().items()}
    p.torch(_write_results, statistics, sums, *found.values(), writes=[*found.values()])
    return tuple(found.values())


def backward_of_targets(p: Plan, call: ProbabilityTargetGradients) -> tuple[Any, ...]:
    """The gradients of x, weight and bias."""
    options = call.options
    head, steps = begin(p, call, Task.DISTRIBUTION_GRADIENTS, call.needs)
    for tokens in head.tiling.chunks.tokens:
        own, factors = part(p, call.coefficients, tokens, 1), part(p, call.factors, tokens)
        for columns in head.tiling.chunks.columns:
            logits = head.products(tokens, columns, bias=True)
            gradient = head.gradient_memory(logits)
            if factors is None:
                steps.gradient(p, logits, None, options, gradient, own, None)
            else:
                probs, weight = _targets_of(p, call, tokens, columns)
                for piece in _pieces(*logits.shape):  # each overwrites its own logits
                    some, into, of_rows = (part(p, each, piece) for each in (logits, gradient, factors))
                    given = (some, part(p, probs, piece), weight, of_rows, options)
                    of_targets = p.torch(_gradient_of_targets, *given, makes=Empty(some.shape, own.dtype))
                    steps.gradient(p, some, None, options, some, part(p, own, piece, 1), None)
                    p.torch(_write_difference, into, some, of_targets, writes=[into])
            head.add(tokens, columns, gradient)
    return head.finished()


def _targets_of(p: Plan, call: Any, tokens: slice, columns: slice) -> tuple[Any, Any]:
    """Probabilities and class weights of a chunk."""
    return part(p, part(p, call.probs, tokens), columns, 1), part(p, call.class_weight, columns)


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    """Rows of a chunk whose targets are in memory at a time."""
    count = max(1, _PIECE // columns)
    return (slice(first, min(first + count, rows)) for first in range(0, rows, count))


def _write_difference(result: Tensor, gradient: Tensor, of_targets: Tensor) -> None:
    """Rounds it once; the result may share the gradient's memory."""
    result.copy_(gradient - of_targets)


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


def _join_targets(statistics: Tensor, sums: Tensor, group: str) -> None:
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
