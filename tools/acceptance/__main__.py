"""Acceptance on a real NPU: `python -m tools.acceptance`, in the environment that has torch_npu and triton-ascend.

Finds out what chip and software are there, runs every test on it, compiles and launches every tile with the device's own
compiler, times the sizes that were published for existing Ascend kernels beside torch and the vendor's operators, and writes
report.json and report.html. Send both back. What it takes, beside torch, torch_npu, triton-ascend and CANN:

    pip install --no-deps -e shared/npu_tiling -e shared/npu_offline -e shared/npu_bench -e packages/rms_norm \\
        -e packages/embedding -e packages/attn_res -e packages/fused_linear_cross_entropy
    pip install pytest jinja2 packaging rich xdsl pybind11

`--device emulated` rehearses it without a chip: all but the times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_offline.plugin import why_not
from rich.console import Console

from ..workspace import ROOT
from . import predictions, steps, system
from . import report as page

STEPS = ("tests", "tiles", "times")
DEVICES = ("npu", "emulated")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 if anything was wrong, 2 if there is no such device."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    missing = why_not(options.device)
    if missing is not None:
        print(f"--device {options.device} cannot be: {missing}.", file=sys.stderr)
        return 2
    if options.device != "npu" and "times" in options.steps:
        if options.steps is not STEPS:
            print("--steps has times and must not where the device is emulated, which gives none.", file=sys.stderr)
            return 2
        options.steps = STEPS[:-1]
    report = run(options)
    report["command"] = shlex.join(["python", "-m", "tools.acceptance", *arguments])
    (options.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.output / "report.html").write_text(page.html(report))
    wrong = page.verdict(report)
    console = Console(highlight=False)
    for line in wrong:
        console.print(f"[bold red]{line}[/]")
    console.print(f"Please send back {options.output / 'report.json'} and {options.output / 'report.html'}.")
    return int(bool(wrong))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The report of the steps that were asked for."""
    console, start = Console(highlight=False), time.perf_counter()
    options.output.mkdir(parents=True, exist_ok=True)
    folder, device = options.output.resolve(), options.device
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report: dict[str, Any] = {"format": 1, "device": device, "date": today, "system": system.describe(device)}
    if "tests" in options.steps:
        console.print("tests")
        paths = options.tests or [ROOT / "packages" / package / "tests" for package in options.packages]
        report["tests"] = steps.tests(paths, device, folder)
    if "tiles" in options.steps:
        report["tiles"] = {}
        for package in options.packages:
            console.print(f"tiles of {package}")
            report["tiles"][package] = steps.tiles(package, device, folder, options.calls)
    if "times" in options.steps:
        report["predicted"] = predictions.load()
        report["times"] = {}
        for package in options.packages:
            console.print(f"times of {package}")
            report["times"][package] = steps.times(package, device, folder)
    report["seconds"] = round(time.perf_counter() - start)
    return report


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="acceptance", description=__doc__, formatter_class=raw)
    parser.add_argument("--device", choices=DEVICES, default="npu", help="(%(default)s)")
    parser.add_argument("--packages", nargs="+", choices=tuple(steps.SIZES), default=tuple(steps.SIZES), help="(all)")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="(all)")
    parser.add_argument("--tests", nargs="+", type=Path, default=(), help="files, instead of the packages' own tests")
    parser.add_argument("--calls", default="", metavar="TEXT", help="tiles: only calls that have this in their label")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "acceptance", help="folder (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
