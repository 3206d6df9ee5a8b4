"""The packages of this repository as their pyproject.toml files describe them, and what is supported."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CORE = "npu-tiling"


@dataclass(frozen=True)
class Package:
    """One pip package of this repository.

    Attributes:
        folder: where it is, from the root: packages/rms_norm.
        name: what pip calls it: npu-rms-norm.
        version: the static version of its pyproject.toml.
        python: `requires-python`.
        requires: its dependencies.
        extras: what each extra requires: one environment does not hold all of them.
        tests: what its tests require, the dependency group "test".
    """

    folder: Path
    name: str
    version: str
    python: SpecifierSet
    requires: tuple[Requirement, ...]
    extras: Mapping[str, tuple[Requirement, ...]]
    tests: tuple[Requirement, ...]

    @property
    def key(self) -> str:
        """What commands call it: rms_norm."""
        return self.folder.name

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def is_operator(self) -> bool:
        return self.folder.parts[0] == "packages"

    def needs(self, name: str) -> Requirement | None:
        """Its requirement of another package of this repository, if it depends on that one."""
        return next((requirement for requirement in self.requires if canonicalize_name(requirement.name) == name), None)


def read_packages(root: Path = ROOT) -> dict[str, Package]:
    """Every package under `root`, by key."""
    files = sorted([*root.glob("packages/*/pyproject.toml"), *root.glob("shared/*/pyproject.toml")])
    packages = (_read(file.read_text(), file.parent.relative_to(root)) for file in files)
    return {package.key: package for package in packages}


@functools.cache
def _read(text: str, folder: Path) -> Package:
    document = tomllib.loads(text)
    project = document["project"]
    extras = project.get("optional-dependencies", {})
    return Package(
        folder=folder,
        name=canonicalize_name(project["name"]),
        version=project["version"],
        python=SpecifierSet(project["requires-python"]),
        requires=tuple(map(Requirement, project.get("dependencies", []))),
        extras={name: tuple(map(Requirement, texts)) for name, texts in extras.items()},
        tests=tuple(map(Requirement, document.get("dependency-groups", {}).get("test", []))),
    )


def with_dependents(names: Iterable[str], packages: Iterable[Package]) -> set[str]:
    """These packages and whatever depends on them, directly or not, in extras and tests too; pip names."""
    packages = list(packages)
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for package in packages:
                needed = (*package.requires, *chain(*package.extras.values()), *package.tests)
                if any(canonicalize_name(requirement.name) == name for requirement in needed):
                    waiting.append(package.name)
    return found


def of_others(requirements: Iterable[Requirement], packages: Iterable[Package]) -> Iterator[Requirement]:
    """What requirements come to beside packages of this repository, whose extras they may name."""
    ours = {package.name: package for package in packages}
    for requirement in requirements:
        if requirement.name not in ours:
            yield requirement
        else:
            for extra in requirement.extras:
                yield from of_others(ours[requirement.name].extras[extra], ours.values())


def read_versions(root: Path = ROOT) -> dict[str, Any]:
    """tools/versions.toml."""
    return tomllib.loads((root / "tools" / "versions.toml").read_text())


def torch_range(versions: Mapping[str, Any]) -> str:
    """The torch that packages ask for: from the oldest that is supported to before the one that follows the newest."""
    (major, oldest), (_, newest) = (versions["torch"][end].split(".")[:2] for end in ("oldest", "newest"))
    return f">={major}.{oldest},<{major}.{int(newest) + 1}"
