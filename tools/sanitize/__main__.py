"""The run: `python -m tools.sanitize [--tools memcheck racecheck] [--packages rms_norm] [--quick]`.

Every part of every package's calls runs once without a tool, which compiles the kernels, and then under each tool. Memory
is not cached (PYTORCH_NO_CUDA_MEMORY_CACHING), so that every tensor is an allocation of its own. Of PyTorch's and cuBLAS's
kernels only those are watched whose names look like ours, and what a tool says of them is counted apart. Ends with 1 where
a tool found something in a kernel of ours, or did not finish.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .calls import CALLS
from .output import Findings, read

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PARTS = {"rms_norm": 4, "embedding": 2, "attn_res": 9, "fused_linear_cross_entropy": 4}
SECONDS = 400  # for one part under one tool
QUICK = 4
_SHOWN = 10
# What the names of a package's kernels have in common and those of cuBLAS have not, which racecheck fails at.
_NAMES = {"attn_res": "attn_res_", "fused_linear_cross_entropy": "cross_entropy_"}
_ANY_NAME = "_kernel"


class Job(NamedTuple):
    """A part of a package's calls, under a tool ("" for none)."""

    tool: str
    package: str
    part: int


class Done(NamedTuple):
    """How a job ended."""

    job: Job
    text: str
    code: int | None
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="sanitize", description="Every kernel under compute-sanitizer, on a CUDA device.")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--packages", nargs="+", choices=tuple(CALLS), default=tuple(CALLS))
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes at a time (%(default)s)")
    parser.add_argument("--sanitizer", default=_sanitizer(), help="compute-sanitizer (%(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for what the tools print")
    parser.add_argument("--quick", action="store_true", help=f"one call in {QUICK}")
    options = parser.parse_args()
    every = QUICK if options.quick else 1
    if options.sanitizer is None:
        print("compute-sanitizer is not on the PATH and not in /usr/local/cuda/bin: it comes with the CUDA toolkit.")
        return 2
    said = subprocess.run([options.sanitizer, "--version"], capture_output=True, text=True).stdout
    version = next((line for line in reversed(said.splitlines()) if line.strip()), "unknown")
    print(version, flush=True)

    def run(job: Job) -> Done:
        return _run(job, options.sanitizer, options.out, every)

    good = True
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = [(package, part) for part in range(max(PARTS.values())) for package in options.packages]
        parts = [(package, part) for package, part in parts if part < PARTS[package]]
        alone = [pool.submit(run, Job("", *part)) for part in parts]
        planted = {tool: pool.submit(run, Job(tool, "planted", 0)) for tool in ("memcheck", "initcheck")}
        good &= _report("no tool", [future.result() for future in alone])
        for tool, future in planted.items():
            found = bool(read(future.result().text).ours)
            good &= found
            print(f"planted, {tool}: {'found' if found else 'NOT FOUND: this tool sees no kernels of ours'}", flush=True)
        watched = {tool: [pool.submit(run, Job(tool, *part)) for part in parts] for tool in options.tools}
        for tool, futures in watched.items():
            print(f"{tool}: {' '.join(_command(Job(tool, 'PACKAGE', 0), options.sanitizer, every))}", flush=True)
            good &= _report(tool, [future.result() for future in futures])
    print("clean" if good else "NOT CLEAN")
    return 0 if good else 1


def _sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def _command(job: Job, sanitizer: str, every: int) -> list[str]:
    command = [sys.executable, "-m", "tools.sanitize.part", job.package, str(job.part), str(PARTS.get(job.package, 1))]
    command += ["--every", str(every)]
    if not job.tool:
        return command
    kernels = ("--kernel-name", f"kns={_NAMES.get(job.package, _ANY_NAME)}")
    if job.tool == "initcheck":
        command.append("--mark-written")
    return [sanitizer, "--tool", job.tool, "--print-limit", "1000", "--report-api-errors", "no", *kernels, *command]


def _run(job: Job, sanitizer: str, folder: Path | None, every: int) -> Done:
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            _command(job, sanitizer, every), capture_output=True, text=True, env=environment, timeout=SECONDS
        )
        text, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        text, code = said.decode(errors="replace") if isinstance(said, bytes) else said, None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{job.tool or 'none'}-{job.package}-{job.part}.txt").write_text(text)
    return Done(job, text, code, time.monotonic() - started)


def _report(title: str, results: Iterable[Done]) -> bool:
    """Prints what one tool said of every part; whether it said nothing of a kernel of ours."""
    launched: Counter[str] = Counter()
    total = Findings(Counter(), Counter(), [])
    calls = variants = 0
    good, longest = True, 0.0
    failed: list[str] = []
    for done in results:
        longest = max(longest, done.seconds)
        lines = [line for line in done.text.splitlines() if line.startswith('{"calls"')]
        found = read(done.text)
        finished = bool(lines) and (not done.job.tool or bool(found.summaries))
        if not finished:
            good = False
            end = "out of time" if done.code is None else f"exit status {done.code}"
            tail = "\n    ".join(done.text.splitlines()[-8:])
            print(f"  {title}, {done.job.package} part {done.job.part}: DID NOT FINISH, {end}\n    {tail}")
        if lines:
            told = json.loads(lines[-1])
            calls, variants = calls + told["calls"], variants + told["variants"]
            launched.update(told["launched"])
            failed += told["failed"]
        total.ours.update(found.ours)
        total.others.update(found.others)
    ours, others = total.ours.total(), total.others.total()
    kernels = f"{len(launched)} kernels, {variants} tilings, {launched.total()} launches in {calls} calls"
    print(
        f"  {title}: {ours} findings in kernels of ours, {others} elsewhere; {kernels}; longest part {longest:.0f} s",
        flush=True,
    )
    for failure in failed[:_SHOWN]:
        print(f"    FAILED {failure}")
    for name, findings in (("ours", total.ours), ("elsewhere", total.others)):
        for said, times in findings.most_common(_SHOWN):
            print(f"    {name}, {times} times: {said[:200]}")
    return good and not ours and not failed


if __name__ == "__main__":
    sys.exit(main())
