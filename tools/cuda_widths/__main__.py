"""Every tiling of rows from 1 to 70,000 elements on a CUDA device: `python -m tools.cuda_widths [--seconds 540]`.

A kernel is compiled for each width, so launching all widths would take days. What else of a kernel depends on the width, its
tiling, changes at few of them. First every width is planned: every operator runs forward and backward in fp32, fp16 and bf16
with its launches listed and not made. Then the narrowest and the widest width of each tiling run on the device and are
compared with PyTorch's operators in fp32; after them other widths from a seed, until the time is up. Processes share the
device and compile beside one another.

Ends with 1 where something failed or a tiling was not reached. The last line is JSON: what ran, for the documentation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections import Counter

import npu_tiling
import torch

from .calls import CALLS
from .work import edges, others, plan, run_all

WIDEST = 70_000


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
    found = plan(device, options.widest, options.operators, options.jobs)
    wanted = edges(found)
    planned = round(time.time() - start)
    print(f"{options.widest} widths planned in {planned} s: {len(found)} tilings, {len(wanted)} calls", flush=True)

    extra = [
        task for task, _ in zip(others(options.seed, options.widest, options.operators), range(options.extra), strict=False)
    ]
    ran, outcomes = Counter[str](), []
    for outcome in run_all([*wanted, *extra], torch.device("cuda"), options.jobs, start + options.seconds):
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
