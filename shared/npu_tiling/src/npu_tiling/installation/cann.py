"""Which CANN is set up here, and which release of triton-ascend belongs to it."""

from __future__ import annotations

import os
import re
from pathlib import Path

TRITON_ASCEND = {"8.5": "3.2.0", "9.0": "3.2.1", "9.1": "3.2.2"}
"""By the release of CANN, as triton-ascend's installation guide and vllm-ascend pair them. The public index has 3.2.0."""

_VERSION_FILES = ("*-linux/ascend_toolkit_install.info", "runtime/version.info", "compiler/version.info", "version.info")
_VERSION = re.compile(r"^version=[vV]?(\d+\.\d+)", re.IGNORECASE | re.MULTILINE)


def cann_version() -> str | None:
    """The release of CANN at ASCEND_HOME_PATH, as "9.1"; None where none is set up or it does not say.

    It is read from the files that CANN's installers leave, or from the name of its folder.
    """
    home = os.environ.get("ASCEND_HOME_PATH")
    if not home:
        return None
    folder = Path(home).resolve()
    for pattern in _VERSION_FILES:
        for file in sorted(folder.glob(pattern)):
            found = _VERSION.search(file.read_text(errors="replace"))
            if found:
                return found[1]
    named = re.search(r"(\d+\.\d+)", folder.name)
    return named[1] if named else None


def expected_triton_ascend() -> str | None:
    """The release of triton-ascend that belongs to the CANN that is set up; None where that is not known."""
    version = cann_version()
    return None if version is None else TRITON_ASCEND.get(version)
