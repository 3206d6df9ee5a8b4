"""The Ascend compilers: where they are, how they get there, what each can compile for."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import npu_tiling

from .cache import cache_dir
from .errors import OfflineError, ToolchainMissingError, UnsupportedError

VERSIONS = ("1.0.0", "1.1.0", "1.2.0")
"""Versions of the distribution ascendnpu-ir, oldest first: of CANN 8.5, of CANN 9.0, and of about CANN 9.1."""


def _folder(version: str) -> Path:
    if version not in VERSIONS:
        raise OfflineError(f"toolchain is {version!r}, must be one of {', '.join(VERSIONS)}")
    return cache_dir() / "toolchains" / version


def fetch(versions: Iterable[str] = VERSIONS) -> list[Path]:
    """Install the given compiler versions into the cache folder with pip; those already there are left alone.

    Each version is installed beside its final place and then renamed, so that processes that fetch at the same time, or
    are interrupted, never leave half a toolchain.

    Returns:
        The folder of each version.

    Raises:
        OfflineError: pip failed; the message ends with what it said.
    """
    folders = []
    for version in versions:
        folder = _folder(version)
        folders.append(folder)
        if folder.is_dir():
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{version}."))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        try:
            done = subprocess.run(
                [*command, "--target", str(staging), f"ascendnpu-ir=={version}"], capture_output=True, text=True
            )
            if done.returncode:
                raise OfflineError(f"pip could not install ascendnpu-ir=={version}:\n{done.stderr[-2000:]}")
            staging.chmod(0o755)
            try:
                os.rename(staging, folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folders


def installed() -> tuple[str, ...]:
    """The versions that are in the cache folder."""
    return tuple(version for version in VERSIONS if _folder(version).is_dir())


def tool(version: str, name: str) -> Path:
    """The path of one program of a toolchain.

    Raises:
        ToolchainMissingError: the version has not been fetched.
        UnsupportedError: the version has no such program.
    """
    folder = _folder(version)
    if not folder.is_dir():
        raise ToolchainMissingError(f"toolchain {version} is not in {folder.parent}: run `npu-offline fetch {version}`")
    path = folder / "ascendnpuir" / "bin" / name
    if not path.exists():
        raise UnsupportedError(f"toolchain {version} has no {name}")
    return path


@functools.cache
def _targets(path: Path) -> frozenset[str]:
    """The targets that a compiler lists below --target in its help."""
    text = subprocess.run([path, "--help"], capture_output=True, text=True, check=True).stdout
    section = re.split(r"^ +--", text.partition("--target=")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return frozenset(re.findall(r"^ +=(\S+)", section, flags=re.MULTILINE)) - {"Unknown"}


def compiler(soc: str, toolchain: str) -> Path | None:
    """The program of `toolchain` that compiles for `soc`, None if it has none.

    Ascend950 parts belong to bishengir-compile-a5. The plain compiler lists their names too, but it is not the one that
    knows their vector units.
    """
    name = "bishengir-compile-a5" if is_a5(soc) else "bishengir-compile"
    try:
        path = tool(toolchain, name)
    except UnsupportedError:
        return None
    return path if soc in _targets(path) else None


def printer(soc: str, toolchain: str) -> Path:
    """The program of a toolchain that prints what it compiles for `soc` in MLIR's generic form."""
    return tool(toolchain, "bishengir-opt-a5" if is_a5(soc) else "bishengir-opt")


def is_a5(soc: str) -> bool:
    """True for the Ascend950 family (architecture dav-c310)."""
    return npu_tiling.soc(soc).arch == "dav-c310"


def supported(soc: str, toolchain: str) -> bool:
    """True if that toolchain version can compile for that chip."""
    return compiler(soc, toolchain) is not None
