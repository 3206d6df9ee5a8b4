"""Bounds of a result's error against fp64, from dtypes, lengths of sums and the function's conditioning."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .ways import Results

FP32_UNIT = 2.0**-24
_SAMPLES = 4
_noise: list[torch.Generator] = []


class Expected(NamedTuple):
    """A function in fp64: outputs and gradients, and how far each moves when every input moves by a unit of fp32."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    output_spreads: list[Tensor]
    gradient_spreads: list[Tensor | None]


def expect(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    trains: Sequence[bool],
    upstream: Sequence[Tensor | None],
    seed: int = 0,
) -> Expected:
    """What `function`, of inputs in fp64, gives, with gradients of those that train.

    A stable algorithm computes the function of slightly perturbed inputs. The function is therefore evaluated with random
    perturbations of the inputs, the upstream gradients, and intermediate results that pass through `blurred`.
    """
    generator = torch.Generator().manual_seed(seed)
    exact = _run(function, inputs, trains, upstream)
    spreads: list[Tensor | None] = [None if value is None else torch.zeros_like(value) for value in exact]
    for _ in range(_SAMPLES):
        _noise.append(generator)
        moved = _run(function, [_moved(t, generator) for t in inputs], trains, [_moved(t, generator) for t in upstream])
        _noise.clear()
        for i, (value, other) in enumerate(zip(exact, moved, strict=True)):
            if value is not None and other is not None:
                spreads[i] = torch.maximum(spreads[i], (value - other).abs())  # type: ignore[arg-type]
    # By chance a single element may hardly move in a few samples; its whole row does not.
    spreads = [None if spread is None else _row_largest(spread) for spread in spreads]
    count = len(exact) - len(inputs)
    return Expected(exact[:count], exact[count:], spreads[:count], spreads[count:])  # type: ignore[arg-type]


def blurred(value: Tensor) -> Tensor:
    """Marks an intermediate result, in a function given to `expect`, that is rounded to fp32, as is its gradient."""
    return _Blur.apply(value, _noise[-1]) if _noise else value


class _Blur(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, generator):  # type: ignore[no-untyped-def]
        ctx.generator = generator
        return _moved(value, generator)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _moved(gradient, ctx.generator), None


def check(expected: Expected, found: Results, *, length: int, roundings: int = 1, row_roundings: int = 0) -> None:
    """Every element within `roundings` of its dtype, and three times what sums of `length` terms in fp32 are off by.

    Args:
        row_roundings: further roundings, relative to the largest element of the row: for rounded intermediate results.
    """
    for i, (value, actual, spread) in enumerate(zip(expected.outputs, found.outputs, expected.output_spreads, strict=True)):
        _check(f"output {i}", actual, value, spread, length, roundings, row_roundings)
    triples = zip(expected.gradients, found.gradients or expected.gradients, expected.gradient_spreads, strict=True)
    for i, (wanted, given, around) in enumerate(triples):
        assert (given is None) == (wanted is None), f"gradient {i}: {given is not None}, {wanted is not None} was expected"
        if found.gradients is not None and given is not None and wanted is not None and around is not None:
            _check(f"gradient {i}", given, wanted, around, length, roundings, row_roundings)


def _check(
    name: str, actual: Tensor, value: Tensor, spread: Tensor, length: int, roundings: int, row_roundings: int
) -> None:
    assert actual.shape == value.shape, f"{name} has shape {tuple(actual.shape)} instead of {tuple(value.shape)}"
    if not value.numel():
        return
    numbers = torch.finfo(actual.dtype)
    past = value.abs() > numbers.max * (1 - 8 * numbers.eps)
    assert (torch.isfinite(actual) | past).all(), f"{name}: not every element was written, or one overflowed"
    row = _row_largest(value.abs())
    fp32 = (3 * math.sqrt(length) + 8) * (spread + FP32_UNIT * value.abs())
    narrow = numbers.eps / 2 * (roundings * value.abs() + row_roundings * row)
    allowed = fp32 + narrow + numbers.tiny * numbers.eps + FP32_UNIT**2 * row
    excess = (actual.double() - value).abs() - allowed
    excess = torch.where(past, -torch.inf, excess)
    at = int(excess.argmax())
    error, limit = float((actual.double() - value).abs().reshape(-1)[at]), float(allowed.expand_as(value).reshape(-1)[at])
    assert excess.reshape(-1)[at] <= 0, f"{name} is off by {error:.3g}, {limit:.3g} is allowed"


def _run(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor | None],
    trains: Sequence[bool],
    upstream: Sequence[Tensor | None],
) -> list[Tensor | None]:
    leaves = [
        None if tensor is None else tensor.detach().double().contiguous().requires_grad_(train)
        for tensor, train in zip(inputs, trains, strict=True)
    ]
    outputs = list(function(*leaves))
    pairs = [(o, u.double()) for o, u in zip(outputs, upstream, strict=True) if u is not None and o.requires_grad]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found: list[Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        found = list(torch.autograd.grad([o for o, _ in pairs], wanted, [u for _, u in pairs], allow_unused=True))
    every = iter(found)
    gradients = [next(every) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
    return [*(output.detach() for output in outputs), *gradients]


def _moved(tensor: Tensor | None, generator: torch.Generator) -> Tensor | None:
    if tensor is None:
        return None
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return tensor.detach().double() * (1 + FP32_UNIT * noise)


def _row_largest(tensor: Tensor) -> Tensor:
    return tensor.amax(-1, keepdim=True).expand_as(tensor) if tensor.dim() and tensor.numel() else tensor
