"""Columns of the vocabulary that are named for each row, and the largest ones, of chunks of logits; on every device.

PyTorch's gather, scatter, max and topk. Where a row names a column twice both places hold the same gradient, the sum, so
that the order in which they are scattered does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PAIRS = 2**24  # of ids that are compared at a time


def are_columns(ids: Tensor, first: int, count: int) -> Tensor:
    """bool, of the ids' shape: one of `count` columns from `first` on."""
    return (ids >= first) & (ids < first + count)


def gather(logits: Tensor, ids: Tensor, first: int) -> Tensor:
    """The logits [rows, ids] of ids in a chunk [rows, columns] whose first column is `first`; 0 for others."""
    count = logits.shape[1]
    chosen = logits.gather(1, (ids - first).clamp(0, count - 1))
    return torch.where(are_columns(ids, first, count), chosen, 0.0)


def scatter(gradient: Tensor, ids: Tensor, values: Tensor, first: int) -> None:
    """Writes values [rows, ids] to the ids' columns of a chunk [rows, columns]; equal ids have equal values."""
    count = gradient.shape[1]
    here, places = are_columns(ids, first, count), (ids - first).clamp(0, count - 1)
    # An id outside the chunk repeats the write of an id inside, or writes back the row's first column.
    some, which = here.to(torch.float32).max(1, keepdim=True)
    spare = torch.where(some > 0, places.gather(1, which), 0)
    kept = torch.where(some > 0, values.gather(1, which), gradient[:, :1])
    gradient.scatter_(1, torch.where(here, places, spare), torch.where(here, values, kept).to(gradient.dtype))


def sums_of_equals(ids: Tensor, values: Tensor) -> Tensor:
    """[rows, ids]: for each id, the sum of the values of all equal ids in its row."""
    rows, count = ids.shape
    if count == 1:
        return values
    step = max(1, _PAIRS // count**2)
    found = [
        torch.where(some.unsqueeze(2) == some.unsqueeze(1), theirs.unsqueeze(1), 0.0).sum(2)
        for some, theirs in zip(ids.split(step), values.split(step), strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def largest(values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row, the largest first, at most `count`, and their ids; all [rows, ...]."""
    values, places = values.topk(min(count, values.shape[1]), dim=1)
    return values, ids.gather(1, places)


def first_largest(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of parts [parts, rows] in ascending order of ids, the largest value of each row and the first of its ids."""
    top, part = values.max(0, keepdim=True)
    return top.squeeze(0), ids.gather(0, part).squeeze(0)
