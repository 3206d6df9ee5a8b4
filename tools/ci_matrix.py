"""The CI jobs that a change needs, as the JSON matrix of GitHub Actions: `hatch run ci:matrix origin/main`.

A changed package has three jobs: the oldest Python with the oldest torch, the Ascend toolchain's Python with the newest
torch, and the newest of both. Where its sources or metadata changed, each package that depends on it, transitively, has the
second alone. So has every package where a file changes that its tests run with. A job of its own runs the tests of the root
for every change; every version of every package runs at night.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .workspace import ROOT, Package, read_packages, read_versions, with_dependents

EVERY_VERSION = "tools/versions.toml"
RUN_WITH = frozenset(
    (
        *(
            f"tools/{name}.py"
            for name in ("__init__", "ci_matrix", "cpu_plugin", "mend_triton", "suite", "wheel_test", "wheels", "workspace")
        ),
        *("conftest.py", "hatch.toml", "pytest.ini", ".github/workflows/ci.yml"),
    )
)
"""Files that the tests of every package run with."""


def affected(paths: Iterable[str], packages: Mapping[str, Package]) -> tuple[list[Package], list[Package]]:
    """The packages that a change of these files (from the root) changes, and the others that it may break."""
    changed: set[str] = set()
    seen_by_others: set[str] = set()
    all_run = False
    for path in map(PurePosixPath, paths):
        owner = next((package for package in packages.values() if path.is_relative_to(package.folder)), None)
        if owner is not None:
            changed.add(owner.name)
            if path.relative_to(owner.folder).parts[0] in ("src", "pyproject.toml"):
                seen_by_others.add(owner.name)
        all_run |= str(path) in RUN_WITH or (owner is None and path.parts[0] in ("packages", "shared", "testing"))
    names = {package.name for package in packages.values()}
    reached = names if all_run else with_dependents(seen_by_others, packages.values())
    others = [package for package in packages.values() if package.name in reached - changed]
    return [package for package in packages.values() if package.name in changed], others


def change_jobs(
    paths: Sequence[str], packages: Mapping[str, Package], versions: Mapping[str, Any]
) -> dict[str, list[dict[str, str]]]:
    """The jobs for a change of these files."""
    if EVERY_VERSION in paths:
        return jobs(packages.values(), versions)
    changed, others = affected(paths, packages)
    include = []
    for package in (*changed, *others):
        every = jobs([package], versions)["include"]
        (*_, ascend) = (job for job in every if job["layer"] == "ascend")
        include += [job for job in every if job in ((every[0], ascend, every[-1]) if package in changed else (ascend,))]
    return {"include": include}


def jobs(packages: Iterable[Package], versions: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """One job for every package, Python that it supports, and the oldest and the newest torch that this Python can have."""
    include = []
    for package in packages:
        for python in versions["python"]["packages"]:
            if package.python.contains(f"{python}.0"):
                found = torches(python, versions)
                for torch in dict.fromkeys((found[0], found[-1])):
                    include.append(_job(package, python, torch, versions))
    return {"include": include}


def newest_jobs(packages: Iterable[Package], versions: Mapping[str, Any]) -> dict[str, list[dict[str, str]]]:
    """One job for every package on its newest Python, and the newest torch that there is: no version is named."""
    include = []
    for package in packages:
        python = [python for python in versions["python"]["packages"] if package.python.contains(f"{python}.0")][-1]
        include.append(_job(package, python, "", versions))
    return {"include": include}


def torches(python: str, versions: Mapping[str, Any]) -> list[str]:
    """The supported releases of torch that have wheels for a Python, oldest first."""
    oldest, newest = (Version(versions["torch"][end]) for end in ("oldest", "newest"))
    return [
        torch
        for torch, pythons in versions["torch"]["python"].items()
        if oldest <= Version(torch) <= newest and SpecifierSet(pythons).contains(f"{python}.0")
    ]


def _job(package: Package, python: str, torch: str, versions: Mapping[str, Any]) -> dict[str, str]:
    layer = "ascend" if python == versions["python"]["ascend"] else "cpu"
    return {"package": package.key, "python": python, "torch": torch, "layer": layer}


def changed_files(base: str, head: str, root: Path = ROOT) -> list[str] | None:
    """Files that differ between `head` and where it left `base`; None where `base` is no commit: zeros, on a new branch."""
    command = ["git", "diff", "--name-only", "--no-renames", f"{base}...{head}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ci_matrix", description=__doc__)
    parser.add_argument("base", nargs="?", help="the commit to compare with; -: files on standard input; none: all jobs")
    parser.add_argument("head", nargs="?", default="HEAD", help="the commit that is tested (default: HEAD)")
    parser.add_argument("--operators", action="store_true", help="one job for each operator, whatever the versions")
    parser.add_argument("--newest", action="store_true", help="one job for each package, with the newest of everything")
    options = parser.parse_args(arguments)
    packages = read_packages()
    if options.operators:
        found: dict[str, list[dict[str, str]]] = {
            "include": [{"package": key} for key, package in packages.items() if package.is_operator]
        }
    elif options.newest:
        found = newest_jobs(packages.values(), read_versions())
    else:
        paths = (
            sys.stdin.read().split() if options.base == "-" else options.base and changed_files(options.base, options.head)
        )
        every = not isinstance(paths, list)  # none named, or no commit to compare with
        found = jobs(packages.values(), read_versions()) if every else change_jobs(paths, packages, read_versions())
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
