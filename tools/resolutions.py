"""What pip would install from the public index, recorded: `python -m tools.resolutions` writes tests/resolutions.json anew.

Tests make such environments again from the record, without a network, and try the cure of `tools.mend_triton` on them.
Run it where pip knows the public index alone, on Linux and with the Python of the Ascend toolchain; pip is told which
machine it is on, x86-64 and aarch64 in turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from npu_tiling.installation.triton import TRITON_ASCEND
from packaging.requirements import Requirement

from .install_lines import TORCH_NPU
from .workspace import ROOT, of_others, read_packages, read_versions

FILE = ROOT / "tests" / "resolutions.json"
MACHINES = ("x86_64", "aarch64")
# `--platform` chooses wheels; what markers are evaluated with is the machine's own. 28: of glibc 2.28, the wheels of torch.
_PIP_ON = """
import platform, sys
platform.machine = lambda: {machine!r}
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
_PLATFORMS = ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 29)))


def wanted() -> dict[str, list[str]]:
    """The environments, by name, the machine last: what pip is asked for, but for packages of this repository."""
    environment = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]
    (torch,) = (text for text in environment["dependencies"] if text.startswith("torch=="))
    ascend = f"triton-ascend=={TRITON_ASCEND}"
    packages = read_packages()
    operator, core = packages["rms_norm"], packages["npu_tiling"]
    extra = [*of_others(operator.requires, packages.values()), *core.extras["npu"]]  # npu-rms-norm[npu]
    asked = {
        "development": [torch, ascend],
        "oldest torch": [f"torch=={read_versions()['torch']['oldest']}", ascend],
        "newest torch": [f"torch=={read_versions()['torch']['newest']}", ascend],
        "Ascend": [f"torch-npu=={TORCH_NPU}", *map(str, extra)],
    }
    return {f"{name}, {machine}": requirements for name, requirements in asked.items() for machine in MACHINES}


def resolve(requirements: list[str], machine: str) -> list[dict[str, Any]]:
    """The distributions that pip would install, by name, as their metadata describe them."""
    platforms = [option for name in _PLATFORMS for option in ("--platform", f"{name}_{machine}")]
    pip = [sys.executable, "-c", _PIP_ON.format(machine=machine), "install", "--quiet", "--dry-run", "--ignore-installed"]
    options = ["--only-binary=:all:", *platforms, "--report", "-"]
    done = subprocess.run([*pip, *options, *requirements], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = sorted((item["metadata"] for item in json.loads(done.stdout)["install"]), key=lambda item: item["name"].lower())
    return [
        {"name": item["name"], "version": item["version"], "requires": on(machine, item.get("requires_dist", ()))}
        for item in found
    ]


def on(machine: str, requirements: Iterable[str]) -> list[str]:
    """Those that are asked for on a machine, without the condition."""
    found = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"platform_machine": machine, "extra": ""}):
            requirement.marker = None
            found.append(str(requirement))
    return found


def main() -> None:
    record = {}
    for name, asked in wanted().items():
        machine = name.rpartition(", ")[2]
        record[name] = {"asked": asked, "installed": resolve(asked, machine)}
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    print(FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE)


if __name__ == "__main__":
    main()
