"""Calls whose launches are every kind of tile that this package's tiling can choose: what `npu-offline check` compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from npu_fused_linear_cross_entropy import (
    fused_linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
    matmul,
)
from npu_fused_linear_cross_entropy.call import STATISTICS
from npu_tiling import device_for
from planned_anew import planned_anew

from testing.steps import run_once

TOKENS, WIDTH = 64, 16
VOCABULARIES = (1, 2, 123, 1000, 2048, 3000, 4096, 32000, 50257, 128256, 151936, 256000)
EXTRAS = {"return_z_loss": True, "return_token_accuracy": True, "return_lse": True}
EVERYTHING = {"label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 30.0, "logit_scale": 0.5, "token_scaling": True}
EACH_ROW = {"reduction": "none", "return_predicted_tokens": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "class weights": {"class_weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing, class weights": {"label_smoothing": 0.1, "class_weight": True},
    "z-loss": {"lse_square_scale": 0.1},
    "softcap": {"softcap": 30.0},
    "scale, bias": {"logit_scale": 0.5, "bias": True},
    "accuracy": {"return_token_accuracy": True},
    "entropy": {"return_entropy": True},
    "none": {"reduction": "none"},
    "columns": {"memory_budget": 2**20},
    "kept columns": {"memory_budget": 2**20, "width": TOKENS},
    "everything": {**EVERYTHING, **EXTRAS, "class_weight": True, "bias": True},
    "everything, entropy": {**EVERYTHING, **EXTRAS, "class_weight": True, "bias": True, "return_entropy": True},
    "everything, columns": {**EVERYTHING, **EXTRAS, "class_weight": True, "bias": True, "memory_budget": 2**20},
}
OF_DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "distributions": {},
    "distributions, everything": {"softcap": 30.0, "logit_scale": 0.5, "temperatures": True},
    "distributions, everything, columns": {
        "softcap": 30.0,
        "logit_scale": 0.5,
        "temperatures": True,
        "memory_budget": 2**20,
    },
}
DISTILLATIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse": {"divergence": "reverse_kl"},
    "Jensen-Shannon": {"divergence": "jensen_shannon"},
    "total variation": {"divergence": "total_variation"},
    "loss alone": {"grad": False},
    "reverse, labels": {"divergence": "reverse_kl", "hard_weight": 0.5, "temperature": 2.0},
    "everything": {"divergence": "jensen_shannon", "hard_weight": 0.5, "temperature": 2.0, "softcap": 30.0, "capped": True},
}
# A call for each kind of tile: what lint at each commit and quick reports look at.
SAMPLE = (
    "bfloat16 1000",
    "bfloat16 128256",
    "bfloat16 50257, everything",
    "float32 32000",
    "bfloat16 128256, accuracy",
    "bfloat16 4096, many rows",
    "bfloat16 50257, distributions",
    "bfloat16 128256, distilled, Jensen-Shannon",
)
# Calls that launch every kernel with every value of its flags: executed at each commit.
WAYS = (
    "bfloat16 1000, everything, each row",
    "bfloat16 123, everything, many rows",
    "bfloat16 50257, kept columns",
    "bfloat16 2048",
    "bfloat16 123, class weights, many rows",
    "bfloat16 50257, columns",
    "float32 32000",
    "bfloat16 4096, many rows",
    "bfloat16 1000, distributions",
    "bfloat16 50257, distributions, everything, columns",
    "bfloat16 50257, distilled, loss alone",
    "bfloat16 123, distilled, everything",
    "bfloat16 32001, distilled, everything",
    "statistics of three ranks",
)
# Calls among these that launch every kernel: executed with every compiler, and for an A3.
KERNELS = (
    "bfloat16 1000, everything, each row",
    "bfloat16 123, everything, many rows",
    "bfloat16 4096, many rows",
    "statistics of three ranks",
    "bfloat16 1000, distributions",
    "bfloat16 32001, distilled, everything",
)


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """A label and a function that runs a forward and a backward on CPU tensors."""
    for vocabulary in VOCABULARIES:
        yield f"bfloat16 {vocabulary}", call(vocabulary)
    for vocabulary in (123, 1000, 32000, 128256):
        yield f"float32 {vocabulary}", call(vocabulary, torch.float32)
        yield f"bfloat16 {vocabulary}, narrow logits", call(vocabulary, narrow=True)
        yield f"bfloat16 {vocabulary}, loss alone", call(vocabulary, grad=False)
    for vocabulary in (1000, 50257, 128256):
        for what, options in OPTIONS.items():
            yield f"bfloat16 {vocabulary}, {what}", call(vocabulary, **options)
        for what, options in OF_DISTRIBUTIONS.items():
            yield f"bfloat16 {vocabulary}, {what}", _distributions(vocabulary, **options)
    # Several tiles of whole rows a program; gradients that are multiplied into new memory.
    yield "bfloat16 4096, many rows", call(4096, tokens=1024, narrow=True, retain_graph=True)
    for vocabulary in (123, 1000, 32001, 50257, 128256, 151936):
        for what, options in DISTILLATIONS.items():
            yield f"bfloat16 {vocabulary}, distilled, {what}", _distillation(vocabulary, **options)
    # The arithmetic on rows: every option of each row, and more rows than one program takes.
    yield "bfloat16 1000, everything, each row", call(1000, **OPTIONS["everything, entropy"], **EACH_ROW)
    for what in ("class weights", "everything"):
        yield f"bfloat16 123, {what}, many rows", call(123, tokens=5001, **OPTIONS[what])
    yield "statistics of three ranks", _join


def sized_calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Chunks of logits of sizes at which time counts: what `npu-offline tune` searches tiles for."""
    for vocabulary in (4096, 32000, 128256):
        yield f"bfloat16 1024 x {vocabulary}", _chunk(vocabulary)


def _join() -> None:
    from npu_fused_linear_cross_entropy.loss.kernels import join

    statistics = torch.rand(STATISTICS, 5001)
    parts = torch.stack((statistics, statistics + 1.0, statistics - 1.0))
    run_once(join, device_for(statistics.device), parts, statistics)


def _chunk(vocabulary: int) -> Callable[[], None]:
    def run() -> None:
        x = torch.zeros(1024, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        with (
            planned_anew(),
            mock.patch.object(matmul, "writes_fp32", lambda *_: False),
            mock.patch.object(matmul, "multiply", lambda *_, **__: None),  # kernels alone are timed
        ):
            fused_linear_cross_entropy(x, weight, torch.zeros(1024, dtype=torch.int64), chunk_tokens=1024)

    return run


def _distributions(vocabulary: int, temperatures: bool = False, **options: Any) -> Callable[[], None]:
    def run() -> None:
        x, weight = (torch.randn(rows, WIDTH).bfloat16().requires_grad_() for rows in (TOKENS, vocabulary))
        ids = torch.arange(3 * TOKENS).view(TOKENS, 3) * 7919 % vocabulary
        temperature = torch.linspace(0.5, 1.5, TOKENS).requires_grad_() if temperatures else 1.0
        extras = {"top_k": 4, "return_entropy": True, "return_square_sum": True, "return_mean_logit": True}
        with mock.patch.object(matmul, "writes_fp32", lambda *_: True):
            found = linear_log_probs(x, weight, ids[:, 0], ids=ids, temperature=temperature, **extras, **options)
            sum(output.sum() for output in found if output is not None and output.requires_grad).backward()

    return run


def call(
    vocabulary: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    narrow: bool = False,
    grad: bool = True,
    width: int = WIDTH,
    tokens: int = TOKENS,
    retain_graph: bool = False,
    **options: Any,
) -> Callable[[], None]:
    def run() -> None:
        x = torch.randn(tokens, width).to(dtype).requires_grad_(grad)
        weight = torch.randn(vocabulary, width).to(dtype).requires_grad_(grad)
        target = torch.arange(tokens) * 7919 % vocabulary
        given = dict(options)
        bias = torch.randn(vocabulary).to(dtype).requires_grad_(grad) if given.pop("bias", False) else None
        class_weight = torch.linspace(0.5, 1.5, vocabulary) if given.pop("class_weight", False) else None
        with planned_anew(), mock.patch.object(matmul, "writes_fp32", lambda *_: not narrow):
            found = fused_linear_cross_entropy(x, weight, target, bias, class_weight=class_weight, **given)
            loss = found if isinstance(found, torch.Tensor) else found.loss
            if grad:
                gradient = torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape)  # 1 would multiply nothing
                loss.backward(gradient, retain_graph=retain_graph)

    return run


def _distillation(vocabulary: int, *, grad: bool = True, capped: bool = False, **options: Any) -> Callable[[], None]:
    def run() -> None:
        x = torch.randn(TOKENS, WIDTH).bfloat16().requires_grad_(grad)
        weight = torch.randn(vocabulary, WIDTH).bfloat16().requires_grad_(grad)
        teacher = (torch.randn(TOKENS, 2 * WIDTH).bfloat16(), torch.randn(vocabulary, 2 * WIDTH).bfloat16())
        target = torch.arange(TOKENS) * 7919 % vocabulary
        bias = (torch.randn(vocabulary).bfloat16(), 20.0) if capped else ()
        loss = linear_distillation_loss(x, weight, target, teacher=(*teacher, *bias), **options)
        if grad:
            loss.backward(torch.tensor(0.5))

    return run
