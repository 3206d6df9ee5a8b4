"""Sampled rows, and how far a result in fp32 arithmetic may be from fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FP32_UNIT = 2.0**-24
PIECE = 2**26  # elements that a pass in fp64 takes at a time


def shares(elements: int, width: int) -> list[slice]:
    """Rows of `width` elements, a piece at a time."""
    step = max(1, PIECE // width)
    rows = elements // width
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def sampled(rows: int, width: int, boundary: int) -> list[int]:
    """The first rows, the last ones, and those around every multiple of `boundary` elements; several in between."""
    chosen = {0, 1, rows // 3, rows // 2, rows - 2, rows - 1}
    for edge in range(boundary, rows * width, boundary):
        chosen |= {edge // width - 1, edge // width, edge // width + 1}
    return sorted(row for row in chosen if 0 <= row < rows)


def worst(actual: Tensor, expected: Tensor, *, length: int, scale: Tensor, roundings: int = 1) -> float:
    """The largest error as a share of what is allowed; NaN where something is not finite.

    Allowed: `roundings` to actual's dtype, and three times what a sum in fp32 of `length` terms of random signs, each of the
    size of `scale`, is off by.
    """
    unit = torch.finfo(actual.dtype).eps / 2
    fp32 = (3 * math.sqrt(length) + 8) * FP32_UNIT
    allowed = roundings * unit * torch.maximum(expected.abs(), scale) + fp32 * scale + torch.finfo(actual.dtype).tiny
    return float(((actual.double() - expected).abs() / allowed).max())


def said(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> str:
    """A shape with how many elements that is."""
    return f"[{', '.join(map(str, shape))}] {str(dtype).removeprefix('torch.')} ({math.prod(shape) / 2**31:.2f} x 2^31)"
