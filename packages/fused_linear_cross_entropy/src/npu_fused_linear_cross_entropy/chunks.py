"""Chunks of tokens and of the vocabulary, and their logits in memory. splitting.py decides where chunks end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

_Tensor = TypeVar("_Tensor", "Tensor", "Tensor | None")
_PITCH_UNIT = 16  # elements that the pitch of a row of logits is a multiple of: a multiple of 32 bytes in every dtype


class Layout(Enum):
    """How a chunk takes the vocabulary."""

    ROWS = "whole rows of logits"
    KEPT = "some columns at a time, whose logits are kept in the memory of the weight's gradient"
    COLUMNS = "some columns at a time, whose logits are computed twice"


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Where chunks end, and how the vocabulary is taken.

    Attributes:
        tokens: chunks of tokens.
        columns: chunks of the vocabulary; one if whole rows of logits are in memory.
        kept: parts of the vocabulary, of a few chunks each, whose logits are kept in those rows of the weight's gradient;
            empty if logits are not kept.
        why: the rule that decided.
    """

    tokens: tuple[slice, ...]
    columns: tuple[slice, ...]
    kept: tuple[slice, ...] = ()
    why: str

    @property
    def layout(self) -> Layout:
        """How the vocabulary is taken."""
        if self.kept:
            return Layout.KEPT
        return Layout.COLUMNS if len(self.columns) > 1 else Layout.ROWS

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens and columns of the largest chunk."""
        return tuple(max((part.stop - part.start for part in parts), default=0) for parts in (self.tokens, self.columns))  # type: ignore[return-value]


class Chunk(NamedTuple):
    """Logits that are in memory.

    Attributes:
        logits: [rows, columns].
        columns: which of the weight's rows they belong to.
        target: int32 [rows], a column of the whole vocabulary, or negative.
        first: the column of the whole vocabulary that the first one is.
    """

    logits: Tensor
    columns: slice
    target: Tensor
    first: int


class DistilledChunk(NamedTuple):
    """Logits of a student and of its teacher, and memory for the losses and the gradient.

    Attributes:
        student, teacher: [rows, V], raw products.
        target: int32 [rows], columns of the whole vocabulary, negative: none; None where the hard weight is 0.
        factors: [rows], of the gradient, which is 0 where a factor is.
        gradient: [rows, V], is written: of the student's raw products, whose memory it may share. None: there is none.
        losses: [2, rows], is written: divergences, and cross entropies of the targets, these if there is a hard weight.
    """

    student: Tensor
    teacher: Tensor
    target: Tensor | None
    factors: Tensor | None
    gradient: Tensor | None
    losses: Tensor


def part(tensor: _Tensor, where: slice, dimension: int = 0) -> _Tensor:
    """A part of a tensor along its first or second dimension; None of None. All of it is no view, which takes time."""
    if tensor is None:
        return None
    if where.stop is None or where.stop - where.start == tensor.shape[dimension]:
        return tensor
    return tensor[where] if dimension == 0 else tensor[:, where]


def pitch(columns: int) -> int:
    """Elements from one row of logits to the next."""
    return ceil(columns / _PITCH_UNIT) * _PITCH_UNIT
