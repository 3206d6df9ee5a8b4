"""The CI jobs that a change needs, as the JSON matrix of GitHub Actions: `hatch run ci:matrix origin/main`.

A file belongs to the package whose folder it is in and selects that package and its dependents, transitively. A file that no
package owns selects every package; prose outside packages, and what makes the documentation of it, selects none.
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


def affected(paths: Iterable[str], packages: Mapping[str, Package]) -> list[Package]:
    """The packages that a change of these files (from the root) may break."""
    changed: set[str] = set()
    for path in map(PurePosixPath, paths):
        owner = next((package for package in packages.values() if path.is_relative_to(package.folder)), None)
        if owner is not None:
            changed.add(owner.name)
        elif not _is_prose(path):
            return list(packages.values())
    names = with_dependents(changed, packages.values())
    return [package for package in packages.values() if package.name in names]


def _is_prose(path: PurePosixPath) -> bool:
    return path.suffix == ".md" or path.name in ("LICENSE", "CITATION.cff") or path.is_relative_to("tools/docs")


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
    paths: list[str] | None = None
    if options.base == "-":
        paths = sys.stdin.read().split("\n")
    elif options.base:
        paths = changed_files(options.base, options.head)
    chosen = packages.values() if paths is None else affected(filter(None, paths), packages)
    if options.operators:
        print(json.dumps({"include": [{"package": package.key} for package in chosen if package.is_operator]}))
    else:
        print(json.dumps((newest_jobs if options.newest else jobs)(chosen, read_versions())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
