"""TRL: the head of SFT, DPO, GRPO and the other trainers that score tokens through its fused head.

TRL's `_ChunkedLogProbFunction` becomes ours, and tokens whose label is -100 take part in no product on npu either. Two
kinds of calls stay with TRL's own function: those that ask for log sum p^2, the mean logit or whether the target is the
largest logit, and those whose head DeepSpeed's ZeRO-3 splits, which TRL gathers again in its backward. Written against TRL
1.16.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.hooks import Hook
from torch import Tensor

from ..log_probs import LogProbs, linear_log_probs

_OURS = {"log_probs", "entropy"}
_hook = Hook()
_Scores = tuple["Tensor", "Tensor | None", "Tensor | None", "Tensor | None", "Tensor | None"]


class ChunkedLogProbFunction:
    """Stands for TRL's autograd function of that name: its callers use `apply` alone."""

    original: Any = None

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> _Scores:
        """log softmax(z)[target] with z = softcap tanh(logit_scale (x W^T + b) / softcap) / temperature, and its entropy.

        Args:
            hidden: x [N, H].
            weight, bias: W [V, H], b [V].
            targets: int64 [N].
            temperature: of the distribution.
            chunk_size: of TRL's own function.
            final_logit_softcapping: None for no cap.
            logit_scale: factor of the logits.
            outputs: which extras are wanted.

        Returns:
            log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1: [N] each, None for what was not asked for.
        """
        if not set(outputs) <= _OURS or hasattr(weight, "ds_id"):
            scores: _Scores = ChunkedLogProbFunction.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
            return scores
        # softcap tanh(t / softcap) / T = c tanh((t / T) / c) with c = softcap / T.
        softcap = None if final_logit_softcapping is None else final_logit_softcapping / temperature
        scores_or_log_probs = linear_log_probs(
            hidden,
            weight,
            targets,
            bias,
            softcap=softcap,
            logit_scale=logit_scale / temperature,
            return_entropy="entropy" in outputs,
        )
        if isinstance(scores_or_log_probs, LogProbs):
            return *scores_or_log_probs, None, None, None
        return scores_or_log_probs, None, None, None, None


def register() -> None:
    """Let TRL's trainers call ours."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    if ChunkedLogProbFunction.original is None:
        ChunkedLogProbFunction.original = chunked_logprob.ChunkedLogProbFunction
    _hook.replace(utils, "_ChunkedLogProbFunction", ChunkedLogProbFunction)
    of_trl = chunked_logprob._use_triton

    def scores_counted_tokens_alone(device: torch.device) -> bool:
        return device.type == "npu" or of_trl(device)

    _hook.replace(utils, "_use_triton", scores_counted_tokens_alone)


def unregister() -> None:
    """Let TRL call its own."""
    _hook.undo()
