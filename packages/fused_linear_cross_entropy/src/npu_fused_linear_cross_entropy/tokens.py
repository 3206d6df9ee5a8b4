"""Tokens in plain PyTorch: which of them count, their targets and their weights.

The tokens that count are taken out, and their results put back, where ignored tokens are to take part in no product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from npu_tiling import arguments, collectives, device_for
from npu_tiling.calls import statistics_dtype
from npu_tiling.dispatch import assert_later, can_bypass_dispatcher
from npu_tiling.dtensor import is_distributed
from torch import Tensor

from .call import EachOptions, Options

# Class weights are divided by their mean over the counted rows where fp16 gradients are left unfinished, or by more where
# there are many rows: none is then above this, and dx = g W is within fp16's range if elements of W are at most 8.
MAX_RELATIVE_WEIGHT = 4096.0


def are_counted(target: Tensor, ignore_index: int) -> Tensor:
    """bool, of the targets' shape: not ignored."""
    limits = torch.iinfo(target.dtype)
    if not limits.min <= ignore_index <= limits.max:  # PyTorch would wrap it to another number
        return torch.ones_like(target, dtype=torch.bool)
    return target != ignore_index


def total_weight(weights: Tensor) -> Tensor:
    """The sum of weights, by which "mean" divides: 1 where all are 0, NaN where others add up to 0."""
    total = weights.sum()
    return torch.where(total != 0.0, total, torch.where(weights.any(), torch.nan, 1.0).to(total.dtype))


def typical_size(values: Tensor) -> Tensor:
    """The mean magnitude of the values that are not 0; of more than MAX_RELATIVE_WEIGHT values, their sum over that number.

    So none is above MAX_RELATIVE_WEIGHT times it.
    """
    sizes = values.abs()
    total, count = sizes.sum(), (sizes != 0.0).sum().to(sizes.dtype)
    return torch.where(total > 0.0, total / count.clamp_max(MAX_RELATIVE_WEIGHT), 1.0)


def are_columns(ids: Tensor, first: int, count: int) -> Tensor:
    """bool, of the ids' shape: one of `count` columns from `first` on."""
    return (ids >= first) & (ids < first + count)


def can_be_read(*tensors: Any) -> bool:
    """Whether values of tensors, on the device of the first, can be read: on a CPU, and not while a graph is made."""
    return can_bypass_dispatcher(tensors) and device_for(tensors[0].device) is None


def check_columns(name: str, target: Tensor, options: EachOptions, counted: Tensor | None = None) -> None:
    """Raises IndexError where one that is `counted`, by default any, is neither a column of the vocabulary nor ignored."""
    ignore_index, vocab_size = options.ignore_index, options.vocab_size
    wrong = are_counted(target, ignore_index) & ((target < 0) | (target >= vocab_size))
    if counted is not None:
        wrong = wrong & counted
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        index = ", ".join(map(str, place))
        raise IndexError(
            f"{name}{f'[{index}]' if place else ''} is {target[tuple(place)].item()} and must be from 0 to "
            f"{vocab_size - 1}, or ignore_index, {ignore_index}."
        )


def checked_token_weight(token_weight: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
    """The weights of tokens of that shape in the dtype of the losses, without a gradient."""
    arguments.tensor("token_weight", token_weight)
    if not (token_weight.is_floating_point() or token_weight.dtype == torch.bool):
        raise TypeError(f"token_weight is {token_weight.dtype} and must be floating point or torch.bool.")
    arguments.shape("token_weight", token_weight, shape)
    arguments.device("token_weight", token_weight, x, "x's")
    if is_distributed((x, token_weight)):
        raise ValueError("token_weight must be left out where there are DTensors.")
    return token_weight.detach().to(statistics_dtype(x.dtype))


def divisors(
    token_weight: Tensor, target: Tensor, class_weight: Tensor | None, divisor: Tensor | None, options: Options
) -> Tensor:
    """[...], the divisors of the tokens' losses for the reduction; infinity where a token is ignored.

    Args:
        divisor: replaces the sum of the weights, by which "mean" divides.
    """
    weights = torch.where(are_counted(target, options.ignore_index), token_weight, 0.0)
    total: Tensor | float = 1.0
    if options.reduction == "mean":
        total = weights if class_weight is None else weights * _of_targets(class_weight, target, options).to(weights.dtype)
        total = total.sum().where(total.sum() != 0.0, torch.nan) if divisor is None else divisor.to(weights)
    return torch.where(weights == 0.0, torch.inf, total / weights)


def _of_targets(class_weight: Tensor, target: Tensor, options: Options) -> Tensor:
    """The class weights of the targets; 0 outside the vocabulary."""
    place = target.long() - options.vocab_first
    here = (place >= 0) & (place < class_weight.shape[0])
    chosen = torch.where(here, class_weight[place.clamp(0, class_weight.shape[0] - 1)], 0.0)
    if options.group:
        collectives.sum_(chosen, options.group)
    return chosen


class Counted(NamedTuple):
    """The tokens that count, then tokens of zeros up to the length that was given.

    Attributes:
        rows: int64 [n], where they are among all tokens.
        target: [n]; ignored for zeros.
        zeros: bool [n], which are no tokens.
        place: int64 [tokens], each token's place among the chosen; n where it does not count.
    """

    rows: Tensor
    target: Tensor
    zeros: Tensor
    place: Tensor


def check_counted(counted: int | Tensor | None, target: Tensor, options: EachOptions) -> None:
    """A number of tokens, places of tokens or a mask: otherwise raises TypeError or ValueError."""
    if counted is None:
        return
    if options.sequence_parallel:
        raise ValueError("counted_tokens must be left out where sequence_parallel is True.")
    if is_distributed((target,)):
        raise ValueError("counted_tokens must be left out where there are DTensors.")
    if isinstance(counted, Tensor):
        arguments.dtype("counted_tokens", counted, torch.int64, torch.bool)
        arguments.device("counted_tokens", counted, target, "target's")
        if counted.dtype == torch.bool:
            arguments.shape("counted_tokens", counted, target.shape)
        elif counted.dim() != 1:
            raise ValueError(f"counted_tokens has shape {tuple(counted.shape)} and must have one dimension.")
    else:
        arguments.whole("counted_tokens", counted, least=0)


def listed(counted: Tensor, tokens: int) -> Tensor:
    """bool [tokens]: those of a mask, or those at places [n]; a place outside of the tokens is none of them."""
    if counted.dtype == torch.bool:
        return counted.reshape(-1)
    outside = (counted < 0) | (counted >= tokens)
    places = torch.where(outside, tokens, counted)
    return counted.new_zeros(tokens + 1, dtype=torch.bool).index_fill(0, places, True)[:tokens]


def of_counted_tokens(
    loss: Callable[..., Any],
    x: Tensor,
    target: Tensor,
    options: EachOptions,
    counted: int | Tensor,
    others: Sequence[Tensor | None] = (),
    *,
    must_be_columns: bool = True,
) -> Any:
    """The outputs, a NamedTuple, of `loss` for x [..., H], target [...] and others [..., ...], of the tokens that count.

    On a CPU a wrong `counted` is an error; in a compiled graph it is a RuntimeError. On an accelerator an error would wait
    for the device; so the first token gets a target outside the vocabulary, which makes its loss NaN, and so the mean and
    the sum.

    Args:
        must_be_columns: whether a target that counts and is outside the vocabulary is an error (CPU).

    Raises:
        ValueError: more tokens count than were said (CPU).
        IndexError: a place is outside of the tokens, or a target that counts outside the vocabulary (CPU).
    """
    chosen = _choose(target.long(), counted, options, must_be_columns)
    rows = x.reshape(-1, x.shape[-1]).index_select(0, chosen.rows).masked_fill(chosen.zeros.unsqueeze(1), 0.0)
    dimensions = target.dim()
    outputs = loss(rows, chosen.target, *(_chosen(other, dimensions, chosen) for other in others))

    def put_back(output: Tensor | None, nothing: int) -> Tensor | None:
        if output is None or output.dim() == 0:
            return output
        extended = torch.cat((output, output.new_full((1, *output.shape[1:]), nothing)))
        return extended.index_select(0, chosen.place).view((*target.shape, *output.shape[1:]))

    nothings = {"predicted_tokens": -1, "top_ids": -1}
    named = zip(outputs._fields, outputs, strict=True)
    return type(outputs)(*[put_back(output, nothings.get(name, 0)) for name, output in named])


def _chosen(other: Tensor | None, dimensions: int, chosen: Counted) -> Tensor | None:
    """The rows of a tensor whose first dimensions are tokens; floats of a row that counts nothing are 1."""
    if other is None:
        return None
    rows = other.reshape(-1, *other.shape[dimensions:]).index_select(0, chosen.rows)
    return rows.masked_fill(chosen.zeros.view(-1, *[1] * (rows.dim() - 1)), 1.0) if rows.is_floating_point() else rows


def _choose(target: Tensor, counted: int | Tensor, options: EachOptions, must_be_columns: bool) -> Counted:
    """The tokens of an int64 target [...] that count, in their order; a place that is listed twice counts once."""
    shape, target = target.shape, target.reshape(-1)
    tokens, ignored = target.shape[0], options.ignore_index
    can_ask = can_be_read(target, counted)
    is_wrong: Tensor | None = None
    if not isinstance(counted, Tensor):
        limit = counted
    elif counted.dtype == torch.bool:
        limit = int(counted.sum()) if can_ask else tokens
    else:
        outside = (counted < 0) | (counted >= tokens)
        if can_ask and outside.any():
            first = int(outside.nonzero()[0])
            raise IndexError(f"counted_tokens[{first}] is {int(counted[first])} and must be from 0 to {tokens - 1}.")
        is_wrong, limit = outside.any(), counted.shape[0]
    if isinstance(counted, Tensor):
        target = torch.where(listed(counted, tokens), target, ignored)
    counts = target != ignored
    count = counts.sum()
    if can_ask and count > limit:
        raise ValueError(f"counted_tokens is {limit} and must be at least {int(count)}, the tokens not ignored.")
    if can_ask and must_be_columns:
        check_columns("target", target.view(shape), options)
    is_wrong = count > limit if is_wrong is None else is_wrong | (count > limit)
    if torch.compiler.is_compiling() and device_for(target.device) is None:
        assert_later(~is_wrong, "counted_tokens must be at least the tokens not ignored, and its places among them.")
        is_wrong = torch.zeros_like(is_wrong)
    length = min(max(limit, 1), tokens)  # at least one, where there are any: its loss is NaN where something is wrong
    place = torch.where(counts, counts.cumsum(0) - 1, length).clamp(max=length)
    # Tokens that do not count are written to a last place, which is dropped.
    rows = target.new_zeros(length + 1).scatter(0, place, torch.arange(tokens, device=target.device))[:length]
    order = torch.arange(length, device=target.device)
    zeros = order >= count
    chosen = torch.where(zeros, ignored, target.index_select(0, rows))
    outside_vocabulary = options.vocab_size + (ignored == options.vocab_size)
    return Counted(rows, torch.where((order == 0) & is_wrong, outside_vocabulary, chosen), zeros, place)
