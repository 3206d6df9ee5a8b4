"""This host's C compiler and processor."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shlex
import shutil
from pathlib import Path

from ..errors import CompilationError, ToolchainMissingError
from ..toolchain.messages import reason
from ..toolchain.processes import run

_LEVELS = {  # x86-64 levels, highest first, each with a feature that implies it
    "x86-64-v4": "avx512vl",
    "x86-64-v3": "avx2",
}


def c_compiler() -> list[str]:
    """The C compiler's command line: the environment variable CC, else cc, gcc or clang.

    Raises:
        ToolchainMissingError: there is none.
    """
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(candidate)
        if words and shutil.which(words[0]):
            return words
    raise ToolchainMissingError("emulation needs a C compiler (cc, gcc or clang): install one, or name it in CC")


def missing_c_compiler() -> str | None:
    """Why there is no C compiler, None if there is one."""
    try:
        c_compiler()
    except ToolchainMissingError as error:
        return str(error)
    return None


@functools.cache
def host_cpu() -> str:
    """The processor that LLVM compiles for."""
    if platform.machine() != "x86_64":
        return "generic"
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    except OSError:
        flags = []
    return next((level for level, flag in _LEVELS.items() if flag in flags), "x86-64")


def host_triple() -> str:
    """LLVM's name for this host."""
    return f"{platform.machine()}-unknown-linux-gnu"


@functools.cache
def has_c_function(name: str) -> bool:
    """True if the C mathematics library has a function of that name."""
    return hasattr(ctypes.CDLL("libm.so.6"), name)


def run_c_compiler(*arguments: str | Path) -> None:
    """Run it.

    Raises:
        CompilationError: it refuses what it is given.
    """
    done = run([*c_compiler(), *arguments])
    if done.returncode:
        raise CompilationError(f"{c_compiler()[0]} failed:\n{reason(done.stderr)}")
