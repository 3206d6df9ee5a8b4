"""The cross entropy: activations, weights, and one chunk of logits, of so many elements each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_log_probs
from torch import Tensor

from .compare import FP32_UNIT, PIECE, said, sampled, worst
from .rows import Result


class Exact(NamedTuple):
    """In fp64: logits and log-probabilities of targets, the gradients of chosen rows of x and weight, their terms' size."""

    logits: Tensor
    log_probs: Tensor
    dx: Tensor
    dx_size: Tensor
    dweight: Tensor
    dweight_size: Tensor


def losses(elements: int, device: torch.device) -> Iterator[Result]:
    """Tokens, vocabularies and logits in turn."""
    for what, tokens, width, pitch, vocabulary in (
        ("x", elements // 2048 + 37, 2048, 2048, 1000),
        ("x", elements // 2048 + 37, 2048, 4096, 1000),
        ("weight", 256, 2048, 2048, elements // 2048 + 37),
        ("logits", elements // 131072 + 37, 1024, 1024, 131101),
    ):
        x = torch.randn(tokens, pitch, dtype=torch.bfloat16, device=device)[:, :width].requires_grad_()
        weight = (torch.randn(vocabulary, width, dtype=torch.bfloat16, device=device) * (2 * width**-0.5)).requires_grad_()
        target = torch.randint(0, vocabulary, (tokens,), device=device)
        rows, columns = (sampled(n, m, elements) for n, m in ((tokens, width), (vocabulary, width)))
        if what == "logits":
            rows = sampled(tokens, vocabulary, elements)
        chunks = {"chunk_tokens": tokens, "memory_budget": 2**36} if what == "logits" else {}
        size = {"x": x, "weight": weight, "logits": torch.empty(tokens, vocabulary, device="meta")}[what]
        name = f"{what} {said(size.shape, torch.float32 if what == 'logits' else x.dtype)}, rows of x {pitch} apart"

        exact = _exact(x.detach(), weight.detach(), target, rows, columns)
        loss = fused_linear_cross_entropy(x, weight, target, reduction="sum", **chunks)
        loss.backward()
        logit_error = (3 * math.sqrt(width) + 8) * FP32_UNIT
        error = abs(float(loss.detach()) + float(exact.log_probs.sum())) / float(exact.log_probs.abs().sum()) / logit_error
        kept = _distance(x.detach(), weight.detach()) if what == "weight" else 0
        gradients = _gradients(x, weight, exact, rows, columns, kept)
        yield f"fused_linear_cross_entropy, {name}", {"loss": error, **gradients}

        x.grad = weight.grad = None
        log_probs = linear_log_probs(x, weight, target, **chunks)
        (-log_probs).backward(torch.ones_like(log_probs))
        size = (
            1 + exact.log_probs.abs() + exact.logits.abs()
        )  # a tensor core cuts digits off: its errors are shares of a logit
        off = (log_probs.detach().double() - exact.log_probs).abs() / size
        found = {"log_probs": float(off.max()) / logit_error, **_gradients(x, weight, exact, rows, columns)}
        yield f"linear_log_probs, {name}", found
        del x, weight, log_probs, exact


def _exact(x: Tensor, weight: Tensor, target: Tensor, rows: list[int], columns: list[int]) -> Exact:
    """A piece of the logits at a time: their statistics first, then the gradients of -sum(log_probs)."""
    (tokens, width), vocabulary = x.shape, weight.shape[0]
    step = max(1, PIECE // width)
    parts = [slice(first, min(first + step, vocabulary)) for first in range(0, vocabulary, step)]
    logits, log_probs = torch.empty(2, tokens, dtype=torch.float64, device=x.device)
    dx = torch.zeros(len(rows), width, dtype=torch.float64, device=x.device)
    dweight = torch.zeros(len(columns), width, dtype=torch.float64, device=x.device)
    dx_size, dweight_size = torch.zeros_like(dx), torch.zeros_like(dweight)
    chosen = weight[columns].double()
    few = max(1, PIECE // min(vocabulary, step) // 4)
    for first in range(0, tokens, few):
        share = slice(first, min(first + few, tokens))
        wide, aim = x[share].double(), target[share]
        pieces = (torch.logsumexp(wide @ weight[part].double().t(), 1) for part in parts)
        lse = torch.logsumexp(torch.stack(list(pieces)), 0)
        logits[share] = (wide * weight[aim].double()).sum(1)
        log_probs[share] = logits[share] - lse
        g = torch.exp(wide @ chosen.t() - lse.unsqueeze(1))
        dweight_size += g.square().t() @ wide.square()
        hit = (aim.unsqueeze(1) == torch.tensor(columns, device=x.device)).double()
        dweight += (g - hit).t() @ wide
        dweight_size += hit.t() @ wide.square()
    own = x[rows].double()
    lse = (own * weight[target[rows]].double()).sum(1) - log_probs[rows]
    for part in parts:
        piece = weight[part].double()
        g = torch.exp(own @ piece.t() - lse.unsqueeze(1))
        dx += g @ piece
        dx_size += g.square() @ piece.square()
    aimed = weight[target[rows]].double()
    return Exact(logits, log_probs, dx - aimed, (dx_size + aimed.square()).sqrt(), dweight, dweight_size.sqrt())


def _distance(x: Tensor, weight: Tensor) -> int:
    """How far below its row's largest a logit may be: as many roundings is a probability off by, of logits kept in bf16."""
    largest = float(x.norm(dim=1).max()) * float(weight[:: max(1, len(weight) // 4096)].norm(dim=1).max())
    return math.ceil(2 * min(largest, 6 * largest / math.sqrt(x.shape[1])))


def _gradients(
    x: Tensor, weight: Tensor, exact: Exact, rows: list[int], columns: list[int], kept: int = 0
) -> dict[str, float]:
    """Each term was rounded to bf16 once, at random, and so was the sum, in every chunk that added to it.

    Args:
        kept: roundings besides, of logits that waited for the gradient.
    """
    assert x.grad is not None
    assert weight.grad is not None
    found = {}
    for name, actual, expected, size in (
        ("dx", x.grad[rows], exact.dx, exact.dx_size),
        ("dweight", weight.grad[columns], exact.dweight, exact.dweight_size),
    ):
        found[name] = worst(actual, expected, length=weight.shape[0], scale=size, roundings=6 + kept)
    return found
