"""The public function of distillation: its arguments are checked, and it calls the operator."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from npu_tiling import device_for
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.autograd import can_bypass_dispatcher
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from .adapter import joined
from .checks import autocast, check_weight_grad, check_width
from .compute import check_columns
from .distillation_operators import distill
from .distillation_top_k import distill_top_k
from .options import DIVERGENCES, REDUCTIONS, DistillationOptions
from .ways.distillation import DistillationInputs


class Teacher(NamedTuple):
    """A teacher's head: logits t = logit_scale (x weight^T + bias), or softcap tanh(t / softcap). It gets no gradients.

    Attributes:
        x: [..., H'], with the leading dimensions of the student's x; H' may differ from H.
        weight: [V, H'], x's dtype or fp32.
        bias: [V], x's dtype or fp32.
        softcap, logit_scale: as the student's.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0


class DistillationLoss(NamedTuple):
    """A loss and its parts, before their weights and reduced as it is.

    Attributes:
        loss: the weighted sum of the parts.
        soft: the divergence from the teacher.
        hard: the cross entropy with the target; None where its weight is 0.
    """

    loss: Tensor
    soft: Tensor
    hard: Tensor | None


def linear_distillation_loss(
    x: Tensor,
    weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    teacher: Teacher | tuple[Tensor, ...] | None = None,
    teacher_probs: Tensor | None = None,
    teacher_top_k: tuple[Tensor, Tensor] | None = None,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_parts: bool = False,
    accum_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    weight_grad: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
) -> Tensor | DistillationLoss:
    """The divergence of a student's next-token distribution from a teacher's, without the logits of either in memory.

        z = softcap tanh(logit_scale (x weight^T + bias) / softcap)       L = log sum exp z       z': the teacher's
        p = softmax(z / T)       q = softmax(z' / T)       m = beta q + (1 - beta) p       T = temperature
        row = soft_weight D + hard_weight (L - z_y)
        "forward_kl"         D = sum q log(q / p)
        "reverse_kl"         D = sum p log(p / q)
        "jensen_shannon"     D = beta sum q log(q / m) + (1 - beta) sum p log(p / m)
        "total_variation"    D = sum |p - q| / 2
        "mean": sum of row / N, N tokens not ignored

    D is not multiplied by T^2, nor is it in Liger's and TRL's losses; Hinton et al. do: give soft_weight that factor. At
    beta = 0 and 1 those have the forward and the reverse divergence, where D above would be 0.

    Arithmetic is fp32, and so is the loss. The logits of a chunk of tokens, the student's and the teacher's, are in memory
    at a time, in whole rows. For "mean" and "sum" the forward computes the gradients, in the memory of the student's
    logits: four products in all. For "none" the backward computes logits again. The gradient of the logits is rounded to
    x's dtype before it is multiplied by x and the weight.

    A target outside the vocabulary that is not `ignore_index`: as for `fused_linear_cross_entropy`, where hard_weight is not
    0; else it only counts.

    Args:
        x: [..., H], the student's, fp32, bf16 or fp16 (fp64 too on a CPU).
        weight: [V, H], x's dtype or fp32.
        target: [...], int64 or int32: the hard labels, or which tokens are ignored; None: all count, and hard_weight is 0.
        bias: [V], x's dtype or fp32.
        teacher: the teacher's head, a `Teacher` or a tuple of its fields in their order.
        teacher_probs: [..., V], floating point, in its place: q for T = 1, divided by its sum; a probability of 0 counts as
            the smallest number of fp32, 1.2e-38. With a temperature q is softmax(log(teacher_probs) / T).
        teacher_top_k: ids [..., K], int64 or int32, and q's log-probabilities of them [..., K], floating point, in its
            place: D = sum over the K columns of q log(q / p), for "forward_kl" alone. q is taken as it is, at any
            temperature, and not divided by its sum; an id that is `ignore_index` counts nothing. The backward computes
            logits again, whatever the reduction.
        divergence: one of the above.
        beta: above 0 and below 1; the share of the teacher in m.
        temperature: T, above 0. The hard labels' cross entropy is that of T = 1.
        soft_weight, hard_weight: factors of the divergence and of the cross entropy.
        ignore_index: tokens with this target have loss 0 and gradient 0, and "mean" does not count them; those of the
            teacher may hold anything. If all have it, the loss is 0. Where such a row of x holds NaN or inf, the weight's
            gradient is NaN.
        reduction: "mean", "sum" or "none".
        softcap: c, for logits c tanh(t / c); None for no cap.
        logit_scale: factor of the logits.
        return_parts: also return D and the cross entropy by themselves.
        accum_dtype: as for `fused_linear_cross_entropy`.
        chunk_tokens: tokens of a chunk; None: chosen from the device and the budget.
        memory_budget: bytes for the logits of both and for sums, beside inputs and gradients; None for a default.
        weight_grad: [V, H], fp32 or weight's dtype: each backward adds the weight's gradient to it, as for
            `fused_linear_cross_entropy`.
        adapter: (u [..., R], b [V, R]), as there: LoRA's share of the student's logits.

    Returns:
        The loss, fp32 (fp64 for fp64 input): a number, or [...] for "none". With `return_parts` a `DistillationLoss` (loss,
        soft, hard), whose parts have no gradients.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.
        IndexError: a target is outside the vocabulary (CPU).

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv 1503.02531; Agarwal et al., "On-Policy
    Distillation of Language Models", arXiv 2306.13649; chunks: Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """
    given = _teacher(teacher, teacher_probs, teacher_top_k)
    options = _options(
        weight,
        DistillationOptions(
            divergence=divergence,
            beta=beta,
            temperature=temperature,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
            ignore_index=ignore_index,
            reduction=reduction,
            softcap=softcap,
            logit_scale=logit_scale,
            teacher_softcap=None if given is None else given.softcap,
            teacher_logit_scale=1.0 if given is None else given.logit_scale,
            return_parts=return_parts,
            accum_dtype=check_weight_grad(weight_grad, weight, accum_dtype),
            chunk_tokens=chunk_tokens,
            memory_budget=memory_budget,
        ),
    )
    if teacher_top_k is not None:
        loss, soft, hard = distill_top_k(x, weight, target, bias, *teacher_top_k, options, weight_grad, adapter)
        return DistillationLoss(loss, soft, hard) if return_parts else loss
    x, weight, frozen = joined(x, weight, adapter, weight_grad)
    x, weight, bias = autocast(x, weight, bias)
    teacher_x = teacher_weight = teacher_bias = None
    probs = None if teacher_probs is None else teacher_probs.detach()
    if given is not None:
        teacher_x, teacher_weight, teacher_bias = autocast(given.x.detach(), given.weight.detach(), given.bias)
        teacher_bias = None if teacher_bias is None else teacher_bias.detach()
    inputs = DistillationInputs(x, weight, target, bias, teacher_x, teacher_weight, teacher_bias, probs, frozen, weight_grad)
    _check(inputs, options)
    loss, soft, hard = distill(inputs, options)
    return DistillationLoss(loss, soft, hard if options.hard_weight else None) if return_parts else loss


def _teacher(teacher: Any, teacher_probs: Any, teacher_top_k: Any) -> Teacher | None:
    if [teacher, teacher_probs, teacher_top_k].count(None) != 2:
        raise ValueError("teacher, teacher_probs and teacher_top_k: one of them must be given, and no other.")
    if teacher_top_k is not None and (not isinstance(teacher_top_k, tuple) or len(teacher_top_k) != 2):
        raise TypeError(f"teacher_top_k is a {type(teacher_top_k).__name__} and must be a tuple (ids, log_probs).")
    if teacher is None:
        arguments.tensor("teacher_probs", teacher_probs, or_none=True)
        return None
    if not isinstance(teacher, tuple) or not 2 <= len(teacher) <= len(Teacher._fields):
        raise TypeError(f"teacher is a {type(teacher).__name__} and must be a Teacher, or a tuple (x, weight, bias).")
    made = Teacher(*teacher)
    for name in ("x", "weight"):
        arguments.tensor(f"teacher.{name}", getattr(made, name))
    arguments.tensor("teacher.bias", made.bias, or_none=True)
    return made


def _options(weight: Tensor, options: DistillationOptions) -> DistillationOptions:
    arguments.tensor("weight", weight)
    if weight.dim() != 2 or not weight.shape[0] or not weight.shape[1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)} and must have shape (V, H), both at least 1.")
    arguments.one_of("divergence", options.divergence, DIVERGENCES)
    arguments.one_of("reduction", options.reduction, REDUCTIONS)
    arguments.whole("ignore_index", options.ignore_index)
    beta = arguments.number("beta", options.beta, above=0)
    if beta >= 1:
        raise ValueError(f"beta is {options.beta} and must be above 0 and below 1.")
    arguments.whole("chunk_tokens", options.chunk_tokens, least=1, or_none=True)
    arguments.whole("memory_budget", options.memory_budget, least=1, or_none=True)
    arguments.flags(return_parts=options.return_parts)
    if options.accum_dtype not in (None, torch.float32, weight.dtype):
        raise TypeError(f"accum_dtype is {options.accum_dtype} and must be torch.float32, weight's dtype or None.")
    return options._replace(
        beta=beta,
        temperature=arguments.number("temperature", options.temperature, above=0),
        soft_weight=arguments.number("soft_weight", options.soft_weight),
        hard_weight=arguments.number("hard_weight", options.hard_weight),
        softcap=arguments.number("softcap", options.softcap, above=0, or_none=True),
        logit_scale=arguments.number("logit_scale", options.logit_scale),
        teacher_softcap=arguments.number("teacher.softcap", options.teacher_softcap, above=0, or_none=True),
        teacher_logit_scale=arguments.number("teacher.logit_scale", options.teacher_logit_scale),
    )


def _check(inputs: DistillationInputs, options: DistillationOptions) -> None:
    """Types, dtypes, shapes and devices, and targets on a CPU."""
    x, weight, target, bias, teacher_x, teacher_weight, teacher_bias, teacher_probs, frozen, _ = inputs
    if is_distributed(tuple(inputs)):
        raise TypeError("x, weight and the teacher's tensors must be plain tensors, not DTensors: gather the weights first.")
    arguments.floating("x", x)
    check_width(x, weight, frozen)
    arguments.parameter("weight", weight, (weight.shape,), x, "x's")
    arguments.parameter("bias", bias, (weight.shape[:1],), x, "x's", or_none=True)
    if teacher_x is not None and teacher_weight is not None:
        arguments.floating("teacher.x", teacher_x)
        arguments.shape("teacher.x", teacher_x, (*x.shape[:-1], teacher_x.shape[-1]))
        arguments.parameter(
            "teacher.weight", teacher_weight, ((weight.shape[0], teacher_x.shape[-1]),), teacher_x, "teacher.x's"
        )
        arguments.parameter("teacher.bias", teacher_bias, (weight.shape[:1],), teacher_x, "teacher.x's", or_none=True)
        arguments.device("teacher.x", teacher_x, x, "x's")
    if teacher_probs is not None:
        arguments.shape("teacher_probs", teacher_probs, (*x.shape[:-1], weight.shape[0]))
        arguments.device("teacher_probs", teacher_probs, x, "x's")
        if not teacher_probs.is_floating_point():
            raise TypeError(f"teacher_probs is {teacher_probs.dtype} and must be floating point.")
    if target is None:
        if options.hard_weight:
            raise ValueError(f"target is None and must be given where hard_weight is not 0: it is {options.hard_weight}.")
        return
    arguments.tensor("target", target)
    arguments.dtype("target", target, torch.int64, torch.int32)
    arguments.shape("target", target, x.shape[:-1])
    arguments.device("target", target, x, "x's")
    if options.hard_weight and can_bypass_dispatcher((target,)) and device_for(target.device) is None:
        check_columns("target", target, options.ignore_index, weight.shape[0])
