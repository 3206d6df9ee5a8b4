"""Log-probabilities of tokens and more of their distributions, as policy-gradient and preference training use them."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from npu_tiling import arguments
from npu_tiling.calls import statistics_dtype
from npu_tiling.dispatch import holds, is_autocast, is_certain, is_shape
from npu_tiling.dtensor import is_distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from .api import loss_if_checked, run_loss
from .call import Distributions, Forward, LogProbs, Options, replaced, whole_shape
from .checks import Part, adapted, as_labels, check_loss, check_weight_grad, checked_options
from .distributions import DISTRIBUTIONS
from .tokens import are_counted, can_be_read, check_columns, check_counted, listed, of_counted_tokens

_INVARIANT_TOKENS = 512  # of a chunk, where its length must not follow from how many tokens there are


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    ids: Tensor | None = None,
    kept: Tensor | None = None,
    top_k: int | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    return_square_sum: bool = False,
    return_mean_logit: bool = False,
    return_is_top: bool = False,
    batch_invariant: bool = False,
    accum_dtype: torch.dtype | None = None,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    vocab_parts: int = 1,
    sequence_parallel: bool = False,
    counted_tokens: int | Tensor | None = None,
    weight_grad: Tensor | None = None,
    adapter: tuple[Tensor, Tensor] | None = None,
) -> Tensor | LogProbs:
    """log softmax(z)[target] of every token, and more of its distribution, without the logits z of all tokens in memory.

        t = logit_scale (x weight^T + bias)     z = softcap tanh(t / softcap) / temperature     L = log sum exp z
        log_probs = z_y - L    p = exp(z - L)    entropy = L - sum p z    square_sum = sum p^2    mean_logit = sum z / V

    All but `top_ids` and `is_top` are differentiable, with respect to a tensor of temperatures too; the backward computes
    the logits again. A token with a logit of infinity has NaN in all of them.

    Equal calls give equal bits. The bits of one token depend on how many tokens there are. With `batch_invariant` they do
    not: every product is [chunk_tokens, H] @ [H, V], padded with rows of zeros. On one kind of device, with one release of
    its libraries, a token then has the same bits among any tokens, in any place; with `vocab_parts` on any number of ranks
    that share the vocabulary too. Not promised: gradients; a `process_group` without `vocab_parts`; CPUs.

    Args:
        x, weight, bias, logit_scale: as for `fused_linear_cross_entropy`.
        target: [...], int64, int32 or uint8; None where only other outputs are asked for.
        ids: [..., K], int64 or int32: return the log-probabilities of these columns too. Of one that is `ignore_index` it
            is 0, without a gradient. A column may be named more than once. Tokens that do not count may have any.
        kept: [..., K], int64 or int32: the columns that a sampler kept (top-p, top-k), each once, filled up with
            `ignore_index`. log_probs is then z_y - log sum_kept exp z, renormalised over them; of a token without any it
            stays as it is. The target should be one of them. Other outputs are of the whole vocabulary.
        top_k: return so many of the largest log-probabilities of each token, and their columns. Which of equal logits come
            first is not said.
        temperature: a number above 0, or a tensor of such numbers that expands to [...], x's dtype or fp32. The
            log-probabilities of a token whose own number is not above 0 are NaN: nothing waits for a device to raise an
            error. Tokens that do not count may have any.
        ignore_index: all outputs of tokens with this target are 0, and have no gradient; their top_ids are -1.
        softcap: c, up to 10000 max(1, |logit_scale|), for logits c tanh(t / c) / temperature; None for no cap.
        return_entropy, return_square_sum, return_mean_logit, return_is_top: return these too.
        batch_invariant: as above. Costs a copy of x, and the time of at least `chunk_tokens` tokens, 512 by default.
        vocab_parts: with `batch_invariant`, P equal parts of the whole vocabulary, P a multiple of the number of ranks.
            Products are [chunk_tokens, H] @ [H, V / P], and statistics of parts are joined in their order. Of
            log-probabilities of targets and entropies alone.
        accum_dtype, chunk_tokens, memory_budget, process_group, vocab_range, vocab_size, sequence_parallel, counted_tokens:
            as there; neither of the last two with `batch_invariant`. A budget holds a chunk's
            logits, not the memory of PyTorch's topk.
        weight_grad, adapter: as there. `weight_grad` takes no more products.

    Returns:
        fp32 [...] (fp64 for fp64 input), the log-probabilities of the target; where anything else is asked for, `LogProbs`.

    Raises:
        TypeError: an argument has a type or dtype that is not supported.
        ValueError: shapes or devices do not match, or an option is out of range.
        IndexError: a target or an id is outside the vocabulary (CPU). On an accelerator its log-probability is NaN.

    Source: torch.nn.functional.cross_entropy, negated; batch invariance: He et al., "Defeating Nondeterminism in LLM
    Inference", Thinking Machines Lab, 2025; `kept`: DeepSeek-V3.2, 2025.
    """
    options = Options(
        ignore_index=ignore_index,
        reduction="none",
        softcap=softcap,
        logit_scale=logit_scale,
        return_entropy=return_entropy,
        accum_dtype=accum_dtype,
        chunk_tokens=chunk_tokens,
        memory_budget=memory_budget,
        sequence_parallel=sequence_parallel,
        vocab_size=weight.shape[0] if isinstance(weight, Tensor) and weight.dim() and not weight.is_nested else 0,
    )
    is_plain = target is not None and ids is None and counted_tokens is None and weight_grad is None and adapter is None
    is_plain = is_plain and kept is None and top_k is None and type(temperature) is float and temperature == 1.0
    is_plain = is_plain and not (return_square_sum or return_mean_logit or return_is_top or batch_invariant)
    is_whole = process_group is None and vocab_range is None and vocab_size is None
    if is_plain and is_whole and not (isinstance(x, Tensor) and is_autocast(x)):
        known = loss_if_checked(x, weight, target, bias, None, options)
        if known is not None:
            loss, *_, entropy = known
            return LogProbs(-loss, entropy) if return_entropy else -loss
    arguments.whole("top_k", top_k, least=1, or_none=True)
    flags = {"return_square_sum": return_square_sum, "return_mean_logit": return_mean_logit, "return_is_top": return_is_top}
    arguments.flags(**flags, batch_invariant=batch_invariant)
    asked = Asked(top_k or 0, return_entropy, return_square_sum, return_mean_logit, return_is_top)
    factor = 1.0 if isinstance(temperature, Tensor) else 1.0 / arguments.number("temperature", temperature, above=0)
    softcap = arguments.number("softcap", softcap, above=0, or_none=True)
    options = replaced(
        options,
        softcap=None if softcap is None else softcap * factor,
        logit_scale=arguments.number("logit_scale", logit_scale) * factor,
        accum_dtype=check_weight_grad(weight_grad, weight, accum_dtype),
        chunk_tokens=_INVARIANT_TOKENS if batch_invariant and chunk_tokens is None else chunk_tokens,
        vocab_parts=arguments.whole("vocab_parts", vocab_parts, least=1),
    )
    options = checked_options(weight, Part(process_group, vocab_range, vocab_size), options)
    if asked.top_k > options.vocab_size:
        raise ValueError(f"top_k is {top_k} and must be at most {options.vocab_size}, the size of the vocabulary.")
    asks_more = ids is not None or any(asked)
    if target is None and (return_is_top or counted_tokens is not None or not asks_more):
        raise ValueError("target is None and must be a tensor, unless ids or outputs that need no target are asked for.")
    if batch_invariant and (counted_tokens is not None or sequence_parallel):
        raise ValueError("counted_tokens and sequence_parallel must be left out where batch_invariant is True.")
    x, weight, bias, frozen = adapted(x, weight, bias, adapter, weight_grad)
    shape = torch.Size(whole_shape(x, options))
    has_target = target is not None
    counts = int(ignore_index == 0)  # a target that is not ignored
    targets = torch.full(shape, counts, device=x.device) if target is None else as_labels(target)
    check_loss(x, weight, targets, bias, None, frozen, options)
    check_counted(counted_tokens, targets, options)
    for name, columns in (("ids", ids), ("kept", kept)):
        _check_ids(name, columns, x, targets, counted_tokens, options)
    has_ids = ids is not None
    if kept is not None:
        if target is None:
            raise ValueError("kept must be left out where target is None.")
        ids = kept if ids is None else torch.cat((ids.long(), kept.long()), -1)
    more_than_a_loss = (asked.top_k, asked.square_sum, asked.mean_logit, asked.is_top)
    is_loss = has_target and ids is None and not isinstance(temperature, Tensor) and not any(more_than_a_loss)
    if vocab_parts > 1:
        _check_parts(weight, batch_invariant and is_loss, options)
    if has_target and counted_tokens is None and (batch_invariant or not is_loss) and can_be_read(targets):
        check_columns("target", targets, options)
    if is_distributed((x, weight, target, bias)) and (batch_invariant or not is_loss):
        raise ValueError("batch_invariant must be False, and entropies alone asked for, where there are DTensors.")
    rates = None
    if isinstance(temperature, Tensor):
        counted = are_counted(targets, ignore_index) if has_target else None
        if counted is not None and isinstance(counted_tokens, Tensor):
            counted = counted & listed(counted_tokens, counted.numel()).view(shape)
        rates = _rates(temperature, x, shape, counted)

    layer = Forward(x, weight, targets, bias, None, None, frozen, weight_grad, options)
    score = partial(_score, layer, asked, has_target=has_target, is_loss=is_loss)
    if counted_tokens is not None:
        found: LogProbs = of_counted_tokens(score, x, targets, options, counted_tokens, (ids, rates))
    elif is_loss and not batch_invariant:
        found = score(x, targets, None, None)
    else:
        n_padding = -targets.numel() % options.chunk_tokens if batch_invariant and options.chunk_tokens else 0

        def rows(tensor: Tensor, value: int) -> Tensor:
            flat = tensor.reshape(-1, *tensor.shape[len(shape) :])
            # Copied even without padding: a framework chooses a product by the address and strides too.
            return torch.cat((flat, flat.new_full((n_padding, *flat.shape[1:]), value))) if batch_invariant else flat

        chosen = (None if ids is None else rows(ids, ignore_index), None if rates is None else rows(rates, 1))
        of_rows = score(rows(x, 0), rows(targets.long(), ignore_index), *chosen)
        tokens = targets.numel()
        found = LogProbs(*[None if one is None else one[:tokens].view((*shape, *one.shape[1:])) for one in of_rows])
    if kept is not None:
        found = _renormalised(found, kept, has_ids, are_counted(targets, ignore_index), ignore_index)
    if asks_more:
        return found
    assert found.log_probs is not None
    return found.log_probs


def _score(
    layer: Forward,
    asked: Asked,
    x: Tensor,
    target: Tensor,
    ids: Tensor | None,
    rates: Tensor | None,
    *,
    has_target: bool,
    is_loss: bool,
) -> LogProbs:
    """The outputs of tokens x with this layer."""
    options = layer.options
    if is_loss:
        found = run_loss(replaced(layer, x=x, target=target))
        return LogProbs(-found.loss, found.entropy)
    columns = _columns(target if has_target else None, ids, options.ignore_index)
    of_layer = (layer.frozen, layer.weight_grad, replaced(options, return_entropy=False))
    call = Distributions(x, layer.weight, layer.bias, columns, rates, *of_layer, asked.top_k, asked.is_top)
    return asked_outputs(DISTRIBUTIONS(call), target, has_target, ids is not None, asked, options)


class Asked(NamedTuple):
    """Which optional outputs are asked for."""

    top_k: int
    entropy: bool
    square_sum: bool
    mean_logit: bool
    is_top: bool


def asked_outputs(
    outputs: tuple[Any, ...], target: Tensor, has_target: bool, has_ids: bool, asked: Asked, options: Options
) -> LogProbs:
    """The outputs that were asked for, of tokens [tokens] with their targets."""
    counted = are_counted(target, options.ignore_index)
    every = counted.unsqueeze(1)
    _, _, entropy, square_sum, mean_logit, of_ids, of_top, top_ids, first = outputs
    named = of_ids[:, int(has_target) :] if has_ids else None
    return LogProbs(
        log_probs=of_ids[:, 0] if has_target and of_ids is not None else None,
        entropy=torch.where(counted, entropy, 0.0) if asked.entropy else None,
        ids_log_probs=None if named is None else torch.where(every, named, 0.0),
        top_log_probs=None if of_top is None else torch.where(every, of_top, 0.0),
        top_ids=None if top_ids is None else torch.where(every, top_ids, -1),
        square_sum=torch.where(counted, square_sum, 0.0) if asked.square_sum else None,
        mean_logit=torch.where(counted, mean_logit, 0.0) if asked.mean_logit else None,
        is_top=None if first is None else (first == target) & counted,
    )


def _check_parts(weight: Tensor, is_invariant_loss: bool, options: Options) -> None:
    """Each rank has whole parts of the vocabulary, in order."""
    parts, size, rows = options.vocab_parts, options.vocab_size, weight.shape[0]
    if not is_invariant_loss:
        alone = "log-probabilities and entropies alone are asked for"
        raise ValueError(f"vocab_parts must be 1 unless batch_invariant is True and {alone}.")
    if size % parts or rows % (size // parts) or options.vocab_first % (size // parts):
        some = f"parts of which weight's {rows} rows are some"
        raise ValueError(f"vocab_parts is {parts} and must divide the vocabulary, {size}, into {some}.")


def _rates(temperature: Tensor, x: Tensor, shape: torch.Size, counted: Tensor | None) -> Tensor:
    """1 / temperature of each token [...]: 1 where it does not count, else inf below 0, so that what comes of it is NaN."""
    arguments.floating("x", x)
    arguments.floating("temperature", temperature)
    arguments.parameter_dtype("temperature", temperature, x, "x's")
    sizes = zip(reversed(temperature.shape), reversed(shape), strict=False)
    if temperature.dim() > len(shape) or not all(is_certain(size == 1) or holds(size == wanted) for size, wanted in sizes):
        arguments.shape("temperature", temperature, shape)
    arguments.device("temperature", temperature, x, "x's")
    temperature = temperature.to(statistics_dtype(x.dtype)).clamp(min=0).expand(shape)
    return 1.0 / (temperature if counted is None else torch.where(counted, temperature, 1.0))


def _renormalised(found: LogProbs, kept: Tensor, has_ids: bool, counted: Tensor, ignore_index: int) -> LogProbs:
    """Log-probabilities among the kept columns, which are the last of the ids; `has_ids`: behind other ids."""
    assert found.log_probs is not None and found.ids_log_probs is not None
    named = found.ids_log_probs
    others = named[..., : named.shape[-1] - kept.shape[-1]] if has_ids else None
    among = named[..., named.shape[-1] - kept.shape[-1] :] if has_ids else named
    is_id = kept != ignore_index
    has_kept = is_id.any(-1) & counted
    among = among.masked_fill(~is_id & has_kept.unsqueeze(-1), -torch.inf)  # finite where none are kept
    largest = among.detach().amax(-1)  # torch.logsumexp asks whether there are tokens
    largest = torch.where(largest.isfinite(), largest, 0.0)
    total = (among - largest.unsqueeze(-1)).exp().sum(-1).log() + largest
    log_probs = found.log_probs - torch.where(has_kept, total, 0.0)
    return replaced(found, log_probs=log_probs, ids_log_probs=others)


def _check_ids(
    name: str, ids: Tensor | None, x: Tensor, target: Tensor, counted: int | Tensor | None, options: Options
) -> None:
    """Those of tokens that do not count may be anything."""
    arguments.tensor(name, ids, or_none=True)
    if ids is None:
        return
    arguments.dtype(name, ids, torch.int64, torch.int32)
    shape = target.shape
    if ids.dim() != x.dim() or not is_shape(ids.shape[:-1], shape) or not holds(ids.shape[-1] >= 1):
        wanted = ", ".join([*map(str, shape), "K"])
        raise ValueError(f"{name} has shape {tuple(ids.shape)} and must have shape ({wanted}), K at least 1.")
    arguments.device(name, ids, x, "x's")
    if can_be_read(ids, target, counted):
        tokens = are_counted(target, options.ignore_index)
        if isinstance(counted, Tensor):
            tokens = tokens & listed(counted, target.numel()).view(shape)
        check_columns(name, ids, options, tokens.unsqueeze(-1))


def _columns(target: Tensor | None, ids: Tensor | None, ignore_index: int) -> Tensor | None:
    """[tokens, ...]: the target's column, then those of the ids; all are ignored where the target is."""
    ids = None if ids is None else ids.long()
    if target is None:
        return ids
    column = target.unsqueeze(1)
    return column if ids is None else torch.cat((column, torch.where(column == ignore_index, ignore_index, ids)), 1)
