"""The cache folder: everything in it can be made again."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import OfflineError

TOOLCHAINS = "toolchains"
"""The folder of the cache with the compilers."""

_PACKAGE = Path(__file__).parents[1]
_DIGEST_BYTES = 64  # SHA-256 in hexadecimal


def cache_dir() -> Path:
    """The cache folder: the environment variable NPU_OFFLINE_CACHE, else npu-offline in the user's cache folder."""
    chosen = os.environ.get("NPU_OFFLINE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu-offline"


@functools.cache
def source_digest(*files: str) -> str:
    """A digest of source files of this package: in a cache key, it gives results up when the code that made them changes."""
    digest = hashlib.sha256()
    for name in files:
        digest.update(name.encode() + (_PACKAGE / name).read_bytes())
    return digest.hexdigest()


def private_folder(name: str) -> Path:
    """A folder of the cache that other users can neither read nor write, made where it is missing.

    Raises:
        OfflineError: it cannot be made; or it, or the cache folder, is another user's or can be written by everybody.
    """
    folder = cache_dir() / name
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OfflineError(f"{folder} cannot be made: {error.strerror}. Name a folder in NPU_OFFLINE_CACHE") from None
    for path in (folder.parent, folder):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & stat.S_IWOTH:
            raise OfflineError(
                f"{path} is another user's or can be written by everybody: name a folder in NPU_OFFLINE_CACHE"
            )
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def checked(path: Path, build: Callable[[], bytes]) -> bytes:
    """The content of a file of the cache, whose digest follows it; `build` makes it where the file is missing or damaged."""
    try:
        whole = path.read_bytes()
        data, digest = whole[:-_DIGEST_BYTES], whole[-_DIGEST_BYTES:]
        if hashlib.sha256(data).hexdigest().encode() == digest:
            return data
    except FileNotFoundError:
        pass
    data = build()
    write_atomically(path, data + hashlib.sha256(data).hexdigest().encode())  # at the end, which a dynamic linker ignores
    return data


def sizes() -> dict[str, int]:
    """The bytes of each folder of the cache."""
    if not cache_dir().is_dir():
        return {}
    folders = sorted(path for path in cache_dir().iterdir() if path.is_dir())
    return {folder.name: sum(f.lstat().st_size for f in folder.rglob("*") if not f.is_dir()) for folder in folders}


def clean(*, toolchains: bool = False) -> int:
    """Empty the cache but for the compilers, or with them if `toolchains`; returns the bytes that were removed."""
    removed = 0
    for name, size in sizes().items():
        if name != TOOLCHAINS or toolchains:
            folder = cache_dir() / name
            folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
            removed += size
    return removed


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` so that other processes see the whole file or none."""
    cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
