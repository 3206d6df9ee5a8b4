"""attn_res of several widths, stacked and as a list: ours, liger's and fla's kernels for Ascend beside the floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from npu_offline import LaunchRecord, OfflineError, record
from npu_offline.timing import costs_of, time_launch
from rich.table import Table
from torch import Tensor

from . import cases, fla, peers
from .published import SOC

WIDTHS, BLOCKS, TOKENS = (4096, 7168), 8, 8192
_BF16 = torch.bfloat16


@dataclass(frozen=True)
class Depth:
    """One prediction. Times in seconds, without what launches cost.

    Attributes:
        width: columns of a block in bf16.
        listed: whether the blocks are tensors of their own. liger and fla copy those into one, which is not counted.
        direction: "forward" or "backward".
        whose: "ours", "liger" or "fla".
        kernels: predicted for all kernels of Triton.
        floor: of the bytes that must move, (N + 1) T D elements forward and (2N + 1) T D backward, at peak bandwidth.
        problem: why there is no prediction.
    """

    width: int
    listed: bool
    direction: str
    whose: str
    kernels: float
    floor: float
    problem: str = ""


def depths(toolchain: str, tokens: int = TOKENS) -> Iterator[Depth]:
    """Predictions for every width and form, ours first; those of peers that are installed."""
    for width in WIDTHS:
        for listed in (False, True):
            for whose, function in (("ours", _ours), ("liger", _liger), ("fla", _fla)):
                if whose == "liger" and peers.missing() or whose == "fla" and fla.missing():
                    continue
                given = function(width, listed, tokens)
                for direction, launches in zip(("forward", "backward"), given, strict=True):
                    rows = BLOCKS + 1 if direction == "forward" else 2 * BLOCKS + 1
                    floor = rows * tokens * width * 2 / costs_of(SOC).peak_bandwidth
                    yield _timed(Depth(width, listed, direction, whose, 0.0, floor), launches, toolchain)


def table(found: list[Depth]) -> Table:
    lines = Table("columns", "blocks", "pass", "whose", "predicted µs", "kernels / floor")
    for one in found:
        times = ("-", "-") if one.problem else (f"{one.kernels * 1e6:,.0f}", f"{one.kernels / one.floor:.2f}")
        lines.add_row(str(one.width), "a list" if one.listed else "stacked", one.direction, one.whose, *times)
    return lines


def _timed(depth: Depth, launches: list[LaunchRecord], toolchain: str) -> Depth:
    try:
        timings = [time_launch(launch, soc=SOC, toolchain=toolchain) for launch in launches]
    except OfflineError as error:
        return Depth(depth.width, depth.listed, depth.direction, depth.whose, 0.0, depth.floor, str(error))
    kernels = sum(timing.estimate - timing.launch for timing in timings)
    return Depth(depth.width, depth.listed, depth.direction, depth.whose, kernels, depth.floor)


_Launches = tuple[list[LaunchRecord], list[LaunchRecord]]


def _ours(width: int, listed: bool, tokens: int) -> _Launches:
    stack = torch.empty(BLOCKS, tokens, width, dtype=_BF16)
    given = [block.requires_grad_() for block in stack.unbind()] if listed else stack.requires_grad_()
    function = cases.operator("attn_res")
    with record(SOC) as forward:
        h = function(given, _weight(width), _weight(width))
    with record(SOC) as backward:
        h.backward(torch.empty_like(h))
    return list(forward), list(backward)


def _liger(width: int, listed: bool, tokens: int) -> _Launches:
    stack = torch.empty(BLOCKS, tokens, width, dtype=_BF16, requires_grad=True)
    function = peers.module("attn_res").LigerAttnResFunction
    with peers.on_chip(SOC):
        with record(SOC) as forward:
            h = function.apply(stack, _weight(width), _weight(width), 1e-6)
        with record(SOC) as backward:
            h.backward(torch.empty_like(h))
    return list(forward), list(backward)


def _fla(width: int, listed: bool, tokens: int) -> _Launches:
    blocks = list(torch.empty(BLOCKS, tokens, width, dtype=_BF16).unbind())
    query, weight = (one.detach() for one in (_weight(width), _weight(width)))
    return fla.launches(blocks, query, weight, torch.empty(tokens, width, dtype=_BF16), SOC)


def _weight(width: int) -> Tensor:
    return torch.empty(width, dtype=_BF16, requires_grad=True)
