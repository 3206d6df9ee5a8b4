"""Distillation from a teacher's log-probabilities of given columns, composed of `linear_log_probs`."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.pytorch import arguments
from torch import Tensor

from .distillation_checks import check_hard_weight
from .log_prob_outputs import LogProbs
from .log_probs import linear_log_probs
from .option_checks import Part
from .options import DistillationOptions

# Options of a distillation that `linear_log_probs` has too.
_SCORES = ("ignore_index", "softcap", "logit_scale", "accum_dtype", "chunk_tokens", "memory_budget", "sequence_parallel")


def distill_top_k(
    x: Tensor,
    weight: Tensor,
    target: Tensor | None,
    bias: Tensor | None,
    ids: Tensor,
    log_q: Tensor,
    each: Tensor | None,
    options: DistillationOptions,
    part: Part,
    **scored: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss and its two parts; see `linear_distillation_loss`. `scored`: more arguments of `linear_log_probs`."""
    if options.divergence != "forward_kl":
        raise ValueError(f"divergence is {options.divergence!r} and must be 'forward_kl' where teacher_top_k is given.")
    ignored = options.ignore_index
    arguments.shape("teacher_top_k[1]", log_q, ids.shape)
    check_hard_weight(target, options)
    scores: dict[str, Any] = {name: getattr(options, name) for name in _SCORES} | {**scored, **part._asdict()}
    is_shared = options.hard_weight and options.temperature == 1.0
    found = linear_log_probs(
        x, weight, target if is_shared else None, bias, ids=ids, temperature=options.temperature, **scores
    )
    assert isinstance(found, LogProbs) and found.ids_log_probs is not None
    log_p = found.ids_log_probs
    log_q = log_q.detach().to(log_p.dtype)
    soft = torch.where(ids == ignored, 0.0, log_q.exp() * (log_q - log_p)).sum(-1)
    hard = None
    if options.hard_weight:
        of_target = found.log_probs if is_shared else linear_log_probs(x, weight, target, bias, **scores)
        assert isinstance(of_target, Tensor)
        hard = -of_target
    counted = torch.ones_like(soft, dtype=torch.bool) if target is None else target != ignored
    divisor: Tensor | int = 1
    if options.reduction == "mean":
        total = counted.sum() if each is None else torch.where(counted, each, 0.0).sum()
        divisor = torch.where(total == 0, 1, total)

    def reduced(rows: Tensor) -> Tensor:
        rows = torch.where(counted, rows if each is None else rows * each, 0.0)
        return rows if options.reduction == "none" else rows.sum() / divisor

    loss = reduced(options.soft_weight * soft if hard is None else options.soft_weight * soft + options.hard_weight * hard)
    return loss, reduced(soft.detach()), None if hard is None else reduced(hard.detach())
