"""What a measurement was made with."""

from __future__ import annotations

import importlib
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

UNKNOWN = "unknown"
_OUTPUTS = ("--json", "--markdown", "--brief", "--plot")
_DIRTY, _UNVERSIONED = ".dirty", "unversioned"


@dataclass(frozen=True)
class Environment:
    """Where and how a run was made.

    Attributes:
        device: the chip.
        version: the operator package's version, with the revision of its repository and the run's label.
        software: versions by name.
        command: what was typed.
        timestamp: local time, "YYYY-MM-DD HH:MM:SS".
    """

    device: str
    version: str
    software: dict[str, str]
    command: str
    timestamp: str

    @property
    def date(self) -> str:
        return self.timestamp.partition(" ")[0]

    def __str__(self) -> str:
        software = ", ".join(f"{name} {version}" for name, version in self.software.items())
        return f"{self.device}; {software}; {self.date}; `{self.command}`"


def describe(
    device: str, distribution: str, script: Path, peers: Sequence[str], command: Sequence[str], label: str | None
) -> Environment:
    """The environment of a run.

    Args:
        device: the chip.
        distribution: pip name of the operator's package.
        script: the benchmark's file; its package's folder and repository give the version.
        peers: further pip names to report.
        command: the arguments of `npu-bench`; where results are written is left out.
        label: something to tell apart two states of a working tree; None for nothing.
    """
    version = package_version(distribution, script)
    local = [part for part in (_revision(script), label) if part]
    software = {distribution: version, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "torch_npu"):
        found = _module_version(name)
        if found:
            software[name] = found
    if torch.version.cuda and torch.cuda.is_available():
        software["CUDA"] = torch.version.cuda
    for name in peers:
        found = package_version(name, script)
        if found != UNKNOWN:
            software[name] = found
    return Environment(
        device,
        f"{version}+{'.'.join(local)}",
        software,
        shlex.join(["npu-bench", *_measuring(command)]),
        time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def _measuring(command: Sequence[str]) -> list[str]:
    """Arguments without those that name files for results."""
    kept: list[str] = []
    skip = False
    for argument in command:
        if not skip and argument.partition("=")[0] not in _OUTPUTS:
            kept.append(argument)
        skip = argument in _OUTPUTS
    return kept


def package_version(distribution: str, script: Path) -> str:
    """The version in the package's pyproject.toml in the script's repository, else of what is installed, else "unknown"."""
    for folder in script.resolve().parents:
        for project in (folder / "pyproject.toml", *sorted((folder / "packages").glob("*/pyproject.toml"))):
            if not project.is_file():
                continue
            text = project.read_text(encoding="utf-8")
            found = re.search(r'^version\s*=\s*"([^"]+)"', text, re.MULTILINE)
            if found and re.search(rf'^name\s*=\s*"{re.escape(distribution)}"', text, re.MULTILINE):
                return found.group(1)
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return UNKNOWN


def why_not_repeatable(script: Path) -> str | None:
    """Why no commit says what a script measures; None where one does."""
    revision = _revision(script)
    if revision == _UNVERSIONED:
        return f"{script} is in no git repository"
    return "files differ from the last commit" if revision.endswith(_DIRTY) else None


def _revision(script: Path) -> str:
    """The commit of the script's repository, with "dirty" where files differ from it; "unversioned" outside of one.

    What lies in folders named "results" does not count: a run before this one may have written there.
    """
    git = ["git", "-C", str(script.resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = [*git, "status", "--porcelain", "--", ":/", ":(top,exclude,glob)**/results/**"]
        status = subprocess.run(changed, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return _UNVERSIONED
    return "g" + commit.stdout.strip() + (_DIRTY if status.stdout.strip() else "")


def _module_version(name: str) -> str | None:
    try:
        return str(importlib.import_module(name).__version__)
    except (ImportError, AttributeError):
        return None
