"""The public function of distillation: its arguments are checked, and it calls the operator.

From a teacher's log-probabilities of given columns the loss is composed of `linear_log_probs`.

Experimental: no integration of a trainer calls it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from npu_tiling import arguments
from npu_tiling.calls import statistics_dtype
from npu_tiling.dispatch import is_autocast
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import checks, tokens
from ..call import Distillation, DistillationLoss, DistillationOptions, LogProbs, replaced, whole_shape
from ..checks import Teacher
from ..log_probs import linear_log_probs
from ..operator import DISTILLATION

# Options of a distillation that `linear_log_probs` has too.
_SCORES = ("ignore_index", "softcap", "logit_scale", "accum_dtype", "chunk_tokens", "memory_budget", "sequence_parallel")


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
    process_group: ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    counted_tokens: int | Tensor | None = None,
    token_weight: Tensor | None = None,
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
    beta = 0 and 1 Liger and TRL compute the forward and the reverse divergence, where D above would be 0.

    Arithmetic is fp32, and so is the loss. For "mean" and "sum" the forward computes the gradients: four products in all.
    For "none" the backward computes logits again. The gradient of the logits is rounded to x's dtype before it is
    multiplied by x and the weight.

    A target outside the vocabulary that is not `ignore_index`: as for `fused_linear_cross_entropy`, where hard_weight is not
    0; else it only counts.

    Args:
        x, weight, bias: the student's, as for `fused_linear_cross_entropy`.
        target: [...], int64, int32 or uint8: the hard labels, or which tokens are ignored; None: all count, and hard_weight
            is 0.
        teacher: the teacher's head, a `Teacher` or a tuple of its fields in their order. In no form has it a gradient.
        teacher_probs: [..., V], floating point, in its place: q for T = 1, divided by its sum. With a temperature q is
            softmax(log(teacher_probs) / T). For "reverse_kl" a probability of 0 counts as the smallest number of fp32,
            1.2e-38, unless the student's bias rules the column out too.
        teacher_top_k: ids [..., K], int64 or int32, and q's log-probabilities of them [..., K], floating point, in its
            place: D = sum over the K columns of q log(q / p), for "forward_kl" alone. q is taken as it is, at any
            temperature, and not divided by its sum; an id that is `ignore_index`, or whose q is 0, counts nothing. The
            backward computes logits again, whatever the reduction.
        divergence: one of the above.
        beta: above 0 and below 1; the share of the teacher in m.
        temperature: T, above 0. The hard labels' cross entropy is that of T = 1.
        soft_weight, hard_weight: factors of the divergence and of the cross entropy.
        ignore_index: tokens with this target have loss 0 and gradient 0, and "mean" does not count them; those of the
            teacher may hold anything. If all have it, the loss is 0. Where such a row of x holds NaN or inf, the weight's
            gradient is NaN.
        reduction, softcap, logit_scale, accum_dtype, chunk_tokens: as there.
        return_parts: also return D and the cross entropy by themselves.
        memory_budget: bytes for the logits of both and for sums, without inputs and gradients; None for a default.
        process_group, vocab_range, vocab_size, sequence_parallel: as for `fused_linear_cross_entropy`. The teacher's weight,
            bias and probabilities are of this rank's columns too, and teacher.x of its tokens. PyTorch's operators compute
            the divergence of each chunk then, not a kernel.
        counted_tokens: as there. A target outside the vocabulary then makes its loss NaN, whatever hard_weight is.
        token_weight: [...], floating point or bool: a factor of each token's row; "mean" divides by their sum. No gradient.
        weight_grad: [V, H], as for `fused_linear_cross_entropy`.
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
    given = checks.checked_teacher(teacher, teacher_probs, teacher_top_k)
    part = checks.Part(process_group, vocab_range, vocab_size)
    options = DistillationOptions(
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
        accum_dtype=accum_dtype,
        chunk_tokens=chunk_tokens,
        memory_budget=memory_budget,
        sequence_parallel=sequence_parallel,
        vocab_size=weight.shape[0] if isinstance(weight, Tensor) and weight.dim() and not weight.is_nested else 0,
    )
    is_plain = token_weight is None and counted_tokens is None and weight_grad is None and adapter is None
    is_whole = process_group is None and vocab_range is None and vocab_size is None
    if given is not None and is_plain and is_whole and not (isinstance(x, Tensor) and is_autocast(x)):
        heads = (given.x, given.weight, given.bias)
        call = Distillation(x, weight, target, bias, *heads, None, None, None, None, options)
        known = DISTILLATION.forward.if_checked(checks.check_distillation, call)
        if known is not None:
            return DistillationLoss(*known[: DISTILLATION.outputs]) if return_parts else known[0]
    target = checks.as_labels(target)
    options = replaced(options, accum_dtype=checks.check_weight_grad(weight_grad, weight, accum_dtype))
    options = checks.checked_options(weight, part, options)
    each = None
    if token_weight is not None:
        arguments.tensor("x", x)
        each = tokens.checked_token_weight(token_weight, x, whole_shape(x, options))

    def run(
        x: Tensor,
        target: Tensor | None,
        u: Tensor | None,
        each: Tensor | None,
        teacher_x: Tensor | None,
        probs: Tensor | None,
        ids: Tensor | None,
        log_q: Tensor | None,
    ) -> DistillationLoss:
        of_adapter = adapter if u is None or adapter is None else (u, adapter[1])
        if ids is not None and log_q is not None:
            more = {"weight_grad": weight_grad, "adapter": of_adapter}
            return DistillationLoss(*distill_top_k(x, weight, target, bias, ids, log_q, each, options, part, **more))
        x, own_weight, own_bias, frozen = checks.adapted(x, weight, bias, of_adapter, weight_grad)
        heads: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if teacher_x is not None and given is not None:
            heads = checks.autocast(teacher_x, given.weight.detach(), None if given.bias is None else given.bias.detach())
        student = (x, own_weight, target, own_bias)
        call = Distillation(*student, *heads, probs, each, frozen, weight_grad, options)
        checks.check_distillation(call)
        return DistillationLoss(*DISTILLATION.forward(call, checks.check_distillation)[: DISTILLATION.outputs])

    u = None if adapter is None else arguments.pair("adapter", adapter, "(u, b)")[0]
    probs = None if teacher_probs is None else teacher_probs.detach()
    others = (u, each, None if given is None else given.x.detach(), probs, *(teacher_top_k or (None, None)))
    if counted_tokens is None:
        found = run(x, target, *others)
    else:
        found = _of_counted(run, x, target, others, counted_tokens, options)
    return found if return_parts else found.loss


def _of_counted(
    run: Callable[..., DistillationLoss],
    x: Tensor,
    target: Tensor | None,
    others: Sequence[Tensor | None],
    counted: int | Tensor,
    options: DistillationOptions,
) -> DistillationLoss:
    if target is None:
        raise ValueError("counted_tokens must be left out where target is None.")
    tokens.check_counted(counted, target, options)
    exact = statistics_dtype(x.dtype)

    def run_or_nan(
        x: Tensor, target: Tensor, u: Tensor | None, each: Tensor | None, *of_tokens: Tensor | None
    ) -> DistillationLoss:
        """A wrong count is noted as a target outside the vocabulary. Without a hard weight none is read: NaN says it."""
        wrong = tokens.are_counted(target, options.ignore_index) & ~tokens.are_columns(target, 0, options.vocab_size)
        return run(x, target, u, torch.where(wrong, torch.nan, 1.0 if each is None else each).to(exact), *of_tokens)

    found: DistillationLoss = tokens.of_counted_tokens(
        run_or_nan, x, target, options, counted, others, must_be_columns=options.hard_weight != 0.0
    )
    return found


def distill_top_k(
    x: Tensor,
    weight: Tensor,
    target: Tensor | None,
    bias: Tensor | None,
    ids: Tensor,
    log_q: Tensor,
    each: Tensor | None,
    options: DistillationOptions,
    part: checks.Part,
    **scored: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss and its two parts; see `linear_distillation_loss`. `scored`: more arguments of `linear_log_probs`."""
    if options.divergence != "forward_kl":
        raise ValueError(f"divergence is {options.divergence!r} and must be 'forward_kl' where teacher_top_k is given.")
    ignored = options.ignore_index
    arguments.tensor("x", x)
    arguments.dtype("teacher_top_k[0]", ids, torch.int64, torch.int32)
    if not ids.dim():
        raise ValueError("teacher_top_k[0] has shape () and must have shape (..., K).")
    if not log_q.is_floating_point():
        raise TypeError(f"teacher_top_k[1] is {log_q.dtype} and must be floating point.")
    arguments.shape("teacher_top_k[0]", ids, (*whole_shape(x, options), *ids.shape[-1:]))
    arguments.shape("teacher_top_k[1]", log_q, ids.shape)
    checks.check_hard_weight(target, options)
    live = tokens.are_counted(ids, ignored) & (log_q != -torch.inf)
    if target is None:
        counted = torch.ones(ids.shape[:-1], dtype=torch.bool, device=ids.device)
    else:
        checks.check_target(target, x, options)
        counted = tokens.are_counted(target, ignored)
        live = live & counted.unsqueeze(-1)
        each = None if each is None else torch.where(counted, each, 0.0)
    ids, log_q = torch.where(live, ids.long(), ignored), torch.where(live, log_q.detach(), -torch.inf)
    if tokens.can_be_read(ids):
        tokens.check_columns("teacher_top_k[0]", ids, options)
    scores: dict[str, Any] = {name: getattr(options, name) for name in _SCORES} | {
        **scored,
        **dict(zip(checks.Part._fields, part, strict=True)),
    }
    is_shared = options.hard_weight and options.temperature == 1.0
    found = linear_log_probs(
        x, weight, target if is_shared else None, bias, ids=ids, temperature=options.temperature, **scores
    )
    assert isinstance(found, LogProbs) and found.ids_log_probs is not None
    log_p = found.ids_log_probs
    log_q = log_q.to(log_p.dtype)
    q = log_q.exp()
    soft = torch.where(q == 0.0, 0.0, q * (log_q - log_p)).sum(-1)
    hard = None
    if options.hard_weight:
        of_target = found.log_probs if is_shared else linear_log_probs(x, weight, target, bias, **scores)
        assert isinstance(of_target, Tensor)
        hard = -of_target
    divisor: Tensor | int = 1
    if options.reduction == "mean":
        divisor = counted.sum().clamp_min(1) if each is None else tokens.total_weight(each)

    def reduced(rows: Tensor) -> Tensor:
        rows = torch.where(counted, rows if each is None else rows * each, 0.0)
        return rows if options.reduction == "none" else rows.sum() / divisor

    loss = reduced(options.soft_weight * soft if hard is None else options.soft_weight * soft + options.hard_weight * hard)
    return loss, reduced(soft.detach()), None if hard is None else reduced(hard.detach())
