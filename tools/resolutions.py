"""What pip would install from the public index, recorded: `python -m tools.resolutions` writes tests/resolutions.json anew.

Tests make such environments again from the record, without a network, and try the cure of `tools.mend_triton` on them.
Run it where pip knows the public index alone, on Linux and with the Python of the Ascend toolchain.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from npu_tiling.installation import TRITON_ASCEND

from .install_lines import TORCH_NPU
from .workspace import ROOT, read_versions

FILE = ROOT / "tests" / "resolutions.json"


def wanted() -> dict[str, list[str]]:
    """The environments, by name: what pip is asked for, but for packages of this repository."""
    environment = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]["default"]
    (torch,) = (text for text in environment["dependencies"] if text.startswith("torch=="))
    ascend = f"triton-ascend=={TRITON_ASCEND}"
    return {
        "development": [torch, ascend],
        "oldest torch": [f"torch=={read_versions()['torch']['oldest']}", ascend],
        "newest torch": [f"torch=={read_versions()['torch']['newest']}", ascend],
        "Ascend": [f"torch-npu=={TORCH_NPU}", ascend],
    }


def resolve(requirements: list[str]) -> list[dict[str, Any]]:
    """The distributions that pip would install, by name, as their metadata describe them."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
    done = subprocess.run([*pip, "--report", "-", *requirements], capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = sorted((item["metadata"] for item in json.loads(done.stdout)["install"]), key=lambda item: item["name"].lower())
    return [
        {
            "name": item["name"],
            "version": item["version"],
            "requires": [text for text in item.get("requires_dist", ()) if "extra ==" not in text],
        }
        for item in found
    ]


def main() -> None:
    record = {name: {"asked": asked, "installed": resolve(asked)} for name, asked in wanted().items()}
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    print(FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE)


if __name__ == "__main__":
    main()
