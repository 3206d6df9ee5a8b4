"""Whether a provider computes what it should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .declaration import Error, Forward, relative_error
from .modes import as_tuple, differentiated, matching

# Eight unit roundoffs of the narrow dtypes, for the few roundings of a chain of operations; for fp32 also sums of
# thousands of terms. An error of one wrong element is of the order of 1.
TOLERANCES = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-15, torch.float64: 2.0**-30}


@dataclass(frozen=True)
class Expected:
    """The reference's results, in its dtype: outputs, and gradients by the input's name; and what an error is."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    error: Error = relative_error


@dataclass(frozen=True)
class Verdict:
    """Whether a provider's results match the reference.

    Attributes:
        right: they do.
        error: the largest error found; infinite where there was nothing to compare.
        reason: what is wrong, empty where nothing is.
    """

    right: bool
    error: float
    reason: str = ""

    def __str__(self) -> str:
        return f"ok, {self.error:.0e}" if self.right else f"WRONG: {self.reason}"


def default_tolerance(inputs: Mapping[str, Tensor]) -> float:
    """The tolerance that follows from the narrowest floating-point dtype of the inputs."""
    return max(TOLERANCES[tensor.dtype] for tensor in inputs.values() if tensor.dtype in TOLERANCES)


def expect(
    reference: Forward, inputs: Mapping[str, Tensor], dtype: torch.dtype, error: Error = relative_error
) -> tuple[Expected, tuple[Tensor, ...]]:
    """What the reference gives in `dtype`, and random gradients of its outputs, in the dtype of the first input."""
    wide = {}
    for name, tensor in inputs.items():
        widened = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        wide[name] = widened.requires_grad_(tensor.requires_grad)
    outputs = as_tuple(reference(*wide.values()))
    narrow = next(tensor.dtype for tensor in inputs.values() if tensor.is_floating_point())
    seeds = tuple(
        torch.ones_like(output, dtype=narrow) if output.dim() == 0 else torch.randn_like(output, dtype=narrow)
        for output in (output.detach() for output in outputs)
    )
    wanted = differentiated(wide)
    gradients: dict[str, Tensor] = {}
    if wanted:
        found = torch.autograd.grad(outputs, tuple(wanted.values()), matching(seeds, outputs))
        gradients = dict(zip(wanted, found, strict=True))
    return Expected(tuple(output.detach() for output in outputs), gradients, error), seeds


def verify(
    forward: Forward,
    inputs: Mapping[str, Tensor],
    seeds: Sequence[Tensor],
    expected: Expected,
    tolerance: float,
) -> Verdict:
    """Compare outputs, with and without gradients enabled, and gradients; nothing that was passed in may change."""
    passed = {**inputs, **{f"gradient of output {i}": seed for i, seed in enumerate(seeds)}}
    before = {name: tensor.detach().clone() for name, tensor in passed.items()}
    try:
        pairs: list[tuple[str, Tensor | None, Tensor]] = []
        with torch.no_grad():
            outputs = as_tuple(forward(*inputs.values()))
        pairs += _paired("output without gradients", outputs, expected.outputs)
        outputs = as_tuple(forward(*inputs.values()))
        pairs += _paired("output", outputs, expected.outputs)
        if expected.gradients:
            wanted = [inputs[name] for name in expected.gradients]
            found = torch.autograd.grad(outputs, wanted, matching(seeds, outputs), allow_unused=True)
            pairs += [
                (f"gradient of {name}", gradient, right)
                for (name, right), gradient in zip(expected.gradients.items(), found, strict=True)
            ]
        changed = [name for name, tensor in passed.items() if not torch.equal(tensor.detach(), before[name])]
        if changed:
            return Verdict(False, torch.inf, f"{' and '.join(changed)} overwritten")
        return judge(pairs, tolerance, expected.error)
    finally:
        with torch.no_grad():
            for name, tensor in passed.items():
                tensor.copy_(before[name])


def _paired(name: str, found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[tuple[str, Tensor | None, Tensor]]:
    return [(f"{name} {i}", found[i] if i < len(found) else None, right) for i, right in enumerate(expected)]


def judge(pairs: Sequence[tuple[str, Tensor | None, Tensor]], tolerance: float, error_of: Error) -> Verdict:
    """The verdict on results, each with its name, what was found (None: nothing), and what is right."""
    worst = 0.0
    for name, found, expected in pairs:
        if found is None:
            return Verdict(False, torch.inf, f"{name} is missing")
        if found.shape != expected.shape:
            return Verdict(False, torch.inf, f"{name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
        error = error_of(found.detach(), expected)
        if not error <= tolerance:
            return Verdict(False, error, f"{name} is off by {error:.1e}, {tolerance:.1e} is allowed")
        worst = max(worst, error)
    return Verdict(True, worst)
