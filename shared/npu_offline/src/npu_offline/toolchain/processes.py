"""Runs other programs, each with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CompilationError

COMPILE_SECONDS = 900
"""For one compilation: a limit for what hangs, not for what is slow."""


def run(
    command: Sequence[str | Path], *, seconds: float = COMPILE_SECONDS, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; its output is text.

    Args:
        command: the program and its arguments.
        seconds: how long it may take.
        options: as `subprocess.run` takes them.

    Raises:
        CompilationError: it took longer, and was stopped.
    """
    try:
        return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=seconds, **options)
    except subprocess.TimeoutExpired:
        raise CompilationError(f"{Path(command[0]).name} was stopped: it took more than {seconds:g} s") from None
