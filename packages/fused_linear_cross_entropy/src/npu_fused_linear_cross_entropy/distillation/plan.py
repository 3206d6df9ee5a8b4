"""The plans of a distillation, whole rows of a student's logits and of its teacher's at a time, and its definition.

Divergences D = sum f(s, t) of a student's distribution p from a teacher's q, both at the temperature T, with s and t their
log-probabilities; and their gradient, with h = p dD / dp, the other elements of p fixed, up to a constant times p:

    gradient of z / T:  h - p k      k = sum h      z: the student's logits

    forward_kl        f = q (t - s)                  h = -q                 k = -1
    reverse_kl        f = p (s - t)                  h = f
    jensen_shannon    f = beta q (t - u) + h         h = (1 - beta) p (s - u)     u = log((1 - beta) p + beta q)
    total_variation   f = |p - q| / 2                h = p sign(p - q) / 2

Of a vocabulary over ranks each has its columns of the logits: they exchange log sum exp, then the sums of f and h.

Source of the generalised Jensen-Shannon divergence: Agarwal et al., "On-Policy Distillation of Language Models", arXiv
2306.13649; of total variation: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", arXiv
2307.15190.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from math import floor, log2
from typing import Any, NamedTuple

import torch
from npu_tiling import collectives
from npu_tiling.calls import Empty, statistics_dtype
from npu_tiling.plans import Plan
from torch import Tensor

from .. import decide, matmul
from ..call import NO_COLUMN, Distillation, DistillationBackward, DistillationOptions, is_unfinished
from ..decide import LossTiling, Shape, Task
from ..head import Head, cast, check_columns, flat, linear, part, rows_of_all_ranks, shape_of, transposed
from ..tokens import are_columns, are_counted, total_weight, typical_size

# fp16 gradients of logits are at most about the first; their sums over tokens, the weight's gradient, stay this much larger.
_ENLARGED, _ENLARGED_SUMS = 256.0, 16.0

# Bytes for both models' logits: twice a loss's; on CUDA fewer, so that on an H200 no peer's form of distillation takes less.
_BUDGET = {**{kind: 2 * count for kind, count in decide.DEFAULT_BUDGET.items()}, "cuda": 512 * decide.MIB}

_RULE = decide.rule(decide.Way.DISTILLATION, decide.Layout.ROWS, decide.always, "whole rows of both models' logits")
_TEMPORARIES = 10  # matrices as a chunk's logits that the arithmetic in PyTorch's operators takes


@functools.lru_cache(maxsize=1024)
def choose(shape: Shape, teacher_dtype: torch.dtype) -> LossTiling:
    """Chunks of tokens, whose whole rows of logits of both models are in memory."""
    vocabulary = decide.most_columns(shape.options, shape.vocabulary)
    budget = shape.options.memory_budget or _BUDGET["cpu" if shape.device is None else shape.device.kind]
    exact, columns, sum_dtype = statistics_dtype(shape.x_dtype), decide.pitch(vocabulary), shape.options.accum_dtype
    row = columns * (shape.product_dtype.itemsize + teacher_dtype.itemsize)
    if shape.options.group:
        row += columns * _TEMPORARIES * exact.itemsize
    chunks = _split(shape, budget // row)
    sums = vocabulary * shape.width * exact.itemsize
    if shape.frozen_width:
        sum_dtype = sum_dtype or exact
    elif sum_dtype is None and len(chunks.tokens) > 1 and shape.needs.dweight and 2 * sums <= budget:
        sum_dtype = exact
        chunks = _split(shape._replace(weight_dtype=exact), (budget - sums) // row)
    return decide.tiling_of(shape, _RULE, chunks, sum_dtype or shape.weight_dtype)


def _split(shape: Shape, affordable: int) -> decide.Chunks:
    """Chunks of at most so many tokens, and no more than hide the traffic of the weight."""
    everything, given = (slice(0, shape.vocabulary),), shape.options.chunk_tokens
    if given is not None:
        return decide.Chunks(tokens=decide.exactly(shape.tokens, given), columns=everything, why="chunk_tokens was given")
    wanted = decide.wanted_tokens(decide.dweight_bytes(shape), shape.device)
    longest = min(wanted, max(affordable // decide.UNIT * decide.UNIT or affordable, 1))
    why = f"the budget holds {affordable} tokens, and {wanted} hide the weight's traffic behind products"
    return decide.Chunks(tokens=decide.evenly(shape.tokens, longest), columns=everything, why=why)


def forward(p: Plan, call: Distillation) -> tuple[Any, ...]:
    """The loss and its two parts, three gradients and the factors that these lack."""
    if call.options.hard_weight:
        check_columns(p, "target", call.target, call.options)
    has_gradients = any(call.needs)
    losses, facts, gradients, unfinished = _run(p, call, Task.LOSS_AND_GRADIENTS if has_gradients else Task.LOSS, None)
    results = call.results()
    outputs = [p.new(results[name]) for name in ("loss", "soft", "hard")]
    p.torch(_write_results, losses, facts, *outputs, call.options, writes=outputs)
    return *outputs, *gradients, unfinished


def backward(p: Plan, call: DistillationBackward) -> tuple[Any, ...]:
    """Three gradients, given those of the tokens' losses, or of the one loss: everything is computed again."""
    return _run(p, call, Task.GRADIENTS, flat(p, call.dloss))[2]


class Facts(NamedTuple):
    """What follows from a distillation's targets and weights alone, vectors of [tokens].

    Attributes:
        columns: int32 [N] where targets have cross entropies, negative: none; else None.
        counted: bool [N]; None: all.
        known: bool [N]: counted, and within the vocabulary where targets have cross entropies; None: all.
        weights: [N], of the losses; None: 1.
        divisor: how many count, at least 1, or the sum of their weights, where the loss is a mean; else 1.
        size: what the weights are divided by where fp16 gradients are left unfinished: see `write_target_facts` in
            loss/reference.py.
    """

    columns: Any
    counted: Any
    known: Any
    weights: Any
    divisor: Any
    size: Any


def _facts(p: Plan, call: Any, tokens: int) -> Facts:
    options, target, weights = call.options, flat(p, call.target), flat(p, call.token_weight)
    exact, is_mean = statistics_dtype(call.x.dtype), call.options.reduction == "mean"
    columns = counted = known = None
    divisor = size = 1
    if target is not None:
        counted = known = p.torch(are_counted, target, options.ignore_index, makes=Empty((tokens,), torch.bool))
        if options.hard_weight:
            known = p.torch(_known, counted, target, options.vocab_size, makes=Empty((tokens,), torch.bool))
            columns = p.torch(_columns, known, target, makes=Empty((tokens,), torch.int32))
        if weights is not None:
            weights = p.torch(torch.where, counted, weights, 0.0, makes=Empty((tokens,), weights.dtype))
    if weights is not None and call.x.dtype == torch.float16 and options.reduction != "none":
        size = p.torch(typical_size, weights, makes=Empty((), weights.dtype))
    if is_mean and weights is not None:
        divisor = p.torch(total_weight, weights, makes=Empty((), weights.dtype))
    elif is_mean and counted is not None:
        divisor = p.torch(_count, counted, exact, makes=Empty((), exact))
    elif is_mean:
        divisor = max(1, tokens)
    return Facts(columns, counted, known, weights, divisor, size)


def _run(p: Plan, call: Any, task: Task, dloss: Any) -> tuple[Any, Facts, tuple[Any, ...], Any]:
    """Divergences and cross entropies of the targets, [2, N], facts, three gradients, and the factors that these lack.

    `dloss`: the upstream gradient, [1] or [N]; None for 1.
    """
    options, layer = call.options, linear(p, call)
    unfinished = task is Task.LOSS_AND_GRADIENTS and is_unfinished(call)
    shape = shape_of(p, call, layer, task, call.needs, unfinished=unfinished, is_readable=False)
    teacher_x, probs = rows_of_all_ranks(p, flat(p, call.teacher_x, 1), options), flat(p, call.teacher_probs, 1)
    teacher_dtype = _teacher_dtype(p, call.teacher_x, call.x)
    tiling, enlargement = choose(shape, teacher_dtype), 1.0
    if unfinished:
        enlargement = _enlargement(options)
        scale = tiling.dweight_scale / enlargement * min(enlargement, _ENLARGED_SUMS)
        tiling = dataclasses.replace(tiling, dweight_scale=scale)
    student = Head(p, call, layer, tiling)
    facts = _facts(p, call, layer.x.shape[0])
    teacher_weight = None if teacher_x is None else cast(p, call.teacher_weight, teacher_x.dtype)
    bias, teacher_bias = p.contiguous(call.bias), p.contiguous(call.teacher_bias)
    if p.chip is None or options.group:  # whose ranks exchange what no kernel writes
        compute = losses_and_gradient
    else:
        from .kernels import losses_and_gradient as compute
    memory = p.new(Empty((tiling.buffer,), teacher_dtype))
    losses = p.new(Empty((2, layer.x.shape[0]), tiling.exact))
    factors, (everything,) = None, tiling.chunks.columns
    if task is not Task.LOSS:
        divisor = (facts.size, enlargement) if unfinished else (facts.divisor, 1.0)
        given = (dloss, *divisor, facts.weights, facts.known, losses)
        factors = p.torch(_factors, *given, makes=Empty((layer.x.shape[0],), tiling.exact))
    for tokens in tiling.chunks.tokens:
        logits = student.products(tokens, everything)
        gradient = student.gradient_memory(logits)
        teacher = p.view(memory, logits.shape, logits.strides)
        if probs is None:
            matmul.multiply(p, part(p, teacher_x, tokens), transposed(p, teacher_weight), teacher)
        else:
            p.torch(_write_log, teacher, part(p, probs, tokens), bias, options, writes=[teacher])
        vectors = (bias, teacher_bias, part(p, facts.columns, tokens), part(p, factors, tokens))
        into = None if task is Task.LOSS else gradient
        compute(p, options, logits, teacher, *vectors, into, part(p, losses, tokens, 1))
        if into is not None:
            student.add(tokens, everything, into)
    if task is Task.LOSS:
        return losses, facts, (None, None, None), None
    gradients, lacking = student.finished(), None
    if unfinished:  # 1 / scale: of sums of enlarged gradients
        of_sums = 1.0 / tiling.dweight_scale
        lacking = p.torch(
            _unfinished, losses, of_sums, facts.size, enlargement, facts.divisor, makes=Empty((3,), tiling.exact)
        )
    return losses, facts, gradients, lacking


def _enlargement(options: DistillationOptions) -> float:
    """The power of two that gradients of logits are multiplied by before they are rounded to fp16.

    They are small where a student is close to its teacher, unless there are hard labels: fp16 has fewer digits below 6e-5,
    and none below 6e-8.
    """
    largest = abs(options.logit_scale * options.soft_weight) / options.temperature
    return 1.0 if options.hard_weight or not largest else max(1.0, 2.0 ** floor(log2(_ENLARGED / largest)))


def _teacher_dtype(p: Plan, teacher_x: Any, x: Any) -> torch.dtype:
    """Of the teacher's logits in memory."""
    if teacher_x is None:
        return statistics_dtype(x.dtype)
    dtype = teacher_x.dtype
    return statistics_dtype(dtype) if matmul.writes_fp32(p.device, dtype) else dtype


def _known(counted: Tensor, target: Tensor, vocab_size: int) -> Tensor:
    return counted & are_columns(target, 0, vocab_size)


def _columns(known: Tensor, target: Tensor) -> Tensor:
    return torch.where(known, target, NO_COLUMN).to(torch.int32)


def _count(counted: Tensor, dtype: torch.dtype) -> Tensor:
    return counted.sum().to(dtype).clamp_min_(1)


def _factors(
    dloss: Tensor | None,
    divisor: Tensor | float,
    enlargement: float,
    weights: Tensor | None,
    known: Tensor | None,
    losses: Tensor,
) -> Tensor:
    """Factors [N] of the tokens' gradients, given the upstream gradient, [], [1] or [N]."""
    upstream = torch.ones((), dtype=losses.dtype, device=losses.device) if dloss is None else dloss
    value = upstream / (divisor / enlargement)
    if weights is not None:
        value = value * weights
    if known is not None:
        return torch.where(known, value, 0.0)
    return value.expand(losses.shape[1]).contiguous()


def _unfinished(losses: Tensor, scale: float, size: Tensor | float, enlargement: float, divisor: Tensor | float) -> Tensor:
    return losses.new_tensor([1.0, scale, scale]) * (size / enlargement) / divisor


def _write_log(teacher: Tensor, probs: Tensor, bias: Tensor | None, options: DistillationOptions) -> None:
    """Writes a teacher's log-probabilities.

    What probabilities count as at least is 0, but for the divergence that is infinite where a teacher alone rules a column
    out.
    """
    least: Tensor | float = 0.0
    if options.divergence == "reverse_kl":
        least = torch.finfo(torch.float32).tiny
        if bias is not None:
            tiny = torch.full_like(bias, least, dtype=teacher.dtype)
            least = tiny.masked_fill_(bias == -torch.inf, 0.0)
    teacher.copy_(probs).clamp_min_(least).log_()


def _write_results(
    losses: Tensor, facts: Facts, loss: Tensor, soft: Tensor | None, hard: Tensor | None, options: DistillationOptions
) -> None:
    """Writes the loss and its parts, of losses [2, N] times their weights."""
    counted, known, weights = facts.counted, facts.known, facts.weights

    def write(values: Tensor, into: Tensor) -> None:
        """0 where ignored, NaN where the target is outside the vocabulary."""
        if weights is not None:
            values = torch.where(weights == 0.0, 0.0, values * weights)  # whatever such a token's teacher holds
        if known is not None and counted is not None:
            absent = torch.where(counted, torch.nan, 0.0).to(values.dtype)  # PyTorch's default dtype may be a wider one
            values = torch.where(known, values, absent)
        if options.reduction == "none":
            into.copy_(values.view(into.shape))
            return
        torch.sum(values, 0, dtype=into.dtype, out=into)
        if options.reduction == "mean":
            into.div_(facts.divisor)

    of_all = options.soft_weight * losses[0]
    write(of_all + options.hard_weight * losses[1] if options.hard_weight else of_all, loss)
    if soft is not None:
        write(losses[0], soft)
    if hard is not None:
        write(losses[1], hard)


# The definition, in plain PyTorch.


def write_losses_and_gradient(
    student: Tensor,
    teacher: Tensor,
    bias: Tensor | None,
    teacher_bias: Tensor | None,
    target: Tensor | None,
    factors: Tensor | None,
    gradient: Tensor | None,
    losses: Tensor,
    options: DistillationOptions,
) -> None:
    """Writes the losses of a chunk, and the gradient of their weighted sum times the factors.

    Args:
        student, teacher: [rows, V], raw products.
        target: int32 [rows], columns of the whole vocabulary, negative: none; None where the hard weight is 0.
        factors: [rows], of the gradient, which is 0 where a factor is.
        gradient: [rows, V], is written: of the student's raw products, whose memory it may share. None: there is none.
        losses: [2, rows], is written: divergences, and cross entropies of the targets, these if there is a hard weight.
    """
    z = _logits(student, bias, options.logit_scale, options.softcap)
    of_teacher = _logits(teacher, teacher_bias, options.teacher_logit_scale, options.teacher_softcap)
    hard = (z,) if options.hard_weight else ()
    s, t, *log_p = _log_softmax(options.group, z / options.temperature, of_teacher / options.temperature, *hard)
    terms, h = divergence_terms(s, t, options.divergence, options.beta)
    sums = [terms.sum(1), h.sum(1)]
    if hard:
        assert target is not None
        column = target.long().unsqueeze(1) - options.vocab_first
        here, column = are_columns(column, 0, z.shape[1]), column.clamp(0, z.shape[1] - 1)
        sums.append(torch.where(here, -log_p[0].gather(1, column), 0.0).squeeze(1))
    of_all = torch.stack(sums)
    if options.group:
        collectives.sum_(of_all, options.group)
    losses[0] = of_all[0]
    g = (h - s.exp() * of_all[1].unsqueeze(1)) * (options.soft_weight / options.temperature)
    if hard:
        losses[1] = of_all[2]
        g += options.hard_weight * log_p[0].exp().scatter_add_(1, column, torch.where(here, -1.0, 0.0).to(log_p[0].dtype))
    if gradient is None:
        return
    assert factors is not None
    if options.softcap is not None:
        g *= 1.0 - (z / options.softcap).square()
    g *= options.logit_scale
    gradient.copy_(torch.where(factors.unsqueeze(1) != 0.0, g * factors.unsqueeze(1), 0.0))


def _log_softmax(group: str, *logits: Tensor) -> list[Tensor]:
    """Log-probabilities, of the whole vocabulary, of which there may be this rank's columns."""
    if not group:
        return [torch.log_softmax(each, 1) for each in logits]
    own = torch.stack([torch.stack(_maximum_and_log(each)) for each in logits])
    tops, logs = collectives.gather(own, group).unbind(2)  # [ranks, logits, rows] each
    top = tops.amax(0)
    log = torch.logsumexp((tops - top) + logs, 0)
    return [(z - top.unsqueeze(1)) - log.unsqueeze(1) for z, top, log in zip(logits, top, log, strict=True)]


def _maximum_and_log(z: Tensor) -> tuple[Tensor, Tensor]:
    """The largest z of each row, not below what is finite, and log sum exp(z - largest)."""
    maximum = z.amax(1).clamp_min(torch.finfo(z.dtype).min)
    return maximum, (z - maximum.unsqueeze(1)).exp().sum(1).log()


def divergence_terms(s: Tensor, t: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """What D sums, and h, both [rows, V]; s and t are log-probabilities [rows, V]."""
    p, q = s.exp(), t.exp()
    if kind == "forward_kl":
        return _times(q, t - s), -q
    if kind == "reverse_kl":
        h = _times(p, s - t)
        return h, h
    if kind == "jensen_shannon":
        u = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
        h = (1.0 - beta) * _times(p, s - u)
        return beta * _times(q, t - u) + h, h
    return 0.5 * (p - q).abs(), 0.5 * p * torch.sign(p - q)


def _times(p: Tensor, difference: Tensor) -> Tensor:
    """p times a difference of log-probabilities; 0 where p is 0, also for the difference of two minus infinities."""
    return (p * difference).masked_fill_(p == 0.0, 0.0)


def _logits(raw: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    z = raw.to(statistics_dtype(raw.dtype))
    z = z if bias is None else z + bias
    z = z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def losses_and_gradient(p: Plan, options: DistillationOptions, *slots: Any) -> None:
    """`write_losses_and_gradient` as a step of a plan, as kernels.py adds a launch."""
    gradient, losses = slots[-2:]
    p.torch(write_losses_and_gradient, *slots, options, writes=[gradient, losses])
