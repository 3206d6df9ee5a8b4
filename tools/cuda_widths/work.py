"""What processes beside one another do: planning ranges of widths, and running tasks."""

from __future__ import annotations

import multiprocessing
import random
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from queue import Empty
from typing import Any, NamedTuple

import npu_tiling
import torch

from .calls import CALLS, DTYPES, Maker
from .tilings import Tilings, merged, tilings


class Task(NamedTuple):
    """One operator at one width in one dtype."""

    name: str
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} {self.width}"


class Outcome(NamedTuple):
    """What came of a task: what was wrong, "" if nothing, and the warning where a smaller tile was taken."""

    task: Task
    wrong: str
    fallback: str


def edges(found: Tilings) -> list[Task]:
    """The narrowest and the widest width of every tiling."""
    return list(dict.fromkeys(Task(name, width, dtype) for (name, dtype, _), both in found.items() for width in both))


def others(seed: int, widest: int, operators: Sequence[str]) -> Iterator[Task]:
    """Every width once, in an order from a seed in which primes and multiples of 16 come early."""
    mixed = list(range(1, widest + 1))
    random.Random(seed).shuffle(mixed)
    primes = [n for n in mixed if n > 1 and all(n % i for i in range(2, int(n**0.5) + 1))]
    multiples = [n for n in mixed if n % 16 == 0]
    for width in dict.fromkeys(chain(*zip(primes, multiples, mixed, strict=False), mixed)):
        for name in operators:
            yield from (Task(name, width, dtype) for dtype in DTYPES)


def run(task: Task, device: torch.device) -> Outcome:
    """A task on a device."""
    torch.manual_seed(task.width)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            wrong = CALLS[task.name](task.width, Maker(task.dtype, device)).wrong() or ""
        except Exception:
            wrong = traceback.format_exc(limit=-2).strip()
    fallbacks = [str(w.message) for w in warned if "using" in str(w.message) and "instead" in str(w.message)]
    return Outcome(task, wrong, fallbacks[0] if fallbacks else "")


def plan(device: npu_tiling.Device, widest: int, operators: Sequence[str], jobs: int) -> Tilings:
    """The tilings of every width up to `widest`, by so many processes."""
    ranges = [(device, range(1 + job, widest + 1, jobs), operators) for job in range(jobs)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return merged(pool.map(_plan, ranges))


def _plan(job: tuple[npu_tiling.Device, range, Sequence[str]]) -> Tilings:
    torch.set_num_threads(1)
    return tilings(*job)


def _work(tasks: Any, outcomes: Any, device: torch.device, end: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    while time.time() < end:
        try:
            outcomes.put(run(tasks.get(timeout=1), device))
        except Empty:
            break
    outcomes.put(None)


def run_all(tasks: Sequence[Task], device: torch.device, jobs: int, end: float) -> Iterator[Outcome]:
    """Outcomes as they come; stops where every process ended, whether or not by its own will."""
    context = multiprocessing.get_context("spawn")
    waiting, outcomes = context.Queue(), context.Queue()
    for task in tasks:
        waiting.put(task)
    workers = [context.Process(target=_work, args=(waiting, outcomes, device, end), daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    left = len(workers)
    while left:
        try:
            outcome = outcomes.get(timeout=30)
        except Empty:
            if all(not worker.is_alive() for worker in workers):
                break
            continue
        if outcome is None:
            left -= 1
        else:
            yield outcome
    waiting.cancel_join_thread()
