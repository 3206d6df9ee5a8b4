"""The public loss, the same as a module, and that of a causal language model: from checked arguments to the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from npu_tiling import arguments
from npu_tiling.calls import statistics_dtype
from npu_tiling.dispatch import group_named, is_autocast
from npu_tiling.dtensor import is_distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .call import Forward, LinearCrossEntropyOutput, Option, Options, ProbabilityTargets, replaced, whole_shape
from .checks import (
    Part,
    adapted,
    as_labels,
    check_loss,
    check_values,
    check_weight_grad,
    checked_options,
    loss_of_parts,
    named_options,
)
from .distributions.plan import probability_loss
from .operator import FORWARD
from .tokens import are_counted, can_be_read, check_columns, check_counted, checked_token_weight, divisors, of_counted_tokens

_NONE = (None, None, None)  # divisor, frozen, weight_grad


def fused_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_scaling: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    return_lse: bool = False,
    return_entropy: bool = False,
    accum_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    counted_tokens: int | Tensor | None = None,
    weight_grad: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
) -> Tensor | LinearCrossEntropyOutput:
    """`cross_entropy(x @ weight.T + bias, target)` without the logits in memory.

        t = logit_scale (x weight^T + bias)     z = softcap tanh(t / softcap)     L = log sum exp z     e = label_smoothing
        row = (1 - e) (L - z_y) + e L - (e / V) sum z_i
        row = (1 - e) (L - z_y) w_y + (e / V) L sum w_i - (e / V) sum w_i z_i                         with class weights w
        "mean": sum of row / N, with class weights / sum of w_y, + sum of lse_square_scale L^2 / N, N rows not ignored
        with token weights r: row and z-loss times r; "mean" divides both by sum of r, with class weights by sum of r w_y

    Arithmetic is fp32, and so is the loss. The gradient of the logits, or the exponentials that take its place, are rounded
    to x's dtype before they are multiplied by x and the weight; in fp16 before the division by N, which would make them
    underflow. For "mean" and "sum" the forward computes the gradients; for "none", and with the entropy, the backward
    computes the logits again. Nothing is computed for an input that needs no gradient. Under autocast x, weight and bias
    are cast as in a linear layer. DTensors: see checks.py.

    With probabilities q as targets, c = w ((1 - e) q + e / V), row = L sum c - sum c z, and "mean" divides by all rows. The
    backward computes the logits again. Neither `ignore_index` nor `counted_tokens`, accuracies, predictions, entropies or
    `token_scaling` go with it.

    A target outside the vocabulary that is not `ignore_index`: on a CPU, an IndexError names it. On an accelerator the loss
    of that row is NaN, and so is the mean or sum, and the row adds nothing to the gradients.

    Args:
        x: [..., H], fp32, bf16 or fp16 (fp64 too on a CPU).
        weight: [V, H], x's dtype or fp32. A wider one than x is copied to x's dtype for the products; its gradient is
            summed in its own dtype.
        target: [...], int64, int32 or uint8; or probabilities [..., V], floating point, without a gradient, with a process
            group of this rank's columns.
        bias: [V], x's dtype or fp32.
        class_weight: [V], floating point; gets no gradient.
        token_weight: [...], floating point or bool: a factor of each token's loss, an advantage or a mask; gets no gradient.
        ignore_index: rows with this target have loss 0 and gradient 0, and "mean" does not count them. If all rows have it,
            the loss is 0. Where such a row of x holds NaN or inf, its gradient and the weight's are NaN, unless
            `counted_tokens` leaves it out.
        reduction: "mean", "sum" or "none".
        label_smoothing: from 0 to 1.
        lse_square_scale: factor of the z-loss, lse_square_scale L^2, which is added to the loss.
        softcap: c, up to 10000 max(1, |logit_scale|), for logits c tanh(t / c); None for no cap.
        logit_scale: factor of the logits: 1 / temperature.
        token_scaling: multiply each row's loss, z-loss included, by its probability of the target, as a constant.
        return_z_loss: also return the z-loss, reduced as the loss is.
        return_token_accuracy: also return the share of counted rows whose first largest logit is the target's.
        return_predicted_tokens: also return int64 [...], the first largest logit of every row; -1 where ignored.
        return_lse: also return L [...]; 0 where ignored.
        return_entropy: also return the entropy [...], L - sum p z with p = exp(z - L); 0 where ignored. Of the extras it
            alone is differentiable; with probabilities the z-loss is.
        accum_dtype: dtype of the weight's gradient while several chunks of tokens add to it: torch.float32 (fp64 for an fp64
            weight), or None for fp32 if the budget has room for it, else the weight's dtype, which is rounded once a chunk.
        chunk_tokens: tokens of a chunk; None: chosen from the device and the budget.
        memory_budget: bytes for logits and sums, without inputs and gradients; None for a default. If it holds too few
            tokens, logits are computed twice, in chunks of the vocabulary.
        process_group: weight, bias and class_weight are this rank's rows of a vocabulary that is split over the group. x,
            target and the loss are the same on every rank; the gradient of x is summed over the ranks.
        vocab_range: (start, stop), the rows that this rank has, at least one; None if all ranks have equally many.
        vocab_size: rows of all ranks; needed with `vocab_range`.
        sequence_parallel: x is this rank's part of the tokens along its first dimension. The ranks' parts, equally long and
            in their order, are gathered, and x's gradient is reduce-scattered instead of summed. Target and token weights
            are those of all tokens. Needs `process_group`; not with `counted_tokens`.
        counted_tokens: how many targets are not `ignore_index`, or more than that; or int64 [n], where they are in the
            flattened target; or a mask of the target's shape. Other tokens are ignored and take part in no product: what
            they hold, NaN too, changes nothing. A place that is listed twice counts once. Nothing waits for the device; so
            on an accelerator a mask, whose count is not known, saves no time. If more count than that number, or a place is
            outside of the target, the loss ("none": that of the first token that counts) is NaN, and on a CPU it is an
            error.
        weight_grad: [V, H], fp32 or weight's dtype: each backward that asks for the weight's gradient (one of a compiled
            function always does) adds it to this, and autograd gives the weight none. Of the weight's size nothing else is
            allocated. The backward computes the logits again, a fourth product of a loss that is one number. In fp16 its
            gradient then needs a scale of the loss, as that of "none" does.
        adapter: (u [..., R], b [V, R]), x's dtype or fp32: the logits are x weight^T + u b^T + bias, as LoRA's are with u =
            scaling lora_a(x) and b = lora_b's weight. Both get gradients; the weight must not require one.

    Returns:
        The loss, fp32 (fp64 for fp64 input): a number, or [...] for "none". If one of the `return_` options is set, a
        `LinearCrossEntropyOutput` (loss, z_loss, token_accuracy, predicted_tokens, lse, entropy).

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.
        IndexError: a target is outside the vocabulary, or a place of counted_tokens outside of the target (CPU).

    Source: torch.nn.functional.cross_entropy; z-loss: Chowdhery et al., "PaLM", arXiv 2204.02311; chunks: Hsu et al., "Liger
    Kernel", arXiv 2410.10989; softcap: "Gemma 2", arXiv 2408.00118.
    """
    options = Options(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        logit_scale=logit_scale,
        token_scaling=token_scaling,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        return_lse=return_lse,
        return_entropy=return_entropy,
        accum_dtype=accum_dtype,
        chunk_tokens=chunk_tokens,
        memory_budget=memory_budget,
        sequence_parallel=sequence_parallel,
        vocab_size=weight.shape[0] if isinstance(weight, Tensor) and weight.dim() and not weight.is_nested else 0,
    )
    is_plain = token_weight is None and counted_tokens is None and weight_grad is None and adapter is None
    is_whole = process_group is None and vocab_range is None and vocab_size is None
    if is_plain and is_whole and not (isinstance(x, Tensor) and is_autocast(x)):
        known = loss_if_checked(x, weight, target, bias, class_weight, options)
        if known is not None:
            return LinearCrossEntropyOutput(*known) if any(options.extras) else known[0]
    target = as_labels(target)
    options = replaced(options, accum_dtype=check_weight_grad(weight_grad, weight, accum_dtype))
    options = checked_options(weight, Part(process_group, vocab_range, vocab_size), options)
    x, weight, bias, frozen = adapted(x, weight, bias, adapter, weight_grad)
    if isinstance(target, Tensor) and target.is_floating_point():
        if counted_tokens is not None:
            raise ValueError("counted_tokens must be left out where target has probabilities.")
        of_probabilities = ProbabilityTargets(x, weight, bias, class_weight, target, frozen, weight_grad, options)
        outputs = probability_loss(of_probabilities, token_weight)
    else:
        call = Forward(x, weight, target, bias, class_weight, None, frozen, weight_grad, options)
        outputs = loss_of(call, counted_tokens, token_weight)
    return outputs if any(options.extras) else outputs.loss


def loss_if_checked(
    x: Tensor, weight: Tensor, target: Any, bias: Tensor | None, class_weight: Tensor | None, options: Options
) -> Any:
    """The six outputs of a call whose equal was checked before; None: it has to be checked."""
    found = FORWARD.forward.if_checked(check_loss, Forward(x, weight, target, bias, class_weight, *_NONE, options))
    return None if found is None else found[: FORWARD.outputs]


def loss_of(
    call: Forward, counted_tokens: int | Tensor | None = None, token_weight: Tensor | None = None
) -> LinearCrossEntropyOutput:
    """The loss of tensors that are checked here, with checked options."""
    options = call.options
    check_loss(call.x, call.weight, call.target, call.bias, call.class_weight, call.frozen, options)
    check_counted(counted_tokens, call.target, options)
    if token_weight is not None:
        token_weight = checked_token_weight(token_weight, call.x, call.target.shape)
    if counted_tokens is None:
        return _weighted(call, token_weight)

    def run(x: Tensor, target: Tensor, token_weight: Tensor | None) -> LinearCrossEntropyOutput:
        return _weighted(replaced(call, x=x, target=target), token_weight)

    found: LinearCrossEntropyOutput = of_counted_tokens(run, call.x, call.target, options, counted_tokens, (token_weight,))
    return found


def _weighted(call: Forward, token_weight: Tensor | None) -> LinearCrossEntropyOutput:
    """The loss of checked tensors."""
    options = call.options
    if token_weight is None:
        return run_loss(call)
    if options.reduction == "none":
        found = run_loss(call)
        factor = torch.where(are_counted(call.target, options.ignore_index), token_weight, 0.0)
        z_loss = None if found.z_loss is None else found.z_loss * factor
        return replaced(found, loss=found.loss * factor, z_loss=z_loss)
    divisor = divisors(token_weight, call.target, call.class_weight, call.divisor, options)
    return run_loss(replaced(call, divisor=divisor, options=replaced(options, reduction="mean")))


def run_loss(call: Forward) -> LinearCrossEntropyOutput:
    """The loss of checked tensors, DTensors among them."""
    if is_distributed((call.x, call.weight, call.target, call.bias, call.class_weight)):
        return loss_of_parts(run_loss, call)
    found = FORWARD.forward(call, check_loss)
    return LinearCrossEntropyOutput(*found[: FORWARD.outputs])


class FusedLinearCrossEntropyLoss(nn.Module):
    """`fused_linear_cross_entropy` with options that stay the same.

    Args:
        class_weight: [V]; a buffer, moved and saved with the module.
        options: the options of `fused_linear_cross_entropy`, by name.
    """

    class_weight: Tensor | None

    def __init__(self, class_weight: Tensor | None = None, **options: Option) -> None:
        super().__init__()
        check_values(named_options(options)[1])
        self.register_buffer("class_weight", class_weight)
        self.options: dict[str, Any] = options

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        counted_tokens: int | Tensor | None = None,
        token_weight: Tensor | None = None,
        weight_grad: Tensor | None = None,
        adapter: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        """The loss of x [..., H], the linear layer's weight [V, H] and bias [V], and target [...]; the others as there.

        Returns:
            A number, [...] for "none", or a `LinearCrossEntropyOutput`: as `fused_linear_cross_entropy` with these options.

        Raises:
            TypeError, ValueError, IndexError: as `fused_linear_cross_entropy`.
        """
        tensors = {"class_weight": self.class_weight, "token_weight": token_weight, "counted_tokens": counted_tokens}
        given: dict[str, Any] = {**self.options, **tensors, "weight_grad": weight_grad, "adapter": adapter}
        return fused_linear_cross_entropy(x, weight, target, bias, **given)

    def __getstate__(self) -> dict[str, Any]:
        """With the name of a process group, which can be copied and pickled, in place of the group."""
        group = self.options.get("process_group")
        if not isinstance(group, ProcessGroup):
            return self.__dict__
        return {**self.__dict__, "options": {**self.options, "process_group": group.group_name}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(name := self.options.get("process_group"), str):
            self.options["process_group"] = group_named(name)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


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
        weight_grad: [V, H], as for `fused_linear_cross_entropy`.
        adapter: (u [..., T, R], b [V, R]), as there: LoRA's share of the logits.
        options: the other options of `fused_linear_cross_entropy`, except `reduction`.

    Returns:
        The loss, a number, in the shape of a tensor `num_items_in_batch`: [1] in a DataParallel's replica. Or a
        `LinearCrossEntropyOutput` if one of the `return_` options is set.

    Raises:
        TypeError, ValueError, IndexError: as for `fused_linear_cross_entropy`. Some name the arguments as there: x is
            `hidden_states`, weight is `lm_head_weight`, and, with places or a mask of `counted_tokens`, target is the labels
            after their shift.

    Source: transformers, `loss/loss_utils.py`, ForCausalLMLoss.
    """
    arguments.dense("hidden_states", hidden_states)
    device, loss_shape = hidden_states.device, torch.Size()
    if num_items_in_batch is not None and not isinstance(num_items_in_batch, Tensor):
        number = arguments.number("num_items_in_batch", num_items_in_batch, least=0)
        num_items_in_batch = torch.full((), number, dtype=statistics_dtype(hidden_states.dtype), device=device)
    elif num_items_in_batch is not None:
        if num_items_in_batch.numel() != 1:
            raise ValueError(f"num_items_in_batch has {num_items_in_batch.numel()} numbers and must have one.")
        loss_shape = num_items_in_batch.shape
        num_items_in_batch = num_items_in_batch.reshape(())
        if can_be_read(num_items_in_batch):
            arguments.number("num_items_in_batch", num_items_in_batch.item(), least=0)
    part, named = named_options({"ignore_index": ignore_index, **options}, taken=("reduction",))
    checked = checked_options(lm_head_weight, part, named)
    checked = replaced(checked, accum_dtype=check_weight_grad(weight_grad, lm_head_weight, checked.accum_dtype))
    x, weight, bias, frozen = adapted(hidden_states, lm_head_weight, bias, adapter, weight_grad)
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
    outputs = loss_of(Forward(*tensors, checked), counted_tokens, token_weight)
    if loss_shape:
        z_loss = None if outputs.z_loss is None else outputs.z_loss.reshape(loss_shape)
        outputs = replaced(outputs, loss=outputs.loss.reshape(loss_shape), z_loss=z_loss)
    return outputs if any(checked.extras) else outputs.loss


def _checked_labels(name: str, labels: Tensor, x: Tensor, options: Options) -> Tensor:
    """Labels of the tokens x [..., H], in a dtype that holds ignore_index."""
    labels = as_labels(labels)
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
    arguments.dense(name, values)
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
        is_sequence = hasattr(given, "__len__") and hasattr(given, "__getitem__") and getattr(given, "ndim", 1) > 0
        if given is not None and not is_sequence:
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
