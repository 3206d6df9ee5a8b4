"""Distillation from a teacher's log-probabilities of given columns, composed of `linear_log_probs`."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.pytorch import arguments
from torch import Tensor

from . import parallel
from .checks import check_target
from .distillation_checks import check_hard_weight
from .log_prob_outputs import LogProbs
from .log_probs import linear_log_probs
from .option_checks import Part
from .options import DistillationOptions
from .rows import are_counted, total_weight

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
    arguments.tensor("x", x)
    arguments.dtype("teacher_top_k[0]", ids, torch.int64, torch.int32)
    if not ids.dim():
        raise ValueError("teacher_top_k[0] has shape () and must have shape (..., K).")
    if not log_q.is_floating_point():
        raise TypeError(f"teacher_top_k[1] is {log_q.dtype} and must be floating point.")
    arguments.shape("teacher_top_k[0]", ids, (*parallel.whole_shape(x, options), *ids.shape[-1:]))
    arguments.shape("teacher_top_k[1]", log_q, ids.shape)
    check_hard_weight(target, options)
    live = are_counted(ids, ignored)
    if target is None:
        counted = torch.ones(ids.shape[:-1], dtype=torch.bool, device=ids.device)
    else:
        check_target(target, x, options)
        counted = are_counted(target, ignored)
        live = live & counted.unsqueeze(-1)
        each = None if each is None else torch.where(counted, each, 0.0)
    ids, log_q = torch.where(live, ids.long(), ignored), torch.where(live, log_q.detach(), -torch.inf)
    scores: dict[str, Any] = {name: getattr(options, name) for name in _SCORES} | {**scored, **part._asdict()}
    is_shared = options.hard_weight and options.temperature == 1.0
    found = linear_log_probs(
        x, weight, target if is_shared else None, bias, ids=ids, temperature=options.temperature, **scores
    )
    assert isinstance(found, LogProbs) and found.ids_log_probs is not None
    log_p = found.ids_log_probs
    log_q = log_q.to(log_p.dtype)
    q = log_q.exp()
    soft = torch.where(q == 0.0, 0.0, q * (log_q - log_p)).sum(-1)
    hard = None
    if options.hard_weight:
        of_target = found.log_probs if is_shared else linear_log_probs(x, weight, target, bias, **scores)
        assert isinstance(of_target, Tensor)
        hard = -of_target
    divisor: Tensor | int = 1
    if options.reduction == "mean":
        divisor = counted.sum().clamp_min(1) if each is None else total_weight(each)

    def reduced(rows: Tensor) -> Tensor:
        rows = torch.where(counted, rows if each is None else rows * each, 0.0)
        return rows if options.reduction == "none" else rows.sum() / divisor

    loss = reduced(options.soft_weight * soft if hard is None else options.soft_weight * soft + options.hard_weight * hard)
    return loss, reduced(soft.detach()), None if hard is None else reduced(hard.detach())
