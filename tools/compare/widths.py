"""RMSNorm over widths on Ascend: bytes over the fewest, and predicted time over theirs, for every kind of call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from npu_offline.timing import costs_of, time_launch

from . import cases
from .published import SOC
from .tables import Call, launches_of_call

ROWS = 4096
WIDTHS = (1024, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
_BF16 = torch.bfloat16
_HEADS = 8


class Kind(NamedTuple):
    """A kind of call. `matrices`: as large as x, that forward and backward have to read or write; 0: it has no backward."""

    name: str
    matrices: tuple[float, float]
    call: Callable[[int], Call]


class Ratios(NamedTuple):
    """Of one direction of a call: its bytes and its predicted time, over the fewest bytes and over their time."""

    bytes: float
    time: float


def kinds() -> Iterator[Kind]:
    """Every kind of call."""
    norm, add, gated, int8 = (
        cases.function("rms_norm", name) for name in ("rms_norm", "add_rms_norm", "gated_rms_norm", "rms_norm_dynamic_quant")
    )

    def of(function: Callable[..., Any], n_rows: int, *, heads: bool = False, bias: bool = False, **options: Any) -> Any:
        def with_width(width: int) -> Call:
            def call() -> tuple[torch.Tensor, ...]:
                parameter, leading = ((_HEADS, width), (ROWS // _HEADS,)) if heads else ((width,), (ROWS,))
                given = [_leaf(*leading, *parameter) for _ in range(n_rows)] + [_leaf(*parameter)]
                found = function(*given, **({"bias": _leaf(*parameter)} if bias else {}), **options)
                results = found if isinstance(found, tuple) else (found,)
                return tuple(result for result in results if result.requires_grad)

            return call

        return with_width

    yield Kind("plain", (2, 3), of(norm, 1))
    yield Kind("a residual", (4, 4), of(add, 2))
    yield Kind("gated", (3, 5), of(gated, 2))
    yield Kind("x gated", (3, 5), of(gated, 2, norm_before_gate=False))
    yield Kind("a weight for each head", (2, 3), of(norm, 1, heads=True))
    yield Kind("a bias", (2, 3), of(norm, 1, bias=True))
    yield Kind("a residual and a bias", (4, 4), of(add, 2, bias=True))
    yield Kind("gated, a bias", (3, 5), of(gated, 2, bias=True))
    yield Kind("int8", (1.5, 0), of(int8, 1))


def ratios(kind: Kind, width: int, toolchain: str) -> Iterator[Ratios]:
    """Of the forward and, where there is one, the backward, without the launches that add partial sums."""
    matrix, bandwidth = ROWS * width * _BF16.itemsize, costs_of(SOC).peak_bandwidth
    for matrices, launches in zip(kind.matrices, launches_of_call(kind.call(width)), strict=True):
        if matrices:
            timings = [time_launch(launch, soc=SOC, toolchain=toolchain) for launch in launches]
            seconds, moved = sum(each.estimate for each in timings), sum(each.least for each in timings)
            yield Ratios(moved / (matrices * matrix), seconds * bandwidth / (matrices * matrix))


def table(toolchain: str) -> str:
    """In Markdown. Every cell: time forward / backward; in brackets the bytes, where they are above 1.05."""
    lines = [
        "| | " + " | ".join(f"{width}" for width in WIDTHS) + " |",
        "|---|" + "---|" * len(WIDTHS),
    ]
    for kind in kinds():
        cells = [" / ".join(map(_cell, ratios(kind, width, toolchain))) for width in WIDTHS]
        lines.append(f"| {kind.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(one: Ratios) -> str:
    return f"{one.time:.2f}" + (f" ({one.bytes:.2f})" if one.bytes > 1.05 else "")


@functools.cache
def _leaf(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=_BF16, requires_grad=True)
