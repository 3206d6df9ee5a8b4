"""The public loss: its arguments are checked, and it calls the operator."""

from __future__ import annotations

from typing import Any

import torch
from npu_tiling.dtensor import is_distributed
from npu_tiling.tensors import is_autocast
from torch import Tensor
from torch.distributed import ProcessGroup

from . import sharding
from .call import Forward, LinearCrossEntropyOutput, Options, ProbabilityTargets, replaced
from .checks import Part, check_loss, check_weight_grad, checked_options, joined
from .distributions.probabilities import probability_loss
from .operator import FORWARD
from .tokens import are_counted, check_counted, checked_token_weight, divisors, of_counted_tokens

_NONE = (None, None, None)  # divisor, frozen, weight_grad
_FLAGS = (False, False, False, False)  # what autograd asks an operator for beside the outputs


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

    Arithmetic is fp32, and so is the loss. The gradient of the logits is rounded to x's dtype before it is multiplied by x
    and the weight, as it is where logits are a tensor; where exponentials are multiplied in its place (see `explain`), they
    are rounded so, and the target's part is added in fp32. In fp16 it is rounded before the division by N, which would make
    it underflow. For "mean" and "sum" the forward computes the gradients, in the memory of the logits; for "none", and with
    the entropy, the backward computes the logits again. Nothing is computed for an input that needs no gradient. Under
    autocast x, weight and bias are cast as in a linear layer. DTensors: see sharding.py.

    With probabilities q as targets, c = w ((1 - e) q + e / V), row = L sum c - sum c z, and "mean" divides by all rows. The
    backward computes the logits again. Neither `ignore_index` nor `counted_tokens`, accuracies, predictions, entropies or
    `token_scaling` go with it.

    A target outside the vocabulary that is not `ignore_index`: on a CPU, an IndexError names it. On an accelerator, raising
    would need a device sync: nothing outside the tensors is read, the loss of that row is NaN, and so is the mean or sum,
    and the row adds nothing to the gradients.

    Args:
        x: [..., H], fp32, bf16 or fp16 (fp64 too on a CPU).
        weight: [V, H], x's dtype or fp32. A wider one than x is copied to x's dtype for the products; its gradient is
            summed in its own dtype.
        target: [...], int64 or int32; or probabilities [..., V], floating point, without a gradient, with a process group of
            this rank's columns.
        bias: [V], x's dtype or fp32.
        class_weight: [V], floating point; gets no gradient.
        token_weight: [...], floating point or bool: a factor of each token's loss, an advantage or a mask; gets no gradient.
        ignore_index: rows with this target have loss 0 and gradient 0, and "mean" does not count them. If all rows have it,
            the loss is 0. They take part in the products: where such a row of x holds NaN or inf, its gradient and the
            weight's are NaN, unless `counted_tokens` leaves it out.
        reduction: "mean", "sum" or "none".
        label_smoothing: from 0 to 1.
        lse_square_scale: factor of the z-loss, lse_square_scale L^2, which is added to the loss.
        softcap: c, for logits c tanh(t / c); None for no cap.
        logit_scale: factor of the logits: 1 / temperature.
        token_scaling: multiply each row's loss, z-loss included, by its probability of the target, as a constant.
        return_z_loss: also return the z-loss, reduced as the loss is.
        return_token_accuracy: also return the share of counted rows whose first largest logit is the target's.
        return_predicted_tokens: also return int64 [...], the first largest logit of every row; -1 where ignored.
        return_lse: also return L [...]; 0 where ignored.
        return_entropy: also return the entropy [...], L - sum p z with p = exp(z - L); 0 where ignored. Of the extras it
            alone is differentiable; with probabilities the z-loss is.
        accum_dtype: dtype of the weight's gradient while several chunks of tokens add to it: torch.float32, or None for fp32
            if the budget has room for it, else the weight's dtype, which is rounded once a chunk.
        chunk_tokens: tokens of a chunk; None: chosen from the device and the budget.
        memory_budget: bytes for logits and sums, without inputs and gradients; None for a default. If it holds too few
            tokens, the vocabulary is cut into chunks too; logits are then computed twice where they cannot be kept.
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
            on an accelerator a mask, whose count is not known, saves no time: tokens of zeros take the others' place. If
            more count than that number, or a place is outside of the target, the loss ("none": that of the first token
            that counts) is NaN, and on a CPU it is an error.
        weight_grad: [V, H], fp32 or weight's dtype: each backward that asks for the weight's gradient (one of a compiled
            function always does) adds it to this, if the weight requires one, and autograd gives the weight none. Of the
            weight's size nothing else is allocated, and no forward computes gradients: the backward computes the logits
            again, which is a fourth product of a loss that is one number. In fp16 its gradient then needs a scale of the
            loss, as that of "none" does.
        adapter: (u [..., R], b [V, R]), x's dtype or fp32: the logits are x weight^T + u b^T + bias, as LoRA's are with
            u = scaling lora_a(x) and b = lora_b's weight. Both get gradients; the weight must not require one, and nothing
            of its size is allocated.

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
        vocab_size=weight.shape[0] if isinstance(weight, Tensor) and weight.dim() else 0,
    )
    is_plain = token_weight is None and counted_tokens is None and weight_grad is None and adapter is None
    is_whole = process_group is None and vocab_range is None and vocab_size is None
    if is_plain and is_whole and not (isinstance(x, Tensor) and is_autocast(x)):
        known = loss_again(x, weight, target, bias, class_weight, options)
        if known is not None:
            return LinearCrossEntropyOutput(*known) if any(options.extras) else known[0]
    options = replaced(options, accum_dtype=check_weight_grad(weight_grad, weight, accum_dtype))
    options = checked_options(weight, Part(process_group, vocab_range, vocab_size), options)
    x, weight, bias, frozen = joined(x, weight, bias, adapter, weight_grad)
    if isinstance(target, Tensor) and target.is_floating_point():
        if counted_tokens is not None:
            raise ValueError("counted_tokens must be left out where target has probabilities.")
        of_probabilities = ProbabilityTargets(x, weight, bias, class_weight, target, frozen, weight_grad, options)
        outputs = probability_loss(of_probabilities, token_weight)
    else:
        call = Forward(x, weight, target, bias, class_weight, None, frozen, weight_grad, options, *_FLAGS)
        outputs = loss_of(call, counted_tokens, token_weight)
    return outputs if any(options.extras) else outputs.loss


def loss_again(
    x: Tensor, weight: Tensor, target: Any, bias: Tensor | None, class_weight: Tensor | None, options: Options
) -> Any:
    """The six outputs of a call whose equal was checked before; None: it has to be checked."""
    found = FORWARD.forward.again(check_loss, Forward(x, weight, target, bias, class_weight, *_NONE, options, *_FLAGS))
    return None if found is None else found[: FORWARD.outputs]


def loss_of(
    call: Forward, counted_tokens: int | Tensor | None = None, token_weight: Tensor | None = None
) -> LinearCrossEntropyOutput:
    """The loss of tensors that are checked here, with checked options."""
    options = call.options
    check_loss(call.x, call.weight, call.target, call.bias, call.class_weight, call.frozen, options)
    check_counted(counted_tokens, call.target, options)
    each = None if token_weight is None else checked_token_weight(token_weight, call.x, call.target.shape)
    if counted_tokens is None:
        return _weighted(call, each)

    def of_counted(x: Tensor, target: Tensor, each: Tensor | None) -> LinearCrossEntropyOutput:
        return _weighted(replaced(call, x=x, target=target), each)

    found: LinearCrossEntropyOutput = of_counted_tokens(of_counted, call.x, call.target, options, counted_tokens, (each,))
    return found


def _weighted(call: Forward, each: Tensor | None) -> LinearCrossEntropyOutput:
    """The loss of checked tensors and weights [...] of the tokens; None for 1."""
    options = call.options
    if each is None:
        return computed(call)
    if options.reduction == "none":
        found = computed(call)
        each = torch.where(are_counted(call.target, options.ignore_index), each, 0.0)
        z_loss = None if found.z_loss is None else found.z_loss * each
        return LinearCrossEntropyOutput(found.loss * each, z_loss, *_others(found))
    divisor = divisors(each, call.target, call.class_weight, call.divisor, options)
    return computed(replaced(call, divisor=divisor, options=replaced(options, reduction="mean")))


def _others(found: LinearCrossEntropyOutput) -> tuple[Any, ...]:
    return found.token_accuracy, found.predicted_tokens, found.lse, found.entropy


def computed(call: Forward) -> LinearCrossEntropyOutput:
    """The loss of checked tensors, DTensors among them."""
    if is_distributed((call.x, call.weight, call.target, call.bias, call.class_weight)):
        return sharding.linear_cross_entropy(computed, call)
    found = FORWARD.forward(call, check_loss)
    return LinearCrossEntropyOutput(*found[: FORWARD.outputs])
