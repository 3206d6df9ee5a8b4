"""The steps of an acceptance run. Each is a process of its own: one that dies takes nothing else with it."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..workspace import ROOT

# The sizes that were published for existing Ascend kernels: a sweep of each benchmark, and the points of it.
SIZES = {
    "rms_norm": ("short", None),
    "embedding": ("vocabulary", None),
    "attn_res": ("tokens", tuple(f"T{tokens}_N8_D4096" for tokens in (1024, 2048, 4096, 8192))),
    "fused_linear_cross_entropy": ("tokens", tuple(f"{tokens}x4096x128256" for tokens in (4096, 8192, 16384))),
}
_SHOWN = 4000  # characters of what a process said last


def tests(paths: Sequence[Path], device: str, folder: Path) -> dict[str, Any]:
    """Every test that asks for a device, on this one."""
    file = folder / "tests.xml"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--npu-device", device, f"--junitxml={file}", *map(str, paths)]
    found = _process(command)
    return {**found, **(outcomes(file) if file.exists() else {"counts": {}, "failures": [], "skips": {}})}


def outcomes(file: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, which failed with what, and the reasons of the skips."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures, skips = [], {}  # type: list[dict[str, str]], dict[str, int]
    for case in ElementTree.parse(file).iter("testcase"):
        wrong = case.find("failure")
        wrong = case.find("error") if wrong is None else wrong
        skipped = case.find("skipped")
        if wrong is not None:
            counts["failed"] += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            failures.append({"test": name, "message": wrong.get("message", ""), "text": (wrong.text or "")[-_SHOWN:]})
        elif skipped is not None:
            counts["skipped"] += 1
            reason = skipped.get("message", "")
            skips[reason] = skips.get(reason, 0) + 1
        else:
            counts["passed"] += 1
    return {"counts": counts, "failures": failures, "skips": skips}


def tiles(package: str, device: str, folder: Path, matching: str = "") -> dict[str, Any]:
    """Every tile of a package through the device's compiler, and launched; of calls with `matching` in their label."""
    file = folder / f"tiles_{package}.jsonl"
    file.unlink(missing_ok=True)
    found = _process([sys.executable, "-m", "tools.acceptance.tiles", package, device, str(file), matching])
    calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {**found, "calls": calls}


def times(package: str, device: str, folder: Path) -> dict[str, Any]:
    """The published sizes, beside torch and the vendor's operators; as npu-bench records them."""
    file = folder / f"times_{package}.json"
    file.unlink(missing_ok=True)  # npu-bench appends
    found = _process([sys.executable, "-m", "npu_bench", *bench_arguments(package, device, file)])
    return {**found, "records": json.loads(file.read_text()) if file.exists() else []}


def bench_arguments(package: str, device: str, file: Path) -> list[str]:
    """What npu-bench is called with."""
    sweep, points = SIZES[package]
    cases = ["--cases", ",".join(points)] if points else []
    return [package, "--device", device, "--json", str(file), "--allow-dirty", "--sweep", sweep, *cases]


def _process(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return {"command": command[1:], "status": done.returncode, "said": done.stdout[-_SHOWN:]}
