"""A package's tests against its built wheel, in a clean environment: `hatch run ci:wheel-test rms_norm --python 3.12`.

What is not of this repository comes from the package index.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import mend_triton, wheels
from .ci_matrix import jobs
from .workspace import CORE, ROOT, Package, read_packages, read_versions

LAYERS = ("cpu", "ascend")


def prepare(folder: Path, options: argparse.Namespace) -> Path:
    """A virtual environment with the package's wheel and what its tests need; returns its Python."""
    packages = read_packages()
    package = packages[options.package]
    ours = {other.name: other for other in packages.values()}
    built = folder / "wheels"
    if options.wheel is None:
        wheel = wheels.build(package, built)
    else:
        (wheel,) = options.wheel.glob(f"{package.module}-{package.version}-*.whl")
    tests = [str(requirement) for requirement in package.tests if requirement.name not in ours]
    tests += [f"torch=={options.torch}"] if options.torch else []
    tests += lowest(package) if options.lowest_core else []
    needed = ["npu-offline"] if options.layer == "ascend" else []
    needed += [] if options.lowest_core else [CORE]
    local = [str(wheels.build(ours[name], built)) for name in needed if name != package.name]
    _run([f"python{options.python}", "-m", "venv", str(folder / "venv")])
    python = folder / "venv" / "bin" / "python"
    _run([str(python), "-m", "pip", "install", str(wheel), *local, *tests])
    if options.layer == "ascend":
        mend_triton.mend(python)
    return python


def lowest(package: Package) -> list[str]:
    """The requirement of the lowest npu-tiling that a package allows; none where it needs none."""
    bounds = [each.version for each in getattr(package.needs(CORE), "specifier", ()) if each.operator == ">="]
    return [f"{CORE}=={bound}" for bound in bounds]


def run_tests(python: Path, package: Package, layer: str) -> int:
    """pytest's exit status for the package's tests."""
    plugins = ["-p", "tools.suite"] + ([] if layer == "ascend" else ["-p", "tools.cpu_plugin"])
    if layer == "ascend":
        _run([str(python.parent / "npu-offline"), "fetch"])
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the wheel, and not its source
    command = [str(python), "-m", "pytest", *plugins, str(package.folder / "tests")]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


def ends(key: str, versions: Mapping[str, Any]) -> list[list[str]]:
    """Options of a run for the oldest and the newest Python here, and the oldest and newest torch of each."""
    every = [job for job in jobs([read_packages()[key]], versions)["include"] if shutil.which(f"python{job['python']}")]
    chosen = [job for job in every if job["python"] in (every[0]["python"], every[-1]["python"])]
    return [["--python", job["python"], "--torch", job["torch"]] for job in chosen]


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    versions = read_versions()
    parser = argparse.ArgumentParser(prog="wheel-test", description=__doc__)
    parser.add_argument("package", choices=sorted(read_packages()))
    parser.add_argument("--python", default=versions["python"]["ascend"], choices=versions["python"]["packages"])
    parser.add_argument("--torch", help="the torch to install (default: the newest that the package allows)")
    parser.add_argument("--layer", default="cpu", choices=LAYERS, help="ascend: on the emulated NPU too, with npu-offline")
    parser.add_argument("--wheel", type=Path, help="the folder of a wheel that is already built (default: build one)")
    parser.add_argument(
        "--lowest-core", action="store_true", help="the lowest npu-tiling it allows, from the index, not ours"
    )
    about = (
        "with the oldest and the newest Python that is on the PATH, each with the oldest and the newest torch it can have"
    )
    parser.add_argument("--ends", action="store_true", help=about)
    options = parser.parse_args(arguments)
    if options.ends:
        return max(main([options.package, *job]) for job in ends(options.package, versions))
    if shutil.which(f"python{options.python}") is None:
        parser.error(f"there is no python{options.python} on the PATH")
    with tempfile.TemporaryDirectory() as folder:
        python = prepare(Path(folder), options)
        return run_tests(python, read_packages()[options.package], options.layer)


if __name__ == "__main__":
    sys.exit(main())
