"""How much of the time of collectives lies under other kernels, from a profile of one step on the first rank."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from .measuring import wait

_COLLECTIVE = "nccl"  # in a kernel's name
Span = tuple[float, float]  # start and end


class Kernel(NamedTuple):
    """One that ran on a GPU, with its times in microseconds."""

    name: str
    start: float
    end: float


def profiled(step: Callable[[], Any], rank: int, device: torch.device) -> dict[str, float | None]:
    """`shares` of a step on the first rank. All ranks run two steps: a profiler's first is slow, and the second counts."""
    if device.type != "cuda":
        return shares([])
    if rank:
        for _ in range(2):
            _one(step, device)
        return shares([])
    plan = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=plan) as profiler:
        for _ in range(2):
            _one(step, device)
            profiler.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return shares(after_barrier([
        Kernel(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel"
    ]))  # fmt: skip


def _one(step: Callable[[], Any], device: torch.device) -> None:
    dist.barrier()  # a rank whose profiler starts late would make the other's collectives wait
    wait(device)
    step()
    wait(device)


def after_barrier(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Without what ran up to the end of the first collective."""
    end = min((kernel.end for kernel in kernels if _COLLECTIVE in kernel.name), default=0.0)
    return [kernel for kernel in kernels if kernel.start >= end]


def shares(kernels: Sequence[Kernel]) -> dict[str, float | None]:
    """Time of collectives, its share in which other kernels run too, and time in which nothing runs; None without them."""
    collectives = _union((start, end) for name, start, end in kernels if _COLLECTIVE in name)
    others = _union((start, end) for name, start, end in kernels if _COLLECTIVE not in name)
    if not collectives or not others:
        return {"collectives_ms": None, "hidden_percent": None, "idle_ms": None}
    busy = _union([*collectives, *others])
    hidden = _length(collectives) + _length(others) - _length(busy)
    return {
        "collectives_ms": _length(collectives) / 1e3,
        "hidden_percent": 100 * hidden / _length(collectives),
        "idle_ms": (busy[-1][1] - busy[0][0] - _length(busy)) / 1e3,
    }


def _union(spans: Iterable[Span]) -> list[Span]:
    """Spans that do not meet, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
