"""Whether a package works with the lowest npu-tiling that it allows, and not only with the one beside it."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from . import wheels
from .workspace import CORE, Package, of_others, read_packages

IMPORT_EVERYTHING = """
import importlib, pkgutil, {module}
for found in pkgutil.walk_packages({module}.__path__, "{module}."):
    if not found.name.split(".")[1].startswith("kernels"):  # device code, which imports Triton
        importlib.import_module(found.name)
"""


def lowest(requirement: Requirement) -> str:
    """The lowest version that a requirement allows, in three parts."""
    (bound,) = (specifier.version for specifier in requirement.specifier if specifier.operator == ">=")
    return ".".join(map(str, (*Version(bound).release, 0, 0)[:3]))


def try_with_lowest_core(package: Package, core: Package, root: Path, folder: Path) -> str:
    """Import all of a package and run an operator's example, with the lowest core; a sentence that says with which.

    Raises:
        RuntimeError: it does not work, or that core cannot be had.
    """
    requirement = package.needs(CORE)
    assert requirement is not None
    version = lowest(requirement)
    built = folder / "wheels"
    wheels.build(package, built, root)
    if tagged := _checkout(core, version, root, folder / "tag"):
        wheels.build(tagged, built, folder / "tag")
    elif core.version == version:
        wheels.build(core, built, root)
    else:
        raise RuntimeError(f"{package.key} allows npu-tiling {version}, which has no tag {CORE}-v{version} to try it with.")
    environment = wheels.Environment(folder / "environment")
    needed = [*package.requires, *package.tests]  # pytest, for a plugin of it
    environment.show(of_others(needed, read_packages(root).values()), folder / "links")
    environment.install(package.name, f"{CORE}=={version}", find=built)
    # The examples of development packages are parts of programs.
    example = "\n".join(wheels.readme_blocks(package, root)) if package.is_operator else ""
    environment.run(IMPORT_EVERYTHING.format(module=package.module) + example)
    source = f"the tag {CORE}-v{version}" if tagged else "the working tree, as no release has a tag yet"
    did = "imports and runs its example" if package.is_operator else "imports"
    return f"{package.key} {did} with npu-tiling {version}, from {source}."


def _checkout(core: Package, version: str, root: Path, folder: Path) -> Package | None:
    """The core as it was at a release, in `folder`; None where there is no tag for it."""
    command = ["git", "archive", "--format=tar", f"{CORE}-v{version}", str(core.folder)]
    done = subprocess.run(command, cwd=root, capture_output=True)
    if done.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return read_packages(folder)[core.key]
