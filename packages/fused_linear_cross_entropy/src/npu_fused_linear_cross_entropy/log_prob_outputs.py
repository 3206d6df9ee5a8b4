"""The outputs of `linear_log_probs`: which are asked for, and what ignored tokens have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling.pytorch.exporting import exported
from torch import Tensor

from .distributions import Outputs
from .options import Options
from .rows import are_counted


@exported
class LogProbs(NamedTuple):
    """Outputs of `linear_log_probs`; None where not asked for.

    Attributes:
        log_probs: [...], of the targets.
        entropy: [...], - sum p log p.
        ids_log_probs: [..., K], of the ids.
        top_log_probs, top_ids: [..., top_k], the largest log-probabilities in descending order, and their columns, int64.
        square_sum: [...], sum p^2.
        mean_logit: [...], sum z / V.
        is_top: bool [...], whether the target's z is the largest, and that of no column before it is as large. A softcap may
            make z of several columns equal.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    ids_log_probs: Tensor | None = None
    top_log_probs: Tensor | None = None
    top_ids: Tensor | None = None
    square_sum: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top: Tensor | None = None


class Asked(NamedTuple):
    """Which optional outputs are asked for."""

    top_k: int
    entropy: bool
    square_sum: bool
    mean_logit: bool
    is_top: bool


def asked_outputs(outputs: Outputs, target: Tensor, has_target: bool, asked: Asked, options: Options) -> LogProbs:
    """The outputs that were asked for, of tokens [tokens] with their targets."""
    counted = are_counted(target, options.ignore_index)
    every = counted.unsqueeze(1)
    of_ids = outputs.ids_log_probs
    named = None if of_ids is None else of_ids[:, int(has_target) :]
    return LogProbs(
        log_probs=of_ids[:, 0] if has_target and of_ids is not None else None,
        entropy=torch.where(counted, outputs.entropy, 0.0) if asked.entropy else None,
        ids_log_probs=torch.where(every, named, 0.0) if named is not None and named.shape[1] else None,
        top_log_probs=None if outputs.top_log_probs is None else torch.where(every, outputs.top_log_probs, 0.0),
        top_ids=None if outputs.top_ids is None else torch.where(every, outputs.top_ids, -1),
        square_sum=torch.where(counted, outputs.square_sum, 0.0) if asked.square_sum else None,
        mean_logit=torch.where(counted, outputs.mean_logit, 0.0) if asked.mean_logit else None,
        is_top=None if outputs.first is None else (outputs.first == target) & counted,
    )
