"""verl: log-probabilities and entropies of the policy's head, for its FSDP and Megatron engines.

verl loads this module by itself where the package is installed, as an entry point of the group `verl.plugins`. The
environment variable VERL_USE_EXTERNAL_PLUGINS=none, which is verl's own, leaves verl as it is.

Replaced are `FusedLinearForPPO` (`use_fused_kernels`, backends "torch" and "liger") and `linear_cross_entropy` (backend
"triton", and Megatron's fused forward). Written against verl 0.9.1.
"""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.models import Hook
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..log_probs import linear_log_probs

_hook = Hook()


class FusedLinearForPPO(nn.Module):
    """verl.utils.experimental.torch_functional.FusedLinearForPPO.

    Args:
        chunk_size, impl_backend: as in verl's class. Ours computes its own chunks, and the same for every backend.
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        if impl_backend not in ("torch", "liger"):
            raise ValueError(f"impl_backend is {impl_backend!r} and must be 'torch' or 'liger'.")
        self.chunk_size = chunk_size
        self.impl_backend = impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """log softmax(x W^T / temperature)[id] and the entropy of every token.

        Args:
            hidden_states: x [T, H] or [B, T, H].
            vocab_weights: W [V, H].
            input_ids: [T] or [B, T].
            temperature: of all distributions, or of each token's, [T] or [B, T].

        Returns:
            Log-probabilities in fp32 and entropies in x's dtype, of input_ids' shape.
        """
        log_probs, entropy = _scores(hidden_states, vocab_weights, input_ids.to(torch.int64), temperature, None)
        return log_probs, entropy.to(hidden_states.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """verl.utils.kernel.linear_cross_entropy.linear_cross_entropy.

    Args:
        hidden: [..., H].
        weight: [V, H], with a group this rank's rows of a vocabulary in equal parts.
        labels: [...].
        temperature: of all distributions, or of each token's, [tokens].
        reduction: "none", "sum" or "mean", of the log-probabilities.
        dist_process_group: the ranks that share the vocabulary. The gradients of `hidden` add up to the whole one over
            them, as verl's callers expect: they sum over the ranks.

    Returns:
        Log-probabilities (fp32 [tokens], or a number) and entropies (fp32 [tokens]).
    """
    if reduction.lower() not in ("none", "sum", "mean"):
        raise ValueError(f"reduction is {reduction!r} and must be 'none', 'sum' or 'mean'.")
    x = hidden.reshape(-1, hidden.shape[-1])
    if dist_process_group is not None:
        x = _ShareOfGradient.apply(x, dist_process_group.size())
    log_probs, entropy = _scores(x, weight, labels.reshape(-1), temperature, dist_process_group)
    if reduction.lower() != "none":
        log_probs = log_probs.sum() if reduction.lower() == "sum" else log_probs.mean()
    return log_probs, entropy


def register() -> None:
    """Let verl call ours."""
    from verl.utils.experimental import torch_functional
    from verl.utils.kernel import linear_cross_entropy as kernel

    _hook.replace(torch_functional, "FusedLinearForPPO", FusedLinearForPPO)
    original = kernel.linear_cross_entropy
    _hook.replace_everywhere("verl", "linear_cross_entropy", original, linear_cross_entropy)


def unregister() -> None:
    """Let verl call its own."""
    _hook.undo()


def _scores(
    x: Tensor, weight: Tensor, ids: Tensor, temperature: float | Tensor, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies."""
    if isinstance(temperature, Tensor):
        temperature = temperature.to(x.device, torch.float32)
        temperature = temperature.expand(ids.shape) if temperature.numel() == 1 else temperature.reshape(ids.shape)
    scores: Any = linear_log_probs(x, weight, ids, temperature=temperature, return_entropy=True, process_group=group)
    return scores.log_probs, scores.entropy


class _ShareOfGradient(torch.autograd.Function):
    """x, whose gradient, which is whole on every rank, is divided by the number of ranks."""

    @staticmethod
    def forward(ctx, x, ranks):  # type: ignore[no-untyped-def]
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):  # type: ignore[no-untyped-def]
        return dx / ctx.ranks, None
