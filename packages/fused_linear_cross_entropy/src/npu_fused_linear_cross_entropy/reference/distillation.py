"""The definition of distillation's losses and gradients of chunks of logits in plain PyTorch, which runs on a CPU.

With s = log softmax(z / T) of the student, t = log softmax(z' / T) of the teacher, p = exp(s), q = exp(t):

    forward_kl        D = sum q (t - s)
    reverse_kl        D = sum p (s - t)
    jensen_shannon    D = beta sum q (t - u) + (1 - beta) sum p (s - u)      u = log(beta q + (1 - beta) p)
    total_variation   D = sum |p - q| / 2
    row               soft_weight D + hard_weight (log sum exp z - z_y)

The gradient of D with respect to z / T is h - p sum h, h = p dD / dp with the other elements of p fixed, up to a constant
times p. Of a vocabulary over ranks each has its columns of the logits: they exchange log sum exp, then the sums of D and h.

Source of the generalised Jensen-Shannon divergence: Agarwal et al., "On-Policy Distillation of Language Models", arXiv
2306.13649; of total variation: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation", arXiv
2307.15190.
"""

from __future__ import annotations

import math

import torch
from npu_tiling.pytorch import collectives
from npu_tiling.pytorch.tensors import statistics_dtype
from torch import Tensor

from .. import ids
from ..chunks import DistilledChunk
from ..options import DistillationOptions


class ReferenceDistillation:
    """The arithmetic on chunks of logits [rows, V] of a student and its teacher."""

    def __init__(self, bias: Tensor | None, teacher_bias: Tensor | None, options: DistillationOptions) -> None:
        self._bias, self._teacher_bias, self._options = bias, teacher_bias, options

    def losses_and_gradient(self, chunk: DistilledChunk) -> None:
        """Writes losses, and the gradient of their weighted sum times the factors."""
        student, teacher, target, factors, gradient, losses = chunk
        options = self._options
        z = _logits(student, self._bias, options.logit_scale, options.softcap)
        of_teacher = _logits(teacher, self._teacher_bias, options.teacher_logit_scale, options.teacher_softcap)
        hard = (z,) if options.hard_weight else ()
        s, t, *log_p = self._log_softmax(z / options.temperature, of_teacher / options.temperature, *hard)
        terms, h = divergence_terms(s, t, options.divergence, options.beta)
        sums = [terms.sum(1), h.sum(1)]
        if hard:
            assert target is not None
            column = target.long().unsqueeze(1) - options.vocab_first
            here, column = ids.are_columns(column, 0, z.shape[1]), column.clamp(0, z.shape[1] - 1)
            sums.append(torch.where(here, -log_p[0].gather(1, column), 0.0).squeeze(1))
        of_all = torch.stack(sums)
        if options.group:
            collectives.sum_(of_all, options.group)
        losses[0] = of_all[0]
        g = (h - s.exp() * of_all[1].unsqueeze(1)) * (options.soft_weight / options.temperature)
        if hard:
            losses[1] = of_all[2]
            g += options.hard_weight * log_p[0].exp().scatter_add_(1, column, torch.where(here, -1.0, 0.0).to(g.dtype))
        if gradient is None:
            return
        assert factors is not None
        if options.softcap is not None:
            g *= 1.0 - (z / options.softcap).square()
        g *= options.logit_scale
        gradient.copy_(torch.where(factors.unsqueeze(1) != 0.0, g * factors.unsqueeze(1), 0.0))

    def _log_softmax(self, *logits: Tensor) -> list[Tensor]:
        """Log-probabilities, of the whole vocabulary, of which there may be this rank's columns."""
        if not self._options.group:
            return [torch.log_softmax(each, 1) for each in logits]
        own = torch.stack([torch.stack(_maximum_and_log(each)) for each in logits])
        tops, logs = collectives.gather(own, self._options.group).unbind(2)  # [ranks, logits, rows] each
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
