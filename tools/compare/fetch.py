"""Fetches what the comparison needs of other projects, at the commits that were measured, into the cache folder."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import types
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from npu_offline import OfflineError, record

from .points import Source

MIRROR = "NPU_COMPARE_MIRROR"
"""An environment variable: where repositories lie instead, a path or address with {owner} and {name}."""
_ADDRESS = "https://github.com/{owner}/{name}"


def folder(source: Source, commit: str) -> Path:
    """Where the source's files of a commit lie; fetched if they do not.

    Raises:
        OfflineError: they cannot be fetched.
    """
    owner, name = source.repository.split("/")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "npu-compare"
    target = cache / f"{owner}+{name}@{commit.replace('~', '-')}"
    if not target.is_dir():
        repository = os.environ.get(MIRROR, _ADDRESS).format(owner=owner, name=name)
        packed = _archive(repository, cache / f"{owner}+{name}.git", commit, source.paths)
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(target, filter="data")
    return target


def _archive(repository: str, clone: Path, commit: str, paths: Sequence[str]) -> bytes:
    if Path(repository).is_dir():
        clone = Path(repository)
    elif not clone.is_dir():
        _git("clone", "--quiet", "--bare", "--filter=blob:none", repository, str(clone))
    return _git("--git-dir", str(clone), "archive", commit, "--", *paths)


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], capture_output=True)
    if done.returncode:
        raise OfflineError(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


@contextlib.contextmanager
def module(
    root: Path, name: str, stand_ins: Sequence[str], soc: str, helpers: dict[str, Any] | None = None
) -> Iterator[Any]:
    """A module of a checkout, until the block ends. Empty packages stand in for those that import all of a project.

    Args:
        root: of the checkout.
        name: of the module.
        stand_ins: names of packages, parents first.
        soc: the chip that the module is told when it asks while it is imported.
        helpers: modules in place of the project's, by name.
    """
    top = name.partition(".")[0]
    before = {key: value for key, value in sys.modules.items() if key.partition(".")[0] == top}
    for key in before:
        del sys.modules[key]
    for package in stand_ins:
        made = types.ModuleType(package)
        made.__path__ = [str(root / package.replace(".", "/"))]
        sys.modules[package] = made
    sys.modules.update(helpers or {})
    try:
        with record(soc):
            yield importlib.import_module(name)
    finally:
        for key in [key for key in sys.modules if key.partition(".")[0] == top]:
            del sys.modules[key]
        sys.modules.update(before)


def file(path: Path) -> Any:
    """A file as a module."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    loaded = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loaded)
    return loaded
