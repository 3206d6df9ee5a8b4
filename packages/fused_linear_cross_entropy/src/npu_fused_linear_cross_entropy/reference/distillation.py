"""The definition of distillation's losses and gradients in plain PyTorch, and what runs on a CPU: of chunks of logits.

With s = log softmax(z / T) of the student, t = log softmax(z' / T) of the teacher, p = exp(s), q = exp(t):

    forward_kl        D = sum q (t - s)
    reverse_kl        D = sum p (s - t)
    jensen_shannon    D = beta sum q (t - u) + (1 - beta) sum p (s - u)      u = log(beta q + (1 - beta) p)
    total_variation   D = sum |p - q| / 2
    row               soft_weight D + hard_weight (log sum exp z - z_y)

The gradient of D with respect to z / T is h - p sum h, h = p dD / dp with the other elements of p fixed, up to a constant
times p. Source of the generalised Jensen-Shannon divergence: Agarwal et al., "On-Policy Distillation of Language Models",
arXiv 2306.13649; of total variation: Wen et al., "f-Divergence Minimization for Sequence-Level Knowledge Distillation",
arXiv 2307.15190.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..options import DistillationOptions


class ReferenceDistillation:
    """The arithmetic on chunks of logits [rows, V] of a student and its teacher."""

    def __init__(self, bias: Tensor | None, teacher_bias: Tensor | None, options: DistillationOptions) -> None:
        self._bias, self._teacher_bias, self._options = bias, teacher_bias, options

    def losses_and_gradient(
        self,
        student: Tensor,
        teacher: Tensor,
        target: Tensor | None,
        factors: Tensor | None,
        gradient: Tensor | None,
        losses: Tensor,
    ) -> None:
        """Writes losses, and the gradient of their sum times the factors.

        Args:
            student, teacher: [rows, V], raw products.
            target: int32 [rows], columns; negative: none.
            factors: [rows], of the gradient, which is 0 where a factor is.
            gradient: [rows, V], of the student's raw products, whose memory it may share; None: there is none.
            losses: [2, rows]: divergences, and cross entropies of the targets, which without a hard weight are not written.
        """
        options = self._options
        z = _logits(student, self._bias, options.logit_scale, options.softcap)
        of_teacher = _logits(teacher, self._teacher_bias, options.teacher_logit_scale, options.teacher_softcap)
        s, t = (torch.log_softmax(each / options.temperature, 1) for each in (z, of_teacher))
        losses[0], g = divergence(s, t, options.divergence, options.beta)
        g *= options.soft_weight / options.temperature
        if options.hard_weight:
            assert target is not None
            log_p = torch.log_softmax(z, 1)
            column = target.long().unsqueeze(1).clamp_min(0)
            losses[1] = -log_p.gather(1, column).squeeze(1)
            p = log_p.exp()
            g += options.hard_weight * p.scatter_add_(1, column, torch.full_like(column, -1, dtype=p.dtype))
        if gradient is None:
            return
        assert factors is not None
        if options.softcap is not None:
            g *= 1.0 - (z / options.softcap).square()
        g *= options.logit_scale
        gradient.copy_(torch.where(factors.unsqueeze(1) != 0.0, g * factors.unsqueeze(1), 0.0))


def divergence(s: Tensor, t: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """D [rows], and its gradient [rows, V] with respect to the logits of s; s and t are log-probabilities [rows, V]."""
    p, q = s.exp(), t.exp()
    if kind == "forward_kl":
        return (q * (t - s)).sum(1), p - q
    if kind == "reverse_kl":
        h = p * (s - t)
        terms = h
    elif kind == "jensen_shannon":
        u = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
        h = (1.0 - beta) * p * (s - u)
        terms = beta * q * (t - u) + h
    else:
        h, terms = 0.5 * p * torch.sign(p - q), 0.5 * (p - q).abs()
    return terms.sum(1), h - p * h.sum(1, keepdim=True)


def _logits(raw: Tensor, bias: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    z = raw if bias is None else raw + bias
    z = z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)
