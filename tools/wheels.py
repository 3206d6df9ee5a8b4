"""Wheels of this repository's packages, and fresh environments to try them in, without a network.

A fresh environment is a virtual environment of this Python that holds nothing. What a wheel needs from others (torch, say)
it sees through a folder of links: to the files of those distributions, and of what they need, in the environment that runs
this, and to nothing else. So a package that is not needed, Triton before all, cannot be imported there.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .workspace import ROOT, Package, read_packages

_TAKEN_AWAY = "triton"  # stock Triton, which a torch with CUDA asks for: by `tools.mend_triton`


def build(package: Package, output: Path, root: Path = ROOT) -> Path:
    """Build a package's sdist, and its wheel from that, into `output`; with the build tools of this environment."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(root / package.folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{package.name} does not build:\n{done.stdout}")
    return output / f"{package.module}-{package.version}-py3-none-any.whl"


def build_once(folder: Path, root: Path = ROOT) -> Path:
    """A folder with the sdist and the wheel of every package; of processes that ask at once, one builds and others wait."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            for package in read_packages(root).values():
                build(package, unfinished, root)
            unfinished.rename(folder)
    return folder


def readme_blocks(package: Package, root: Path = ROOT) -> list[str]:
    """The Python blocks of a package's README that run with it alone: those with transformers need more."""
    blocks = re.findall(r"```python\n(.*?)```", (root / package.folder / "README.md").read_text(), re.DOTALL)
    return [block for block in blocks if "transformers" not in block]


class Environment:
    """A virtual environment without pip."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder)
        self.python = folder / "bin" / "python"
        (self.site_packages,) = folder.glob("lib/python*/site-packages")

    def install(self, *requirements: str | Path, find: Path | None = None) -> None:
        """Install wheels, or by name what the folder `find` has; what else they need must be there."""
        links = ["--find-links", str(find)] if find else []
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-index", *links]
        done = subprocess.run([*pip, *map(str, requirements)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, requirements))} cannot be installed:\n{done.stdout}{done.stderr}")

    def installed(self) -> set[str]:
        """The names of what is installed."""
        return {found.metadata["Name"] for found in importlib.metadata.distributions(path=[str(self.site_packages)])}

    def show(self, requirements: Iterable[Requirement], links: Path) -> None:
        """Make installed distributions and what they need importable, through links in `links`."""
        links.mkdir(exist_ok=True)
        for distribution in closure(requirements):
            for entry in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
                link = links / entry
                if not link.is_symlink():
                    link.symlink_to(str(distribution.locate_file(entry)))
            for requirement in map(Requirement, distribution.requires or []):
                if requirement.name == _TAKEN_AWAY:  # so that pip finds it: a name and a version, and nothing to import
                    (version,) = {each.version for each in requirement.specifier}
                    metadata = links / f"{_TAKEN_AWAY}-{version}.dist-info"
                    metadata.mkdir(exist_ok=True)
                    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_TAKEN_AWAY}\nVersion: {version}\n")
        (self.site_packages / "links.pth").write_text(f"{links}\n")

    def run(self, code: str) -> str:
        """What a program prints in this environment; `-I` keeps out this process's paths and variables."""
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # small operations lose by sharing the work
        command = [str(self.python), "-I", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=variables)
        if done.returncode:
            raise RuntimeError(f"fails in {self.python}:\n{done.stdout}{done.stderr}")
        return done.stdout


def closure(requirements: Iterable[Requirement]) -> list[importlib.metadata.Distribution]:
    """The installed distributions that satisfy requirements, with no extras, and what they ask for, and so on.

    Stock Triton is left out.
    """
    found: dict[str, importlib.metadata.Distribution] = {}
    asked: set[tuple[str, frozenset[str]]] = set()
    waiting: list[tuple[Requirement, tuple[str, ...]]] = [(requirement, ("",)) for requirement in requirements]
    while waiting:
        requirement, extras = waiting.pop()
        name, marker = canonicalize_name(requirement.name), requirement.marker
        once = (name, frozenset(requirement.extras))
        is_meant = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
        if not is_meant or name == _TAKEN_AWAY or once in asked:
            continue
        asked.add(once)
        found[name] = importlib.metadata.distribution(name)
        waiting += [(Requirement(each), ("", *requirement.extras)) for each in found[name].requires or []]
    return list(found.values())
