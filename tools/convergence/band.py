"""How far a run may be from another, and which runs leave that band."""

from __future__ import annotations

from collections.abc import Sequence

from .runs import EVERY, Curve


def band(plain: Curve, other_order: Curve) -> list[float]:
    """The largest difference so far between two runs of plain PyTorch that differ in the order of the data alone.

    Both are measured on the same held-out text, so that the noise of a batch is not in it: what is left is how much of a
    model's quality is chance. The largest so far, since two curves cross by chance too.
    """
    widest, found = 0.0, []
    for a, b in zip(plain.held_out, other_order.held_out, strict=True):
        widest = max(widest, abs(a - b))
        found.append(widest)
    return found


def differences(curve: Curve, plain: Curve) -> list[float]:
    """How far a run is from the plain one on the held-out text, measurement by measurement."""
    return [abs(a - b) for a, b in zip(curve.held_out, plain.held_out, strict=True)]


def leaves(curve: Curve, plain: Curve, allowed: Sequence[float]) -> int | None:
    """The step at which a run first leaves the band around the plain one, None if it never does."""
    for index, (difference, most) in enumerate(zip(differences(curve, plain), allowed, strict=True)):
        if not difference <= most:  # a loss that is not a number compares with nothing
            return (index + 1) * EVERY
    return None
