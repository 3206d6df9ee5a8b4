"""Where this package keeps what it may rebuild at any time, and how it writes there."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder: the environment variable NPU_OFFLINE_CACHE, else npu-offline in the user's cache folder."""
    chosen = os.environ.get("NPU_OFFLINE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu-offline"


@functools.cache
def source_digest(*files: str) -> str:
    """A digest of source files of this package: part of a cache key, so that no result outlives the code that made it."""
    digest = hashlib.sha256()
    for name in files:
        digest.update(name.encode() + (Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write `path` so that other processes see the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
