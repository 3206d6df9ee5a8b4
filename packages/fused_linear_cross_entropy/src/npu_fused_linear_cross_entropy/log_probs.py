"""Log-probabilities of given tokens, as policy-gradient and preference training use them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from .api import call
from .checks import Part, autocast, check, checked_options
from .options import Options

_INVARIANT_TOKENS = 512  # of a chunk, where its length must not follow from how many tokens there are


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
    batch_invariant: bool = False,
    accum_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    counted_tokens: int | Tensor | None = None,
) -> Tensor | LogProbs:
    """log softmax(z)[target] of every token, without the logits z of `fused_linear_cross_entropy` in memory.

        log_probs = z_y - L     L = log sum exp z          entropy = L - sum p z     p = exp(z - L)

    Both are differentiable; the backward computes the logits again.

    Equal calls give equal bits. But the bits of one token depend on how many tokens there are, because chunks and the
    framework's choice of a matrix product do. With `batch_invariant` they do not: every product has one shape,
    [chunk_tokens, H] @ [H, V], padded with rows of zeros, and the kernel computes each row's statistics by themselves. On
    one kind of device, with one release of its libraries, a token then has the same bits among any tokens, in any place. Not
    promised: gradients; a `process_group`, whose collective library orders its sums; CPUs, where tests see it hold, but
    the matrix product is not ours.

    Args:
        x: [..., H], fp32, bf16 or fp16 (fp64 too on a CPU).
        weight: [V, H], x's dtype or fp32.
        target: [...], int64 or int32.
        bias: [V], x's dtype or fp32.
        ignore_index: tokens with this target have log-probability and entropy 0, and no gradient.
        softcap: c, for logits c tanh(t / c); None for no cap.
        logit_scale: factor of the logits: 1 / temperature.
        return_entropy: also return the entropies.
        batch_invariant: make a token's results independent of the other tokens. Costs a copy of x, and the time of at least
            `chunk_tokens` tokens, 512 by default.
        accum_dtype, chunk_tokens, memory_budget, process_group, vocab_range, vocab_size, counted_tokens: as for
            `fused_linear_cross_entropy`; no counted_tokens with `batch_invariant`.

    Returns:
        fp32 [...] (fp64 for fp64 input); with `return_entropy`, `LogProbs` (log_probs, entropy).

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.
        IndexError: a target is outside the vocabulary (CPU).

    Source: torch.nn.functional.cross_entropy, negated; batch invariance: He et al., "Defeating Nondeterminism in LLM
    Inference", Thinking Machines Lab, 2025.
    """
    options = checked_options(
        weight,
        Part(process_group, vocab_range, vocab_size),
        Options(
            ignore_index=ignore_index,
            reduction="none",
            softcap=softcap,
            logit_scale=logit_scale,
            return_entropy=return_entropy,
            accum_dtype=accum_dtype,
            chunk_tokens=_INVARIANT_TOKENS if batch_invariant and chunk_tokens is None else chunk_tokens,
            memory_budget=memory_budget,
        ),
    )
    shape = None
    if batch_invariant:
        if counted_tokens is not None:
            raise ValueError("counted_tokens must be left out where batch_invariant is True.")
        if is_distributed((x, weight, target, bias)):
            raise ValueError("batch_invariant is True and must be False where there are DTensors.")
        x, weight, bias = autocast(x, weight, bias)
        check(x, weight, target, bias, None)
        assert options.chunk_tokens is not None
        shape = target.shape
        x, target = _filled_up(x, target, options.chunk_tokens, ignore_index)
    outputs = call(x, weight, target, bias, None, None, options, counted_tokens)
    log_probs, entropy = -outputs.loss, outputs.entropy
    if shape is not None:
        count = shape.numel()
        log_probs = log_probs[:count].view(shape)
        entropy = None if entropy is None else entropy[:count].view(shape)
    if not return_entropy:
        return log_probs
    assert entropy is not None
    return LogProbs(log_probs, entropy)


def _filled_up(x: Tensor, target: Tensor, tokens: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """x [n, H] and target [n] as copies, with ignored tokens of zeros up to a multiple of `tokens`.

    Copies even where nothing is added: the product that a framework chooses follows from the address and strides too.
    """
    rows = x.reshape(target.numel(), x.shape[-1])
    more = -rows.shape[0] % tokens
    filled = torch.cat((rows, rows.new_zeros(more, rows.shape[1])))
    return filled, torch.cat((target.reshape(-1).long(), target.new_full((more,), ignore_index, dtype=torch.int64)))
