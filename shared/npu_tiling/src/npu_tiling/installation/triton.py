"""Which Triton is installed, whether it can work here, and what to type where it cannot: `python -m npu_tiling` prints it.

Stock `triton` and `triton-ascend` install the same module, and every PyTorch with CUDA asks for the first. pip then installs
both, each over files of the other. All of this is read from what pip wrote down; nothing is imported.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from .cann import cann_version, expected_triton_ascend

TRITON_ASCEND = "3.2.0"
"""The release of triton-ascend whose compiler stages npu-offline drives; the newest that the public index has."""

TRITON_ASCEND_RANGE = ">=3.2.0,<3.3"
"""What the extra `npu` takes."""

WHEELS_PYTHON = ((3, 9), (3, 11))
"""The oldest and the newest Python that it has wheels for."""

WHEELS_MACHINES = ("x86_64", "aarch64")
"""The machines that it has wheels for, all under Linux."""

_HASHED_BYTES = 1 << 20  # larger files, the shared libraries, are compared by size


@dataclass(frozen=True)
class Problem:
    """Something that keeps Triton from working.

    Attributes:
        what: one sentence.
        cure: the commands that mend it, in order; none where no command does.
    """

    what: str
    cure: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} Cure: {' && '.join(self.cure)}" if self.cure else self.what


REINSTALL_ASCEND = f"pip install --force-reinstall --no-deps triton-ascend=={TRITON_ASCEND}"
CURE_ASCEND = ("pip uninstall -y triton", REINSTALL_ASCEND)
"""What leaves triton-ascend alone and whole, whatever was installed before, in whatever order."""


BUILDS_WITH = "pybind11"
"""What triton-ascend imports and its metadata do not ask for; the extra `npu` does."""


def reinstall_ascend() -> tuple[str, ...]:
    """The lines that install the release of triton-ascend that belongs to the CANN that is set up, and what it lacks."""
    release = expected_triton_ascend() or TRITON_ASCEND
    line = REINSTALL_ASCEND.replace(TRITON_ASCEND, release)
    if release != TRITON_ASCEND:
        line += " --extra-index-url INDEX  # the index that triton-ascend's installation guide names"
    return (line, *_install_what_it_builds_with())


def _install_what_it_builds_with() -> tuple[str, ...]:
    return () if version(BUILDS_WITH) else (f"pip install {BUILDS_WITH}",)


def version(distribution: str) -> str | None:
    """The version of an installed distribution, None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_wheel() -> str | None:
    """Why pip finds no triton-ascend for this Python and this machine, None if it does."""
    oldest, newest = (".".join(map(str, python)) for python in WHEELS_PYTHON)
    wheels = f"triton-ascend {TRITON_ASCEND} has wheels for Python {oldest} to {newest}"
    if not WHEELS_PYTHON[0] <= sys.version_info[:2] <= WHEELS_PYTHON[1]:
        return f"{wheels}, and this is Python {platform.python_version()}."
    if platform.system() != "Linux" or platform.machine() not in WHEELS_MACHINES:
        return f"{wheels} on Linux ({', '.join(WHEELS_MACHINES)}), and this is {platform.system()} on {platform.machine()}."
    return None


def damaged_files(distribution: str) -> list[str]:
    """The files of an installed distribution that are missing or not its own."""
    found = importlib.metadata.distribution(distribution)
    damaged = []
    for name, recorded, size in csv.reader((found.read_text("RECORD") or "").splitlines()):
        algorithm, _, digest = recorded.partition("=")
        if not algorithm:  # what Python compiled, and the record itself
            continue
        path = Path(str(found.locate_file(name)))
        try:
            if int(size) < _HASHED_BYTES:
                same = _digest(algorithm, path.read_bytes()) == digest
            else:
                same = path.stat().st_size == int(size)
        except OSError:
            same = False
        if not same:
            damaged.append(name)
    return damaged


def _digest(algorithm: str, data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.new(algorithm, data).digest()).rstrip(b"=").decode()


def triton_problem(*, ascend: bool | None = None) -> Problem | None:
    """What is wrong with the installed Triton, None if nothing is.

    Args:
        ascend: Triton is to compile for Ascend; None: where torch_npu is installed.
    """
    if ascend is None:
        ascend = version("torch_npu") is not None
    stock, ours = version("triton"), version("triton-ascend")
    reinstall = reinstall_ascend()
    cure = (CURE_ASCEND[0], *reinstall)
    if stock and ours:
        what = f"triton {stock} and triton-ascend {ours} are both installed, each over files of the other."
        cuda = f"pip uninstall -y triton-ascend && pip install --force-reinstall --no-deps triton=={stock}"
        return Problem(what if ascend else f"{what} To keep the one for CUDA instead: {cuda}.", cure)
    if ascend and not ours:
        reason = missing_wheel()
        if reason:
            return Problem(f"triton-ascend is not installed: {reason}")
        if stock:
            return Problem(f"triton {stock} does not compile for Ascend, and triton-ascend is not installed.", cure)
        return Problem("triton-ascend is not installed.", reinstall)
    expected = expected_triton_ascend()
    if ascend and expected is not None and ours != expected:
        return Problem(f"triton-ascend {ours} is for another CANN than {cann_version()}, which takes {expected}.", reinstall)
    name, found = ("triton-ascend", ours) if ours else ("triton", stock)
    more = _install_what_it_builds_with() if ours else ()
    damaged = damaged_files(name) if found else []
    if damaged:
        files = ", ".join(damaged[:3]) + (", ..." if len(damaged) > 3 else "")
        what = f"{name} {found} is damaged: {len(damaged)} of its files are missing or another's ({files})."
        return Problem(what, (f"pip install --force-reinstall --no-deps {name}=={found}", *more))
    if more:
        return Problem(f"triton-ascend {ours} imports {BUILDS_WITH}, which is not installed.", more)
    return None
