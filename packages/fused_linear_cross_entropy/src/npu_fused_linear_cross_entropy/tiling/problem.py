"""What a launch over a chunk of logits is for."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 2  # of a tile of a part of a row on Ascend: fewer would not keep row reductions in the vector unit


@dataclass(frozen=True)
class Problem:
    """What a launch is for.

    Attributes:
        width: columns of the chunk.
        itemsize: bytes of a logit.
        gradient_itemsize: bytes of an element of the gradient; 0 where there is none.
        statistics: whether statistics are computed.
        smoothed, entropy, argmax: whether sums of z, sums of exp times z, and the places of maxima are kept.
        transformed: whether logits are biased, scaled or softcapped.
        in_place: whether the gradient lies over the logits; else it is a copy of them in other memory.
        exponentials: whether one sweep writes exponentials instead of a gradient.
    """

    width: int
    itemsize: int
    gradient_itemsize: int
    statistics: bool
    smoothed: bool = False
    entropy: bool = False
    argmax: bool = False
    transformed: bool = False
    in_place: bool = True
    exponentials: bool = False
