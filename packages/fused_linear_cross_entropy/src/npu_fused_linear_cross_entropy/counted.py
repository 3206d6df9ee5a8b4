"""A loss whose ignored tokens take part in no product: the tokens that count are taken out, and their results put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from npu_tiling.pytorch import arguments
from npu_tiling.pytorch.sharding import is_distributed
from torch import Tensor

from .compute import can_be_read, check_columns
from .options import EachOptions


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

    On a CPU a wrong `counted` is an error. On an accelerator an error would wait for the device; so the first token gets a
    target outside the vocabulary, which makes its loss NaN, and so the mean and the sum.

    Args:
        must_be_columns: whether a target that counts and is outside the vocabulary is an error (CPU).

    Raises:
        ValueError: more tokens count than were said (CPU).
        IndexError: a place is outside of the tokens, or a target that counts outside the vocabulary (CPU).
    """
    chosen = _choose(target.long(), counted, options, must_be_columns)
    rows = x.reshape(-1, x.shape[-1]).index_select(0, chosen.rows).masked_fill_(chosen.zeros.unsqueeze(1), 0.0)
    dimensions = target.dim()
    chosen_others = (other if other is None else _rows(other, dimensions).index_select(0, chosen.rows) for other in others)
    outputs = loss(rows, chosen.target, *chosen_others)

    def put_back(output: Tensor | None, nothing: int) -> Tensor | None:
        if output is None or output.dim() == 0:
            return output
        extended = torch.cat((output, output.new_full((1, *output.shape[1:]), nothing)))
        return extended.index_select(0, chosen.place).view((*target.shape, *output.shape[1:]))

    nothings = {"predicted_tokens": -1, "top_ids": -1}
    changed = {name: put_back(output, nothings.get(name, 0)) for name, output in outputs._asdict().items()}
    return outputs._replace(**changed)


def _rows(tensor: Tensor, dimensions: int) -> Tensor:
    """The tensor with the dimensions of its tokens flattened."""
    return tensor.reshape(-1, *tensor.shape[dimensions:])


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
    length = min(max(limit, 1), tokens)  # at least one, where there are any: its loss is NaN where something is wrong
    place = torch.where(counts, counts.cumsum(0) - 1, length).clamp(max=length)
    # Tokens that do not count are written to a last place, which is dropped.
    rows = target.new_zeros(length + 1).scatter(0, place, torch.arange(tokens, device=target.device))[:length]
    order = torch.arange(length, device=target.device)
    zeros = order >= count
    chosen = torch.where(zeros, ignored, target.index_select(0, rows))
    outside_vocabulary = options.vocab_size + (ignored == options.vocab_size)
    return Counted(rows, torch.where((order == 0) & is_wrong, outside_vocabulary, chosen), zeros, place)
