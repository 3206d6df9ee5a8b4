"""The loss of a causal language model, from its last hidden states."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.pytorch import arguments
from torch import Tensor

from .api import LinearCrossEntropyOutput, call
from .checks import Part, checked_options, named_options
from .options import Option


def causal_lm_loss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: bool | Tensor = True,
    ignore_index: int = -100,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    counted_tokens: int | Tensor | None = None,
    **options: Option,
) -> Tensor | LinearCrossEntropyOutput:
    """Next-token loss, as the loss functions of Hugging Face's models have it, of hidden states instead of logits.

    Token i of a sequence is compared with label i + 1; the last token is ignored.

    Args:
        hidden_states: [..., T, H].
        lm_head_weight: [V, H].
        labels: [..., T].
        num_items_in_batch: the sum of the losses is divided by this number or tensor: the labels of a whole step, if its
            gradients are accumulated over several batches. None: the mean over this batch.
        shift_labels: True: label i + 1 belongs to token i. False: label i does. A tensor: the labels that belong to the
            tokens, instead of `labels`.
        ignore_index: tokens with this label are ignored.
        bias: [V].
        class_weight: [V].
        counted_tokens: as for `fused_linear_cross_entropy`, of the labels after their shift.
        options: the other options of `fused_linear_cross_entropy`, except `reduction`.

    Returns:
        The loss, a number; or a `LinearCrossEntropyOutput` if one of the `return_` options is set.

    Raises:
        TypeError, ValueError, IndexError: as for `fused_linear_cross_entropy`.

    Source: transformers, `loss/loss_utils.py`, ForCausalLMLoss.
    """
    if "reduction" in options:
        raise TypeError("reduction is no option of causal_lm_loss: it divides the sum by num_items_in_batch or the count.")
    arguments.tensor("hidden_states", hidden_states)
    if isinstance(shift_labels, Tensor):
        target = shift_labels
    elif _shifts(labels, shift_labels, ignore_index):
        limits = torch.iinfo(labels.dtype)
        wide = labels if limits.min <= ignore_index <= limits.max else labels.long()
        target = torch.nn.functional.pad(wide, (0, 1), value=ignore_index)[..., 1:]
    else:
        target = labels
    target = target.to(hidden_states.device)
    if num_items_in_batch is None:
        divisor = None
    elif isinstance(num_items_in_batch, Tensor):
        divisor = num_items_in_batch
    else:
        divisor = torch.full((), arguments.number("num_items_in_batch", num_items_in_batch), device=hidden_states.device)
    part = Part(*(options.pop(name, None) for name in Part._fields))  # type: ignore[arg-type]  # checked below
    checked = checked_options(lm_head_weight, part, named_options({"ignore_index": ignore_index, **options}))
    outputs = call(hidden_states, lm_head_weight, target, bias, class_weight, divisor, checked, counted_tokens)
    return outputs if any(output is not None for output in outputs[1:]) else outputs.loss


def _shifts(labels: Any, shift_labels: Any, ignore_index: Any) -> bool:
    arguments.tensor("labels", labels)
    arguments.flags(shift_labels=shift_labels)
    arguments.whole("ignore_index", ignore_index)
    return bool(shift_labels)
