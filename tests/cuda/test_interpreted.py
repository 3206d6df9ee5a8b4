"""CUDA's kernels in Triton's interpreter, against plain PyTorch, without a GPU: `hatch run interpreted:run [PACKAGE]`.

Of the calls in tools/cuda_calls those run that launch every kernel with the least work, once in plain PyTorch and once as
an H200 would, with equal inputs, and results and gradients are compared. interpreter.py has what the interpreter lacks. It
runs one program after the other, so kernels whose programs wait for each other are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import interpreter
import npu_tiling
import pytest
import torch
from npu_tiling.plans import Launch, Slot
from torch import Tensor

from tools import cuda_calls, launches
from tools.workspace import ROOT

H200 = npu_tiling.GPUS["H200"]
WAITING = "shared"  # in the names of kernels whose programs wait for each other
EACH = 2  # calls for each kernel
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest element


def chosen(package: str) -> list[tuple[str, Callable[[], None]]]:
    """The calls to run, with labels: for each kernel those with the least work."""
    found: dict[str, list[tuple[int, str]]] = {}
    for label, made in launches.of_package(package, H200):
        if not any(WAITING in launch.kernel for launch in made):
            for kernel in {launch.kernel for launch in made}:
                found.setdefault(kernel, []).append((_work(made), label))
    labels = {label for costs in found.values() for _, label in sorted(costs)[:EACH]}
    return [(label, call) for label, call in cuda_calls.CALLS[package](torch.device("cpu")) if label in labels]


def _work(made: Sequence[Launch]) -> int:
    """About how long the interpreter takes, which runs programs one after the other."""
    slots = (each for launch in made for each in launch.arguments if isinstance(each, Slot))
    return sum(slot.numel() for slot in slots) + 1000 * sum(launch.grid for launch in made)


class Kept:
    """Inputs that calls make, and what our functions return to them."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.results: list[Tensor] = []

    def __enter__(self) -> Kept:
        self._patches = contextlib.ExitStack()
        for calls in cuda_calls.CALLS.values():
            module = sys.modules[calls.__module__]
            ours = {
                name: self._returning(value)
                for name, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", "").startswith("npu_") and not isinstance(value, type)
            }
            makers = {name: self._making(getattr(module, name)) for name in ("leaf", "rows") if hasattr(module, name)}
            self._patches.enter_context(mock.patch.multiple(module, **ours, **makers))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

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


def assert_near(found: Tensor, expected: Tensor) -> None:
    """No difference is more than the tolerance; an int8 number, a quotient between two integers, may be one off."""
    if not expected.is_floating_point():
        within = int(expected.dtype == torch.int8)
        torch.testing.assert_close(found.long(), expected.long(), rtol=0, atol=within)
        return
    wide = expected.double()
    scale = wide[wide.isfinite()].abs().max().item() if wide.isfinite().any() else 0.0
    within = (scale or 1.0) * TOLERANCE.get(expected.dtype, 1e-4)
    torch.testing.assert_close(found.double(), wide, rtol=0, atol=within, equal_nan=True)


ON = os.environ.get("TRITON_INTERPRET") == "1"
CASES = [(package, *each) for package in cuda_calls.CALLS for each in chosen(package)] if ON else []


@pytest.fixture(scope="module")
def complete() -> Iterator[None]:
    """Triton's interpreter has what it lacks."""
    with interpreter.complete():
        yield


@pytest.mark.skipif(not ON, reason="needs a stock Triton, and TRITON_INTERPRET=1")
@pytest.mark.parametrize("call", [case[-1] for case in CASES], ids=[f"{package}, {label}" for package, label, _ in CASES])
def test_a_call_computes_what_pytorch_does(call, complete):
    with mock.patch("npu_fused_linear_cross_entropy.tokens.check_columns"):  # those outside of the vocabulary give NaN
        expected = run(call)
    with npu_tiling.use_device(H200, emulated=True):
        found = run(call)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs)


def test_every_kernel_without_waiting_programs_is_interpreted():
    assert 4 <= len(list(chosen("rms_norm"))) <= 40


@pytest.mark.parametrize("value", [1.0, -1.00390625, 1.01171875, 3.3895313892515355e38, -0.0, float("inf"), float("nan")])
def test_casts_to_bf16_round_as_pytorch_does(value):
    numbers = torch.tensor([value, value * (1 + 2**-9), value / 3])
    found = torch.from_numpy(interpreter._bf16_as_fp32(numbers.numpy()))
    assert torch.equal(found.nan_to_num(), numbers.bfloat16().float().nan_to_num())
    assert torch.equal(found.isnan(), numbers.isnan())


@pytest.mark.parametrize(
    ("found", "expected", "near"),
    [
        (torch.ones(3), torch.ones(3), True),
        (torch.tensor([1.00005, 0.0, 2.0]), torch.tensor([1.0, 0.0, 2.0]), True),
        (torch.tensor([1.0003, 0.0, 2.0]), torch.tensor([1.0, 0.0, 2.0]), False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), False),
        (torch.tensor([4, 5]), torch.tensor([4, 6]), False),
        (torch.tensor([4, 127], dtype=torch.int8), torch.tensor([4, 126], dtype=torch.int8), True),
        (torch.tensor([4, 127], dtype=torch.int8), torch.tensor([4, -128], dtype=torch.int8), False),
    ],
)
def test_what_is_near(found, expected, near):
    with contextlib.nullcontext() if near else pytest.raises(AssertionError):
        assert_near(found, expected)


def test_the_meaning_of_all_assembly_is_known():
    """But of what waits for other programs, which the interpreter runs one after the other."""
    texts = []
    for folder in ("packages", "shared/npu_tiling"):
        for file in (ROOT / folder).glob("**/src/**/*.py"):
            texts += re.findall(r"inline_asm_elementwise\(\s*(.*?)\n?\s*\"=", file.read_text(), re.DOTALL)
    assert len(texts) > 2
    unknown = [text for text in texts if "bra AGAIN" not in text and not any(part in text for part in interpreter.ASSEMBLY)]
    assert unknown == [], "interpreter.py: ASSEMBLY"
