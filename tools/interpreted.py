"""CUDA's kernels in Triton's interpreter, against plain PyTorch, without a GPU: `hatch run interpreted:run [PACKAGE ...]`.

Of the calls in tools/cuda_calls.py those run that launch every kernel with the least work, once in plain PyTorch and
once as an H200 would, with equal inputs, and results and gradients are compared. tools/interpreter.py has what the
interpreter lacks. It runs one program after the other, so kernels whose programs wait for each other are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import npu_tiling
import torch
from npu_tiling.launching.recording import Argument, RecordedLaunch
from torch import Tensor

from . import cuda_calls as module
from . import interpreter, launches

H200 = npu_tiling.GPUS["H200"]
WAITING = "shared"  # in the names of kernels whose programs wait for each other
EACH = 2  # calls for each kernel
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest element


def chosen(package: str) -> list[str]:
    """Labels of the calls to run: for each kernel those with the least work."""
    found: dict[str, list[tuple[int, str]]] = {}
    for label, made in launches.of_package(package, H200):
        if not any(WAITING in launch.kernel for launch in made):
            for kernel in {launch.kernel for launch in made}:
                found.setdefault(kernel, []).append((_work(made), label))
    return sorted({label for costs in found.values() for _, label in sorted(costs)[:EACH]})


def _work(made: Sequence[RecordedLaunch]) -> int:
    """About how long the interpreter takes, which runs programs one after the other."""
    sizes = sum(_size(argument) for launch in made for argument in launch.arguments if isinstance(argument, Argument))
    return sizes + 1000 * sum(launch.grid for launch in made)


def _size(argument: Argument) -> int:
    size = 1
    for length in argument.shape:
        size *= length
    return size


class Kept:
    """Inputs that calls make, and what our functions return to them."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.results: list[Tensor] = []

    def __enter__(self) -> Kept:
        ours = {
            name: self._returning(value)
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "").startswith("npu_") and not isinstance(value, type)
        }
        makers = {name: self._making(getattr(module, name)) for name in ("_leaf", "_rows")}
        self._patch = mock.patch.multiple(module, **ours, **makers)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _making(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*arguments: Any) -> Tensor:
            self.leaves.append(function(*arguments))
            return self.leaves[-1]

        return make

    def _returning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            found = function(*arguments, **options)
            results = [found] if isinstance(found, Tensor) else found
            self.results += [result for result in results if isinstance(result, Tensor)]
            return found

        return call

    @property
    def tensors(self) -> list[Tensor]:
        """Results, then gradients."""
        return [*self.results, *(leaf.grad for leaf in self.leaves if leaf.grad is not None)]


def run(call: Callable[[], None]) -> list[Tensor]:
    """What a call computes; inputs are drawn from one seed."""
    torch.manual_seed(0)
    with Kept() as kept:
        call()
    return [each.detach().to_dense().clone() for each in kept.tensors]


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the tolerance for the expected tensor's dtype."""
    if expected.dtype == torch.int8:  # a quotient between two integers
        return float((found.int() - expected.int()).abs().max()) if found.numel() else 0.0
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    found, wide = found.nan_to_num().double(), expected.nan_to_num().double()
    scale = wide.abs().max().item() if wide.numel() else 0.0
    worst = (found - wide).abs().max().item() if wide.numel() else 0.0
    return worst / ((scale or 1.0) * TOLERANCE.get(expected.dtype, 1e-4))


def compared(package: str) -> Iterator[tuple[str, float | str]]:
    """Labels, and the largest error or what went wrong."""
    labels, cpu = chosen(package), torch.device("cpu")
    for label, call in module.CALLS[package](cpu) if labels else ():
        if label not in labels:
            continue
        with mock.patch("npu_fused_linear_cross_entropy.compute.check_columns"):  # those outside of the vocabulary give NaN
            expected = run(call)
        try:
            with npu_tiling.use_device(H200, emulated=True):
                found = run(call)
        except Exception as problem:  # the interpreter's, whatever it is
            while problem.__cause__ is not None:
                problem = problem.__cause__  # type: ignore[assignment]
            yield label, f"{type(problem).__name__}: {str(problem)[:300]}"
            continue
        yield label, max(map(error, found, expected)) if len(found) == len(expected) else "another number of results"


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported: with their first launch
    parser = argparse.ArgumentParser(prog="interpreted", description=__doc__)
    parser.add_argument("package", nargs="*", help="default: every operator")
    wrong = 0
    packages = parser.parse_args(arguments).package or list(module.CALLS)
    with interpreter.complete():
        for label, said in ((f"{package}, {label}", said) for package in packages for label, said in compared(package)):
            right = isinstance(said, float) and said <= 1.0
            wrong += not right
            told = f"{said:.2g} of the tolerance" if isinstance(said, float) else said
            print(f"{label}: {'ok' if right else 'WRONG'}, {told}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
