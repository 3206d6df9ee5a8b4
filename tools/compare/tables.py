"""The calls of the tables of predicted times in each package's RECORDS.md: kernels beside the time of their bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from npu_offline import LaunchRecord, OfflineError, record
from npu_offline.timing import costs_of, time_launch
from rich.table import Table
from torch import Tensor

from . import cases
from .published import SOC

_BF16 = torch.bfloat16
_SUMS = {"sum_partials_kernel", "attn_res_add_partials_kernel"}  # of the weights' gradients: the tables leave them out
Call = Callable[[], tuple[Tensor, ...]]
_PARTS = {  # hidden size and vocabulary to the tokens of a chunk of the default budget
    (1024, 151936): 1280,
    (2048, 32000): 1664,
    (2048, 151936): 1280,
    (4096, 128256): 1408,
    (7168, 129280): 1408,
}


@dataclass(frozen=True)
class Predicted:
    """One prediction. Times in seconds.

    Attributes:
        label: of the call.
        direction: "forward" or "backward".
        toolchain: compiler version.
        seconds: of all kernels but the sums of weights' gradients, with their launches.
        floor: of the bytes that must move, at peak bandwidth.
        problem: why there is no prediction.
    """

    label: str
    direction: str
    toolchain: str
    seconds: float
    floor: float
    problem: str = ""


def predictions(toolchains: tuple[str, ...], wanted: str) -> Iterator[Predicted]:
    """Of the calls whose label has a text, each direction, with each compiler."""
    for label, call in calls():
        if wanted not in label:
            continue
        for direction, launches in zip(("forward", "backward"), launches_of_call(call), strict=True):
            for toolchain in toolchains if launches else ():
                yield _predicted(label, direction, toolchain, launches)
    for (width, vocabulary), tokens in _PARTS.items():
        label = f"cross entropy, {width} x {vocabulary}, {tokens} tokens"
        if wanted in label:
            launches = cases.logits_launches(cases.operator("fused_linear_cross_entropy"), tokens, width, vocabulary)
            for toolchain in toolchains:
                yield _predicted(label, "sweep", toolchain, launches)


def table(found: list[Predicted]) -> Table:
    lines = Table("call", "pass", "compiler", "predicted µs", "bytes µs", "ratio")
    for one in found:
        times = ("-", one.problem, "-")
        if not one.problem:
            times = (f"{one.seconds * 1e6:,.1f}", f"{one.floor * 1e6:,.1f}", f"{one.seconds / one.floor:.2f}")
        lines.add_row(one.label, one.direction, one.toolchain, *times)
    return lines


def calls() -> Iterator[tuple[str, Call]]:
    """A label and a function that runs a forward and returns what a backward begins with."""
    norm, add = cases.operator("rms_norm"), cases.function("rms_norm", "add_rms_norm")
    gated, int8 = (cases.function("rms_norm", name) for name in ("gated_rms_norm", "rms_norm_dynamic_quant"))
    sum_int8 = cases.function("rms_norm", "add_rms_norm_dynamic_quant")

    def fused(tokens: int, first: int, heads: int) -> Tensor:
        return torch.empty(tokens, 48, 128, dtype=_BF16)[:, first : first + heads].requires_grad_()

    def of(function: Callable[..., object], *make: Callable[[], Tensor], **options: object) -> Call:
        def call() -> tuple[Tensor, ...]:
            given = {name: value() if callable(value) else value for name, value in options.items()}
            found = function(*(one() for one in make), **given)
            results = found if isinstance(found, tuple) else (found,)
            return tuple(result for result in results if isinstance(result, Tensor) and result.requires_grad)

        return call

    short, long, heads, weights = (
        functools.partial(_leaf, *shape) for shape in ((262144, 128), (8192, 4096), (8192, 32, 128), (32, 128))
    )
    narrow, wide = functools.partial(_leaf, 128), functools.partial(_leaf, 4096)
    yield "rms_norm, 262144 x 128", of(norm, short, narrow)
    yield "rms_norm, q, 32 heads of 128 of 8192 fused rows of 48", of(norm, lambda: fused(8192, 0, 32), narrow)
    yield "rms_norm, k, 8 heads of 128 of 32768 fused rows of 48", of(norm, lambda: fused(32768, 32, 8), narrow)
    yield "rms_norm, 8192 x 32 x 128, a weight for each head", of(norm, heads, weights)
    yield "rms_norm, the same, fused", of(norm, lambda: fused(8192, 0, 32), weights)
    yield "rms_norm, 8192 x 32 x 128, gated", of(gated, heads, heads, narrow)
    yield "rms_norm, 8192 x 32 x 128, gate in a fused projection", of(gated, heads, lambda: fused(8192, 0, 32), narrow)
    yield "rms_norm, 8192 x 32 x 128, a weight for each head, gated", of(gated, heads, heads, weights)
    yield "rms_norm, 8192 x 4096", of(norm, long, wide)
    yield "rms_norm, 8192 x 4096 with a bias", of(norm, long, wide, bias=wide)
    yield "rms_norm, 8192 x 4096 with a bias, gemma", of(norm, long, wide, bias=wide, casting_mode="gemma")
    yield "rms_norm, 262144 x 128 with a bias", of(norm, short, narrow, bias=narrow)
    yield "rms_norm, the residual added, 8192 x 4096", of(add, long, long, wide)
    for rows, columns in ((8192, 4096), (262144, 128), (8192, 7168)):
        x, weight = functools.partial(_leaf, rows, columns), functools.partial(_leaf, columns)
        yield f"rms_norm, int8, {rows} x {columns}", of(int8, x, weight)
        if columns > 128:
            yield f"rms_norm, int8 of a sum, {rows} x {columns}", of(sum_int8, x, x, weight)
    phase1, bank = (cases.function("attn_res", name) for name in ("attn_res_phase1", "attn_res_bank"))
    for columns, layers in ((1024, 4), (1024, 8), (4096, 4), (4096, 8), (7168, 8)):
        blocks, weight = functools.partial(_leaf, 8, 2048, columns), functools.partial(_leaf, columns)
        queries = functools.partial(_leaf, layers, columns)
        yield f"attn_res, phase 1, {columns} columns, {layers} layers", of(phase1, queries, blocks, weight)
    for columns in (4096, 7168):
        tokens, weight = functools.partial(_leaf, 8192, columns), functools.partial(_leaf, columns)
        blocks = functools.partial(_leaf, 8192, 8, columns)
        given = (bank, blocks, lambda: 8, tokens, weight, weight)
        yield f"attn_res, a bank, {columns} columns", of(*given, weight, layer_output=tokens)  # type: ignore[arg-type]
        yield f"attn_res, a bank, {columns} columns, not normalised", of(*given, layer_output=tokens)  # type: ignore[arg-type]


def _leaf(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=_BF16, requires_grad=True)


def launches_of_call(call: Call) -> tuple[list[LaunchRecord], list[LaunchRecord]]:
    """The launches of the forward, and those of the backward but the ones that add partial sums."""
    with record(SOC) as forward:
        results = call()
    with record(SOC) as backward:
        if results:
            torch.autograd.backward(results, [torch.empty_like(result) for result in results])
    return list(forward), [launch for launch in backward if launch.name not in _SUMS]


def _predicted(label: str, direction: str, toolchain: str, launches: list[LaunchRecord]) -> Predicted:
    try:
        timings = [time_launch(launch, soc=SOC, toolchain=toolchain) for launch in launches]
    except OfflineError as error:
        return Predicted(label, direction, toolchain, 0.0, 0.0, str(error))
    floor = sum(timing.least for timing in timings) / costs_of(SOC).peak_bandwidth
    return Predicted(label, direction, toolchain, sum(timing.estimate for timing in timings), floor)
