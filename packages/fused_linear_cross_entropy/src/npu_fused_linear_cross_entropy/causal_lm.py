"""The loss of a causal language model, from its last hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling import arguments
from npu_tiling.tensors import statistics_dtype
from torch import Tensor

from .api import loss_of
from .call import Forward, LinearCrossEntropyOutput, Option, Options, replaced, whole_shape
from .checks import check_loss, check_weight_grad, checked_options, joined, named_options
from .tokens import can_be_read, check_columns, checked_token_weight, divisors


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
    token_weight: Tensor | None = None,
    shifts: Sequence[int] | None = None,
    shift_weights: Sequence[float] | None = None,
    weight_grad: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
    **options: Option,
) -> Tensor | LinearCrossEntropyOutput:
    """Next-token loss, as the loss functions of Hugging Face's models have it, of hidden states instead of logits.

    Token i of a sequence is compared with label i + 1; the last token is ignored. With `shifts` k, of heads that predict
    several tokens and share one weight, the loss is the sum over k of k's weight times the mean over tokens i of the loss of
    hidden_states[k's place, ..., i] and label i + k.

    Args:
        hidden_states: [..., T, H]; with `shifts` [shifts, ..., T, H].
        lm_head_weight: [V, H].
        labels: [..., T].
        num_items_in_batch: the sum of the losses is divided by this number or tensor, at least 0: the labels of a whole
            step, if its gradients are accumulated over several batches. None: the mean over this batch. 0, for a step whose
            labels are all ignored: gradients are 0, and the loss is NaN as of transformers (0 with token weights or shifts).
        shift_labels: True: label i + 1 belongs to token i. False: label i does. A tensor: the labels that belong to the
            tokens, instead of `labels`.
        ignore_index: tokens with this label are ignored.
        bias: [V].
        class_weight: [V].
        counted_tokens: as for `fused_linear_cross_entropy`, of the labels after their shift; not with `shifts`.
        token_weight: [..., T], as for `fused_linear_cross_entropy`, of the labels: shifted as they are. Not with a tensor of
            `shift_labels`.
        shifts: whole numbers from 0 on: which label after each token a head's states predict. Each mean is over its own
            labels that are not ignored, or divided by `num_items_in_batch`. With class weights it divides the z-loss by the
            sum of the weights too, as with token weights.
        shift_weights: a factor of each shift's loss; None for 1.
        weight_grad: [V, H], as for `fused_linear_cross_entropy`: each backward adds the weight's gradient to it.
        adapter: (u [..., T, R], b [V, R]), as there: LoRA's share of the logits.
        options: the other options of `fused_linear_cross_entropy`, except `reduction`.

    Returns:
        The loss, a number; or a `LinearCrossEntropyOutput` if one of the `return_` options is set.

    Raises:
        TypeError, ValueError, IndexError: as for `fused_linear_cross_entropy`. Some name the arguments as there: x is
            `hidden_states`, weight is `lm_head_weight`, and, with places or a mask of `counted_tokens`, target is the labels
            after their shift.

    Source: transformers, `loss/loss_utils.py`, ForCausalLMLoss.
    """
    arguments.tensor("hidden_states", hidden_states)
    device = hidden_states.device
    if num_items_in_batch is not None and not isinstance(num_items_in_batch, Tensor):
        number = arguments.number("num_items_in_batch", num_items_in_batch, least=0)
        num_items_in_batch = torch.full((), number, dtype=statistics_dtype(hidden_states.dtype), device=device)
    elif num_items_in_batch is not None:
        if num_items_in_batch.numel() != 1:
            raise ValueError(f"num_items_in_batch has {num_items_in_batch.numel()} numbers and must have one.")
        num_items_in_batch = num_items_in_batch.reshape(())
        if can_be_read(num_items_in_batch):
            arguments.number("num_items_in_batch", num_items_in_batch.item(), least=0)
    part, named = named_options({"ignore_index": ignore_index, **options}, taken=("reduction",))
    checked = checked_options(lm_head_weight, part, named)
    checked = replaced(checked, accum_dtype=check_weight_grad(weight_grad, lm_head_weight, checked.accum_dtype))
    x, weight, bias, frozen = joined(hidden_states, lm_head_weight, bias, adapter, weight_grad)
    if isinstance(shift_labels, Tensor):
        if any(given is not None for given in (token_weight, shifts, shift_weights)):
            raise ValueError("token_weight, shifts and shift_weights must be left out where shift_labels is a tensor.")
        target = _checked_labels("shift_labels", shift_labels, x, checked)
        if not isinstance(counted_tokens, Tensor):
            _check_compared("shift_labels", target, 0, checked)
        target = target.to(device)
    else:
        arguments.flags(shift_labels=shift_labels)
        arguments.tensor("token_weight", token_weight, or_none=True)
        heads = _heads(shifts, shift_weights, hidden_states)
        labels = _checked_labels("labels", labels, x if heads is None else x[0], checked)
        if not isinstance(counted_tokens, Tensor):  # beside places or a mask, other labels may hold anything
            _check_compared("labels", labels, int(shift_labels) if heads is None else 0, checked)
        labels = labels.to(device)
        if heads is None:
            target = _shifted("labels", labels, int(shift_labels), ignore_index)
            token_weight = None if token_weight is None else _shifted("token_weight", token_weight, int(shift_labels), 0)
        else:
            if counted_tokens is not None:
                raise ValueError("counted_tokens must be left out where shifts are given.")
            target = torch.stack([_shifted("labels", labels, shift, ignore_index) for shift, _ in heads])
            check_loss(x, weight, target, bias, class_weight, frozen, checked)
            each = labels.new_ones(labels.shape, dtype=torch.bool) if token_weight is None else token_weight
            shifted = [checked_token_weight(_shifted("token_weight", each, shift, 0), x, labels.shape) for shift, _ in heads]
            token_weight = torch.stack(
                [
                    factor / divisors(weights, of_shift, class_weight, num_items_in_batch, checked)
                    for (_, factor), weights, of_shift in zip(heads, shifted, target, strict=True)
                ]
            )
            checked, num_items_in_batch = replaced(checked, reduction="sum"), None
    tensors = (x, weight, target, bias, class_weight, num_items_in_batch, frozen, weight_grad)
    outputs = loss_of(Forward(*tensors, checked, False, False, False, False), counted_tokens, token_weight)
    return outputs if any(checked.extras) else outputs.loss


def _checked_labels(name: str, labels: Tensor, x: Tensor, options: Options) -> Tensor:
    """Labels of the tokens x [..., H], in a dtype that holds ignore_index."""
    arguments.tensor(name, labels)
    arguments.dtype(name, labels, torch.int64, torch.int32)
    arguments.shape(name, labels, whole_shape(x, options))
    limits = torch.iinfo(labels.dtype)
    return labels if limits.min <= options.ignore_index <= limits.max else labels.long()


def _check_compared(name: str, labels: Tensor, shift: int, options: Options) -> None:
    """Raises IndexError on a CPU where a label is wrong; no token is compared with the first `shift` of them."""
    if can_be_read(labels):
        compared = torch.arange(labels.shape[-1], device=labels.device) >= shift if shift and labels.dim() else None
        check_columns(name, labels, options, compared)


def _shifted(name: str, values: Tensor, shift: int, ending: int) -> Tensor:
    """Values [..., T]: for each token that `shift` places later; past the last one the ending."""
    if not shift:
        return values
    if not values.dim():
        raise ValueError(f"{name} has shape () and must have shape (..., T) where labels are shifted.")
    return torch.nn.functional.pad(values, (0, shift), value=ending)[..., shift:]


def _heads(
    shifts: Sequence[int] | None, shift_weights: Sequence[float] | None, hidden_states: Tensor
) -> list[tuple[int, float]] | None:
    """Each head's shift and weight. Raises where shifts, weights and hidden states are not equally many."""
    if shifts is None:
        if shift_weights is not None:
            raise ValueError("shift_weights must be left out where shifts are.")
        return None
    for name, given in (("shifts", shifts), ("shift_weights", shift_weights)):
        if given is not None and not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
            raise TypeError(f"{name} is a {type(given).__name__} and must be a sequence of numbers.")
    if not len(shifts):
        raise ValueError(f"shifts is {shifts} and must have at least one number.")
    for place, shift in enumerate(shifts):
        arguments.whole(f"shifts[{place}]", shift, least=0)
    if hidden_states.dim() < 2 or hidden_states.shape[0] != len(shifts):
        shape = tuple(hidden_states.shape)
        raise ValueError(f"hidden_states has shape {shape} and must have shape ({len(shifts)}, ..., H) with these shifts.")
    if shift_weights is None:
        return [(shift, 1.0) for shift in shifts]
    if len(shift_weights) != len(shifts):
        raise ValueError(f"shift_weights has {len(shift_weights)} numbers and must have {len(shifts)}, one for each shift.")
    numbers = [arguments.number(f"shift_weights[{place}]", one) for place, one in enumerate(shift_weights)]
    return list(zip(shifts, numbers, strict=True))
