"""Places in source code, as explanations name them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType


def place_of(frame: FrameType) -> str:
    """File and line of a frame, the file from its package's folder on: "npu_rms_norm/cuda/tiling.py:71"."""
    return place_in(frame.f_code.co_filename, frame.f_globals.get("__name__", ""), frame.f_lineno)


def place_in(file: str, module: str, line: int) -> str:
    """The same of a line of a module's file."""
    path = Path(file)
    folders = module.count(".") + (path.name == "__init__.py")
    return f"{'/'.join(path.parts[-folders - 1 :])}:{line}"


def here(depth: int = 1) -> str:
    """The place of the caller, or of the caller's caller (2): a rule, or a row of a table, that decides a launch."""
    return place_of(sys._getframe(depth))
