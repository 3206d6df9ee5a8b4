"""TRL: the head of SFT, DPO, GRPO and the other trainers that score tokens through its fused head.

TRL's `_ChunkedLogProbFunction` becomes ours, and tokens whose label is -100 take part in no product on npu either. Calls
whose head DeepSpeed's ZeRO-3 splits stay with TRL's own function, which gathers it again in its backward. Written against
TRL 1.16.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.models import Hook
from torch import Tensor

from ..log_probs import linear_log_probs

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
        """log softmax(z)[target] with z = softcap tanh(logit_scale (x W^T + b) / softcap) / temperature, and more.

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
            log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1: [N] each, None where not asked for. The first
            two are differentiable.
        """
        if hasattr(weight, "ds_id"):
            scores: _Scores = ChunkedLogProbFunction.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )
            return scores
        found = linear_log_probs(
            hidden,
            weight,
            targets,
            bias,
            temperature=temperature,
            softcap=final_logit_softcapping,
            logit_scale=logit_scale,
            return_entropy="entropy" in outputs,
            return_square_sum="log_sum_sq_probs" in outputs,
            return_mean_logit="mean_logits" in outputs,
            return_is_top="is_top1" in outputs,
        )
        if isinstance(found, Tensor):
            return found, None, None, None, None
        assert found.log_probs is not None
        squares = None if found.square_sum is None else found.square_sum.detach().log()
        mean = None if found.mean_logit is None else found.mean_logit.detach()
        return found.log_probs, found.entropy, squares, mean, found.is_top


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
