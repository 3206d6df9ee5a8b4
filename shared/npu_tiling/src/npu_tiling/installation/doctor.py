"""What is installed for the kernels, what keeps them from running, and the commands that mend it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .triton import Problem, missing_wheel, triton_problem, version

_SECONDS = 300  # torch from a cold disk takes tens of them
DISTRIBUTIONS = ("torch", "torch_npu", "triton", "triton-ascend")


def import_error(module: str) -> str | None:
    """The last line that Python says where importing `module` fails, None where it works; in a process of its own."""
    try:
        done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"importing it took more than {_SECONDS} s"
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return said[-1] if done.returncode else None


def is_cuda_build() -> bool:
    """Whether the installed torch is a build with CUDA, by the file in which it says so; nothing is imported.

    What it requires does not tell: wheels for aarch64 without CUDA name what wheels for x86-64 require.
    """
    try:
        said = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py"))).read_text()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return False
    return re.search(r"^cuda\b.*= ['\"]", said, re.MULTILINE) is not None


def torch_npu_problems() -> list[Problem]:
    """What keeps the installed torch_npu from loading into the installed torch."""
    found = []
    torch, torch_npu = version("torch"), version("torch_npu")
    if torch and torch_npu and torch.split(".")[:2] != torch_npu.split(".")[:2]:
        cure = f"pip install torch=={'.'.join(torch_npu.split('.')[:3])}"
        found.append(Problem(f"torch_npu {torch_npu} is for another torch than {torch}.", (cure,)))
    if torch and torch_npu and is_cuda_build():
        release = torch.partition("+")[0]
        cure = f"pip install --force-reinstall --no-deps torch=={release} --index-url ADDRESS_OF_CPU_BUILDS"
        found.append(Problem(f"torch {torch} is a build with CUDA, into which torch_npu does not load.", (cure,)))
    return found


def problems(*, ascend: bool | None = None) -> list[Problem]:
    """Everything that keeps kernels from running here, worst first.

    Args:
        ascend: they are to run on Ascend, or to be compiled for it; None: where torch_npu is installed.
    """
    found = []
    ascend = version("torch_npu") is not None if ascend is None else ascend
    triton = triton_problem(ascend=ascend)
    if triton:
        found.append(triton)
    found += torch_npu_problems()
    if not found:
        for module in ("torch", "triton"):
            error = import_error(module) if version(module) or (module == "triton" and version("triton-ascend")) else None
            if error:
                hint = " Is CANN's set_env.sh sourced?" if version("torch_npu") and module == "torch" else ""
                found.append(Problem(f"`import {module}` fails: {error.rstrip('.')}.{hint}"))
                break
    return found


def main(*, ascend: bool | None = None, more: Callable[[], list[Problem]] | None = None) -> int:
    """Print what is here and what is wrong; returns the exit status, 1 where something is.

    Args:
        ascend: as in `problems`.
        more: further problems, found by a package that builds on this one.
    """
    print(f"Python {platform.python_version()} ({sys.executable}), {platform.system()} on {platform.machine()}")
    print(", ".join(f"{name} {version(name) or 'not installed'}" for name in DISTRIBUTIONS))
    print(f"CANN: {os.environ.get('ASCEND_HOME_PATH') or 'ASCEND_HOME_PATH is not set (its set_env.sh sets it)'}")
    reason = missing_wheel()
    print(f"Ascend: {reason or 'triton-ascend has wheels for this Python and machine'}")
    found = problems(ascend=ascend) + (more() if more else [])
    for problem in found:
        print(f"\nProblem: {problem.what}")
        for command in problem.cure:
            print(f"    {command}")
    if not found:
        none = not (version("triton") or version("triton-ascend"))
        print("No problem found." + (" Without a Triton, operators run on CPU tensors alone." if none else ""))
    return 1 if found else 0
