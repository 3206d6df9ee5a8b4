"""Sampled rows, exact results in fp64, and how far a result in fp32 arithmetic may be from them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6
FP32_UNIT = 2.0**-24
PIECE = 2**26  # elements that a pass in fp64 takes at a time


class Size(NamedTuple):
    """How many elements a tensor has at least, and where it is."""

    elements: int
    device: str

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normally distributed."""
        return torch.randn(shape, dtype=dtype, device=self.device)

    def sampled(self, rows: int, width: int) -> list[int]:
        """The first rows, the last ones, and those around every multiple of `elements`; several in between."""
        chosen = {0, 1, rows // 3, rows // 2, rows - 2, rows - 1}
        for edge in range(self.elements, rows * width, self.elements):
            chosen |= {edge // width - 1, edge // width, edge // width + 1}
        return sorted(row for row in chosen if 0 <= row < rows)


def pieces(rows: int, width: int) -> list[slice]:
    """Rows of `width` elements, a piece at a time."""
    step = max(1, PIECE // width)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def assert_near(actual: Tensor, expected: Tensor, *, length: int, scale: Tensor, roundings: int = 1) -> None:
    """No error is more than what is allowed.

    Allowed: `roundings` to actual's dtype, and three times what a sum in fp32 of `length` terms of random signs, each of the
    size of `scale`, is off by.
    """
    actual, expected = actual.detach(), expected.detach()
    unit = torch.finfo(actual.dtype).eps / 2
    fp32 = (3 * math.sqrt(length) + 8) * FP32_UNIT
    allowed = roundings * unit * torch.maximum(expected.abs(), scale) + fp32 * scale + torch.finfo(actual.dtype).tiny
    shares = (actual.double() - expected).abs() / allowed
    assert shares.max() <= 1, "an error as a share of what is allowed"  # which NaN is not


def assert_rows_near(actual: Tensor, expected: Tensor) -> None:
    """No error is more than one rounding, and fp32's of sums over a row of its size."""
    scale = expected.detach().square().mean(-1, keepdim=True).sqrt().expand_as(expected) * 4
    assert_near(actual, expected, length=64**2, scale=scale)


def assert_norm_near(
    x: Tensor, weight: Tensor, dy: Tensor, y: Tensor, dx: Tensor, dweight: Tensor, chosen: list[int]
) -> None:
    """Chosen rows of y and dx, and all of dweight, are RMSNorm's."""
    rows, width = x.shape
    for i in chosen:
        row, g = x[i].double(), dy[i].double() * weight.double()
        rstd = torch.rsqrt(row.square().mean() + EPS)
        n = row * rstd
        assert_near(y[i], n * weight.double(), length=width, scale=(n * weight.double()).abs())
        size = (g.abs() + n.abs() * g.abs().mean()) * rstd
        assert_near(dx[i], (g - n * (g * n).mean()) * rstd, length=width, scale=size)
    total, size = torch.zeros(2, width, dtype=torch.float64, device=x.device)
    for part in pieces(rows, width):
        wide = x[part].double()
        terms = dy[part].double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        total += terms.sum(0)
        size += terms.square().sum(0)
    assert_near(dweight, total, length=width, scale=size.sqrt())


def scores(v: Tensor, query: Tensor, rms_weight: Tensor) -> Tensor:
    """Of blocks [N, T, D] and one query, [N, T]; of several, [N, S, T]."""
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + EPS) * rms_weight
    return keys @ query if query.dim() == 1 else torch.einsum("ntd,sd->nst", keys, query)


def attention(v: Tensor, query: Tensor, rms_weight: Tensor) -> Tensor:
    """Attention Residuals of blocks [N, T, D]."""
    return (torch.softmax(scores(v, query, rms_weight), 0).unsqueeze(-1) * v).sum(0)


class Head(NamedTuple):
    """A language model's last layer, and of -sum(log_probs) what is exact, in fp64.

    Attributes:
        x, weight, target: tokens, the vocabulary's rows, and a row's number for each token.
        rows, columns: numbers of chosen rows of x and of weight.
        logits, log_probs: of targets.
        dx, dweight: the gradients of chosen rows.
        dx_size, dweight_size: the size of their terms.
    """

    x: Tensor
    weight: Tensor
    target: Tensor
    rows: list[int]
    columns: list[int]
    logits: Tensor
    log_probs: Tensor
    dx: Tensor
    dx_size: Tensor
    dweight: Tensor
    dweight_size: Tensor

    @property
    def logit_error(self) -> float:
        """What a logit in fp32 may be off by, as a share of its size."""
        return (3 * math.sqrt(self.x.shape[1]) + 8) * FP32_UNIT

    def distance(self) -> int:
        """How far below its row's largest a logit may be: as many roundings is a probability off by, of logits in bf16."""
        x, weight = self.x.detach(), self.weight.detach()
        largest = float(x.norm(dim=1).max()) * float(weight[:: max(1, len(weight) // 4096)].norm(dim=1).max())
        return math.ceil(2 * min(largest, 6 * largest / math.sqrt(x.shape[1])))

    def assert_gradients_near(self, kept: int = 0) -> None:
        """Each term was rounded to bf16 once, at random, and so was the sum, in every chunk that added to it.

        Args:
            kept: roundings besides, of logits that waited for the gradient.
        """
        assert self.x.grad is not None and self.weight.grad is not None
        some = {"length": self.weight.shape[0], "roundings": 6 + kept}
        assert_near(self.x.grad[self.rows], self.dx, scale=self.dx_size, **some)
        assert_near(self.weight.grad[self.columns], self.dweight, scale=self.dweight_size, **some)


def head(x: Tensor, weight: Tensor, target: Tensor, rows: list[int], columns: list[int]) -> Head:
    """A piece of the logits at a time: their statistics first, then the gradients of -sum(log_probs)."""
    (tokens, width), vocabulary = x.shape, weight.shape[0]
    parts = pieces(vocabulary, width)
    logits, log_probs = torch.empty(2, tokens, dtype=torch.float64, device=x.device)
    dx, dx_size = torch.zeros(2, len(rows), width, dtype=torch.float64, device=x.device)
    dweight, dweight_size = torch.zeros(2, len(columns), width, dtype=torch.float64, device=x.device)
    chosen = weight[columns].double()
    for share in pieces(tokens, 4 * min(vocabulary, max(1, PIECE // width))):
        wide, aim = x[share].double(), target[share]
        lse = torch.logsumexp(torch.stack([torch.logsumexp(wide @ weight[part].double().t(), 1) for part in parts]), 0)
        logits[share] = (wide * weight[aim].double()).sum(1)
        log_probs[share] = logits[share] - lse
        g = torch.exp(wide @ chosen.t() - lse.unsqueeze(1))
        dweight_size += g.square().t() @ wide.square()
        hit = (aim.unsqueeze(1) == torch.tensor(columns, device=x.device)).double()
        dweight += (g - hit).t() @ wide
        dweight_size += hit.t() @ wide.square()
    own, aimed = x[rows].double(), weight[target[rows]].double()
    lse = (own * aimed).sum(1) - log_probs[rows]
    for part in parts:
        piece = weight[part].double()
        g = torch.exp(own @ piece.t() - lse.unsqueeze(1))
        dx += g @ piece
        dx_size += g.square() @ piece.square()
    dx, dx_size = dx - aimed, (dx_size + aimed.square()).sqrt()
    leaves = x.requires_grad_(), weight.requires_grad_()
    return Head(*leaves, target, rows, columns, logits, log_probs, dx, dx_size, dweight, dweight_size.sqrt())
