"""VeOmni: the head where `cross_entropy_loss_implementation` is "npu" or "chunk_loss", the default.

Ours are the loss of causal language models and the log-probabilities and entropies that policies read (`return_log_probs`).
The distillation from a teacher's largest logits stays VeOmni's. Written against VeOmni 0.1.12.
"""

from __future__ import annotations

from typing import Any

from npu_tiling.models import Hook
from torch import Tensor
from torch.nn.functional import pad

from ..api import fused_linear_cross_entropy
from ..log_probs import linear_log_probs

_hook = Hook()


def chunk_loss_function(
    hidden_states: Tensor,
    weights: Tensor,
    labels: Tensor,
    chunk_size: int = 1024,
    vocab_size: int | None = None,
    num_items_in_batch: int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The mean loss of tokens that predict the next one.

    Args:
        hidden_states: x [B, T, H].
        weights: W [V, H].
        labels: [B, T]; with sequence parallelism they are shifted already.
        ignore_index: of labels that are not counted.
        chunk_size, vocab_size, num_items_in_batch, shift_labels, others: VeOmni's function does not read them either.

    Returns:
        The loss, and None for the logits.
    """
    from veomni.distributed.parallel_state import get_parallel_state
    from veomni.distributed.sequence_parallel import reduce_sequence_parallel_loss

    parallel = get_parallel_state().sp_enabled
    targets = labels if parallel else _next(labels, ignore_index)
    loss = fused_linear_cross_entropy(hidden_states, weights, targets, ignore_index=ignore_index)
    if parallel:
        loss = reduce_sequence_parallel_loss(loss, (labels != ignore_index).sum())
    assert isinstance(loss, Tensor)
    return loss, None


def chunk_logprobs_function(
    hidden_states: Tensor,
    weights: Tensor,
    labels: Tensor,
    chunk_size: int = 1024,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """log softmax(x W^T / temperature)[label] and the entropy of every token.

    Args:
        hidden_states: x [..., T, H].
        weights: W [V, H].
        labels: [..., T]; with sequence parallelism they are shifted already.
        ignore_index: of labels whose results are 0.
        shift_labels: labels that are shifted already, in place of `labels`.
        temperature: of the distribution.
        chunk_size: of VeOmni's own function.

    Returns:
        Log-probabilities and entropies, fp32, of the labels' shape.
    """
    from veomni.distributed.parallel_state import get_parallel_state

    if shift_labels is not None:
        targets = shift_labels
    else:
        targets = labels if get_parallel_state().sp_enabled else _next(labels, ignore_index)
    scores: Any = linear_log_probs(
        hidden_states, weights, targets, ignore_index=ignore_index, temperature=temperature, return_entropy=True
    )
    return scores.log_probs, scores.entropy


def register() -> None:
    """Let VeOmni's losses call ours."""
    from veomni.ops.kernels import cross_entropy

    for ours in (chunk_loss_function, chunk_logprobs_function):
        _hook.replace(cross_entropy, ours.__name__, ours)


def unregister() -> None:
    """Let VeOmni call its own."""
    _hook.undo()


def _next(labels: Tensor, ignore_index: int) -> Tensor:
    """For every token the label of the next; the last has none."""
    return pad(labels[..., 1:], (0, 1), value=ignore_index)
