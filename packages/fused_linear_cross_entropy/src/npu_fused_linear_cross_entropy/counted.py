"""A loss whose ignored tokens take part in no product: the tokens that count are taken out, and their results put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from npu_tiling import device_for
from npu_tiling.pytorch import arguments
from torch import Tensor

from .options import Options


class Counted(NamedTuple):
    """Tokens that count.

    Attributes:
        rows: int64 [n], where they are among all tokens.
        target: [n]; ignored where there are fewer.
        place: int64 [tokens], each token's among those; n where it does not count.
    """

    rows: Tensor
    target: Tensor
    place: Tensor


def check_counted(counted: int | Tensor | None, target: Tensor) -> None:
    """Raises TypeError or ValueError where this is neither a number of tokens nor their places."""
    if counted is None:
        return
    if isinstance(counted, Tensor):
        arguments.dtype("counted_tokens", counted, torch.int64)
        arguments.device("counted_tokens", counted, target, "target's")
        if counted.dim() != 1:
            raise ValueError(f"counted_tokens has shape {tuple(counted.shape)} and must have one dimension.")
    else:
        arguments.whole("counted_tokens", counted, least=0)


def of_counted_tokens(
    loss: Callable[[Tensor, Tensor], Any], x: Tensor, target: Tensor, options: Options, counted: int | Tensor
) -> Any:
    """The outputs, a NamedTuple, of `loss` for x [..., H] and target [...]; it is called with the tokens that count.

    Raises:
        ValueError: more tokens count than were said (CPU).
    """
    flat = target.reshape(-1)
    chosen = _chosen(flat, counted) if isinstance(counted, Tensor) else _first(flat, counted, options)
    outputs = loss(x.reshape(-1, x.shape[-1]).index_select(0, chosen.rows), chosen.target)

    def put_back(output: Tensor | None, nothing: int) -> Tensor | None:
        if output is None or output.dim() == 0:
            return output
        found = torch.cat((output, output.new_full((1,), nothing)))
        return found.index_select(0, chosen.place).view(target.shape)

    nothings = {"predicted_tokens": -1}
    changed = {name: put_back(own, nothings.get(name, 0)) for name, own in outputs._asdict().items()}
    return outputs._replace(**changed)


def _chosen(target: Tensor, rows: Tensor) -> Counted:
    """The tokens at given places."""
    order = torch.arange(rows.shape[0], device=target.device)
    place = torch.full_like(target, rows.shape[0], dtype=torch.int64).index_copy(0, rows, order)
    return Counted(rows, target.index_select(0, rows), place)


def _first(target: Tensor, most: int, options: Options) -> Counted:
    """The first `most` tokens that are not ignored; nothing waits for the device."""
    most = min(most, target.shape[0])
    counted = target != options.ignore_index
    place = counted.cumsum(0) - 1
    if device_for(target.device) is None and not torch.compiler.is_compiling() and target.numel() and place[-1] >= most:
        raise ValueError(f"counted_tokens is {most} and must be at least {int(place[-1]) + 1}, the tokens not ignored.")
    # Tokens that are ignored, or beyond, are written to a last place that is dropped.
    rows = target.new_zeros(most + 1, dtype=torch.int64)
    place = torch.where(counted, place, most).clamp(max=most)
    rows = rows.scatter(0, place, torch.arange(target.shape[0], device=target.device))[:most]
    count, order = counted.sum(), torch.arange(most, device=target.device)
    own = torch.where(order < count, target.index_select(0, rows), options.ignore_index)
    # More than were said: a target outside the vocabulary makes the loss NaN.
    outside = options.vocab_size + (options.ignore_index == options.vocab_size)
    own = torch.where((order == 0) & (count > most), outside, own)
    return Counted(rows, own, place)
