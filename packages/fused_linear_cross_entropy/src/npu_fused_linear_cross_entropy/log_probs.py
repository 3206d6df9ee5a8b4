"""Log-probabilities of given tokens, as policy-gradient and preference training use them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .autograd import call
from .checks import Part, checked_options


class LogProbs(NamedTuple):
    """Log-probabilities of the targets and entropies of the distributions, [...] each."""

    log_probs: Tensor
    entropy: Tensor


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    accum_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
) -> Tensor | LogProbs:
    """log softmax(z)[target] of every token, z the logits of `fused_linear_cross_entropy`, which are never in memory.

        log_probs = z_y - L     L = log sum exp z          entropy = L - sum p z     p = exp(z - L)

    Both are differentiable; the backward computes the logits again.

    Args:
        x: [..., H]; weight: [V, H]; target: [...]; bias: [V]; all as for `fused_linear_cross_entropy`.
        ignore_index: targets that count for nothing: log-probability and entropy 0, no gradient.
        softcap, logit_scale: logits are softcap tanh(logit_scale (x weight^T + bias) / softcap); logit_scale is one over
            the temperature.
        return_entropy: the entropies too.
        accum_dtype, chunk_tokens, memory_budget, process_group, vocab_range, vocab_size: as for
            `fused_linear_cross_entropy`.

    Returns:
        fp32 [...] (fp64 for fp64 input), or `LogProbs` (log_probs, entropy).

    Raises:
        TypeError, ValueError, IndexError: as for `fused_linear_cross_entropy`.
    """
    options = checked_options(
        weight,
        Part(process_group, vocab_range, vocab_size),
        ignore_index=ignore_index,
        reduction="none",
        softcap=softcap,
        logit_scale=logit_scale,
        return_entropy=return_entropy,
        accum_dtype=accum_dtype,
        chunk_tokens=chunk_tokens,
        memory_budget=memory_budget,
    )
    outputs = call(x, weight, target, bias, None, None, options)
    if not return_entropy:
        return -outputs.loss
    assert outputs.entropy is not None
    return LogProbs(-outputs.loss, outputs.entropy)
