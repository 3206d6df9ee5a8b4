"""Direct launches against releases of stock Triton: `python -m tools.stock_triton [VERSION ...]`.

Runs npu-tiling's test_direct_stock.py with each release that tools/versions.toml names, its wheel unpacked into a folder of
its own; pip fetches what is not there. No GPU is needed: the JIT and the compiler are the release's, the driver is made up.
The environment has torch and pytest, and no triton-ascend: `hatch run cuda:stock-triton`, or any with a CPU build of torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_tiling import doctor as installation

from .workspace import ROOT, read_versions

TESTS = ROOT / "shared" / "npu_tiling" / "tests" / "test_direct_stock.py"
FOLDER = Path.home() / ".cache" / "npu-stock-triton"


def fetch(version: str, folder: Path) -> Path:
    """A folder with that Triton alone."""
    target = folder / version
    if not target.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"]
        subprocess.run([*pip, "--target", str(target), f"triton=={version}"], check=True)
    return target


def try_release(target: Path) -> tuple[int, str]:
    """pytest's exit status with the Triton in `target`, and its last lines: why tests were skipped, and the counts."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(ROOT / "shared" / "npu_tiling" / "src")])}
    pytest = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "tools.cpu_plugin", str(TESTS)]
    done = subprocess.run(pytest, cwd=ROOT, env=variables, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    kept = lines if done.returncode else [line for line in lines if line.startswith("SKIPPED") or line == lines[-1]]
    return done.returncode, "\n".join(kept) + done.stderr


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stock-triton", description=__doc__)
    tried = read_versions()["triton"]["tried"]
    parser.add_argument("versions", nargs="*", default=tried, help="releases (default: those of tools/versions.toml)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where wheels are unpacked (default: %(default)s)")
    options = parser.parse_args(arguments)
    if installation.version("triton-ascend"):
        parser.error("triton-ascend is installed: its files would be tried in a stock Triton's place")
    failed = 0
    for version in options.versions:
        status, said = try_release(fetch(version, options.folder.resolve()))
        failed |= status
        print(f"triton {version}: {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
