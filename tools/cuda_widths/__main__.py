"""Every tiling of rows from 1 to 70,000 elements on a CUDA device: `python -m tools.cuda_widths [--seconds 540]`.

A kernel is compiled for each width, so launching all widths would take days. What else of a kernel depends on the width, its
tiling, changes at few of them. First every width is planned: every operator runs forward and backward in fp32, fp16 and bf16
with its launches listed and not made. Then the narrowest and the widest width of each tiling run on the device and are
compared with PyTorch's operators in fp32; after them other widths from a seed, until the time is up. Processes share the
device and compile beside one another.

Ends with 1 where something failed or a tiling was not reached. The last line is JSON: what ran, for a README.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import random
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from queue import Empty
from typing import Any, NamedTuple

import npu_tiling
import torch

from .calls import CALLS, DTYPES, Maker
from .tilings import Tilings, merged, tilings

WIDEST = 70_000


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


def run(task: Task) -> Outcome:
    """A task on the CUDA device."""
    torch.manual_seed(task.width)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            wrong = CALLS[task.name](task.width, Maker(task.dtype, torch.device("cuda"))).wrong() or ""
        except Exception:
            wrong = traceback.format_exc(limit=-2).strip()
    fallbacks = [str(w.message) for w in warned if "using" in str(w.message) and "instead" in str(w.message)]
    return Outcome(task, wrong, fallbacks[0] if fallbacks else "")


def _plan(job: tuple[npu_tiling.Device, range, Sequence[str]]) -> Tilings:
    torch.set_num_threads(1)
    return tilings(*job)


def _work(tasks: Any, outcomes: Any, end: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    while time.time() < end:
        try:
            outcomes.put(run(tasks.get(timeout=1)))
        except Empty:
            break
    outcomes.put(None)


def _run_all(tasks: Sequence[Task], jobs: int, end: float) -> Iterator[Outcome]:
    """Outcomes as they come; stops where every process ended, whether or not by its own will."""
    context = multiprocessing.get_context("spawn")
    waiting, outcomes = context.Queue(), context.Queue()
    for task in tasks:
        waiting.put(task)
    workers = [context.Process(target=_work, args=(waiting, outcomes, end), daemon=True) for _ in range(jobs)]
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="cuda_widths", description="Every tiling of rows up to 70,000 elements, on CUDA.")
    parser.add_argument("--seconds", type=float, default=540.0, help="no call begins later (%(default)s)")
    parser.add_argument("--jobs", type=int, default=16, help="processes at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the widths past the edges of tilings (%(default)s)")
    parser.add_argument("--widest", type=int, default=WIDEST, help="widths to plan (%(default)s)")
    parser.add_argument("--extra", type=int, default=1000, help="calls past the edges of tilings at most (%(default)s)")
    parser.add_argument("--operators", nargs="+", choices=tuple(CALLS), default=tuple(CALLS))
    options = parser.parse_args()
    start = time.time()
    device = npu_tiling.device_for(torch.device("cuda:0"))
    assert device is not None
    ranges = [(device, range(1 + job, options.widest + 1, options.jobs), options.operators) for job in range(options.jobs)]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        found = merged(pool.map(_plan, ranges))
    wanted = edges(found)
    planned = round(time.time() - start)
    print(f"{options.widest} widths planned in {planned} s: {len(found)} tilings, {len(wanted)} calls", flush=True)

    extra = [
        task for task, _ in zip(others(options.seed, options.widest, options.operators), range(options.extra), strict=False)
    ]
    ran, outcomes = Counter[str](), []
    for outcome in _run_all([*wanted, *extra], options.jobs, start + options.seconds):
        outcomes.append(outcome)
        ran[outcome.task.name] += 1
        for said in filter(None, (outcome.wrong and f"FAILED {outcome.wrong}", outcome.fallback)):
            print(f"{outcome.task}: {said}", flush=True)
    done = {outcome.task for outcome in outcomes}
    missing = [task for task in wanted if task not in done]
    failures = sum(bool(outcome.wrong) for outcome in outcomes)
    record = {
        "planned": options.widest, "tilings": len(found), "calls": len(outcomes), "at_edges": len(wanted) - len(missing),
        "not_reached": len(missing), "widths": len({task.width for task in done}), "failures": failures,
        "fallbacks": sum(bool(outcome.fallback) for outcome in outcomes), "seed": options.seed,
        "seconds": round(time.time() - start), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"), "each": dict(sorted(ran.items())),
    }  # fmt: skip
    print(json.dumps(record))
    return 1 if failures or missing else 0


if __name__ == "__main__":
    raise SystemExit(main())
